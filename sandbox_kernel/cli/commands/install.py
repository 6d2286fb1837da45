"""``sandbox-kernel install``, ``uninstall`` and ``list``."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.commands.doctor import diagnose
from sandbox_kernel.cli.egress_notice import egress_notice
from sandbox_kernel.cli.formatting import note, print_json, table
from sandbox_kernel.cli.options import Commands, add_command, given_settings
from sandbox_kernel.errors import SandboxUnavailable, SpecError
from sandbox_kernel.jupyter.configuration import read_configuration
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.spec import FORMER_VOLUME, SETTINGS, KernelConfiguration, SandboxSpec


def add(commands: Commands) -> None:
    usage = "BACKEND [options] [-- KERNEL ARGV...]"
    parser = add_command(commands, "install", install, usage=usage, takes_command=False)
    parser.add_argument("backend", metavar="BACKEND", help="local, or another that `doctor` lists")
    parser.add_argument("--name", metavar="NAME", help="the kernel's name (default: sandbox-...)")
    parser.add_argument("--display-name", metavar="TEXT", help="its title in Jupyter")
    about = "of the kernel behind -- (default: python)"
    parser.add_argument("--language", metavar="LANGUAGE", default="python", help=about)
    about = "for clients that start kernels without jupyter_client, such as VS Code"
    parser.add_flag("--launcher", help=about)
    parser.add_flag("--unchecked", help="do not try first whether the backend works here")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="install for this user only")
    about = "install there (default: this Python's environment)"
    place.add_argument("--prefix", metavar="FOLDER", help=about)
    parser.add_settings(of=KernelConfiguration, leave_out="backend")
    # A sandbox's name in a kernelspec would let only one kernel run at a time.
    parser.add_settings(of=SandboxSpec, leave_out="name")
    parser = add_command(commands, "uninstall", uninstall)
    parser.add_argument("name", metavar="NAME", help="the kernel's name, as `list` shows it")
    add_command(commands, "list", list_).add_json()


def install(arguments: argparse.Namespace) -> int:
    """Make a sandboxed kernel that can be chosen in Jupyter.

    Writes a kernelspec with the limits given here. A request that the backend cannot enforce is
    refused, and nothing is written.

    examples:
      sandbox-kernel install local --name small --memory-mib 512 --cpus 1
      sandbox-kernel install local --name project --python ./.venv/bin/python --readable ./data
      sandbox-kernel install local --name analysis --files mount-ro
      sandbox-kernel install local --name vscode --launcher  # for clients without provisioners
      sandbox-kernel install local --name sandbox-bash --language bash \\
          -- python -m bash_kernel -f {connection_file}
    """
    # lazy: start-up time
    from jupyter_client.kernelspec import KernelSpecManager

    from sandbox_kernel.jupyter.file_plan import fallback_notice, with_folder
    from sandbox_kernel.jupyter.kernelspec import write_kernelspec

    values = given_settings(arguments)
    _check_launcher(arguments, values)
    configuration = read_configuration(
        values, default_name="kernel", environ={}, where="the command line"
    )
    client = load_backend(arguments.backend)
    client.check(configuration.spec)
    client.capabilities.check_kernel(configuration, client.backend)
    if arguments.launcher:
        client.check(with_folder(configuration, "/").spec)
    elif notice := fallback_notice(replace(configuration, backend=arguments.backend)):
        note(notice)
    if not arguments.unchecked:
        checks = foreground.run(diagnose(arguments.backend))
        problems = [f"{check.what}. {check.fix}".strip() for check in checks if check.ok is False]
        if problems:
            raise SandboxUnavailable(
                f"Nothing was installed: the backend {arguments.backend!r} does not work here: "
                f"{' '.join(problems)} To install it anyway, add --unchecked."
            )
    folder = write_kernelspec(
        name=arguments.name,
        display_name=arguments.display_name,
        backend=arguments.backend,
        config=values,
        argv=arguments.command or None,
        language=arguments.language,
        launcher=arguments.launcher,
        user=arguments.user,
        prefix=arguments.prefix,
    )
    name = Path(folder).name
    print(f"Installed the kernel {name!r} in {folder}")
    if notice := egress_notice(client, configuration.spec.egress):
        print(notice)
    first = KernelSpecManager().find_kernel_specs().get(name, folder)
    if not arguments.prefix and not os.path.samefile(first, folder):
        note(
            f"Jupyter does not see it, since the kernel {name!r} in {first} comes first. Install "
            f"it with another --name, or remove that one."
        )
        return 1
    print("Choose it in JupyterLab's launcher, or for example:")
    print(f"  jupyter console --kernel {name}")
    print(f"  jupyter execute --kernel_name={name} notebook.ipynb")
    return 0


def _check_launcher(arguments: argparse.Namespace, values: dict[str, object]) -> None:
    """Refuse what the chosen way to start kernels cannot do. Kernels of a launcher have no saved
    workspace, but a volume keeps the files of /workspace."""
    if not arguments.launcher:
        if "volume" in values:
            arguments.parser.error(
                "--volume is for --launcher. Other kernels have saved workspaces: --workspace"
            )
        if "folder" in values or "folder_writable" in values:
            arguments.parser.error(
                "--folder is for --launcher. Other kernels see their notebook's folder: --files"
            )
        return
    if FORMER_VOLUME in values:
        note("--workspace is called --volume for launchers; it still works, for now.")
        values.setdefault("volume", values.pop(FORMER_VOLUME))
    useless = [key for key in values if SETTINGS[key].only_for == "provisioner" and values[key]]
    if useless:
        raise SpecError(
            f"A kernel that is started through a launcher has no saved workspace and no pool, so "
            f"{', '.join(useless)} would do nothing. Leave it out, or install without --launcher."
        )


def uninstall(arguments: argparse.Namespace) -> None:
    """Remove a kernel that `install` made.

    Kernels of other projects and running sandboxes are left alone.

    examples:
      sandbox-kernel uninstall small
    """
    from sandbox_kernel.jupyter.kernelspec import remove_kernelspec  # lazy: start-up time

    print(f"Removed {remove_kernelspec(arguments.name)}")


def list_(arguments: argparse.Namespace) -> None:
    """List the sandboxed kernels that can be chosen in Jupyter.

    With --json: a list of objects with the keys name, display_name, backend, launcher, path,
    config, outdated.

    examples:
      sandbox-kernel list
      sandbox-kernel list --json
    """
    from sandbox_kernel.jupyter.kernelspec import list_kernelspecs  # lazy: start-up time

    keys = ("name", "display_name", "backend", "launcher", "path", "config", "outdated")
    found = list_kernelspecs()
    if arguments.json:
        print_json([{key: getattr(spec, key) for key in keys} for spec in found])
    else:
        rows = [(spec.name, spec.backend, spec.display_name, spec.path) for spec in found]
        print(table([("NAME", "BACKEND", "SHOWN AS", "FOLDER"), *rows]))
        for spec in found:
            if spec.outdated:
                note(spec.advice)
