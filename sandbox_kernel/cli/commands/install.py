"""``sandbox-kernel install``: make a kernel that people can choose in Jupyter."""

from __future__ import annotations

import argparse
import os

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.diagnosis import diagnose
from sandbox_kernel.cli.parser import (
    VOLUME_HELP,
    Commands,
    add_command,
    add_kernel_options,
    add_spec_options,
    kernel_values,
    spec_values,
)
from sandbox_kernel.cli.text import note
from sandbox_kernel.errors import SandboxUnavailable, SpecError
from sandbox_kernel.jupyter.configuration import read_configuration

_NOT_OF_LAUNCHERS = (
    *("persist", "upload", "mirror", "mirror_delete", "pool_size", "keep_on_exit"),
)


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "install",
        run,
        "make a sandboxed kernel that can be chosen in Jupyter",
        details="Writes a\nkernelspec with the limits given here. A request that the backend "
        "cannot enforce is\nrefused, and nothing is written.",
        usage="BACKEND [options] [-- KERNEL ARGV...]",
        examples=(
            "install local --name small --memory-mib 512 --cpus 1",
            "install local --name project --python ./.venv/bin/python --readable ./data",
            "install local --name analysis --upload folder --mirror --pool-size 1",
            "install local --name vscode --launcher     # for clients that know no provisioners",
            "install local --name sandbox-bash --language bash -- python -m bash_kernel -f "
            "{connection_file}",
        ),
        takes_command=False,
    )
    parser.add_argument("backend", metavar="BACKEND", help="local, or another that `doctor` lists")
    parser.add_argument("--name", metavar="NAME", help="the kernel's name (default: sandbox-...)")
    parser.add_argument("--display-name", metavar="TEXT", help="what Jupyter shows for it")
    parser.add_argument(
        "--language", metavar="LANGUAGE", help="of the kernel behind -- (default: python)"
    )
    parser.add_argument(
        "--launcher",
        action="store_true",
        help="for clients that start kernels without jupyter_client, such as VS Code",
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="do not try first whether the backend works here"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="install for this user only")
    place.add_argument(
        "--prefix", metavar="FOLDER", help="install there (default: this Python's environment)"
    )
    parser.add_argument("--volume", metavar="NAME", help=f"with --launcher: {VOLUME_HELP}")
    add_kernel_options(parser, leave_out=["backend"])
    # A sandbox's name in a kernelspec would let only one kernel run at a time.
    add_spec_options(
        parser,
        leave_out=["name"],
        workspace="name of the saved workspace of all its kernels (default: one a notebook)",
    )


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from jupyter_client.kernelspec import KernelSpecManager

    from sandbox_kernel.jupyter.hosting import check_pausing
    from sandbox_kernel.jupyter.kernelspec import write_kernelspec
    from sandbox_kernel.sandboxes.backends import load_backend
    from sandbox_kernel.spec import SandboxSpec

    values, settings = spec_values(arguments), kernel_values(arguments)
    _check_launcher(arguments, values, settings)
    spec = SandboxSpec.from_mapping(values, where="the command line")
    client = load_backend(arguments.backend)
    client.check(spec)
    check_pausing(read_configuration(settings, default_name="kernel", environ={}), client)
    if not arguments.unchecked:
        checks = foreground.run(diagnose(arguments.backend))
        problems = [f"{check.what}. {check.fix}".strip() for check in checks if check.ok is False]
        if problems:
            raise SandboxUnavailable(
                f"Nothing was installed: the backend {arguments.backend!r} does not work here: "
                f"{' '.join(problems)} To install it all the same, say --unchecked."
            )
    folder = write_kernelspec(
        name=arguments.name,
        display_name=arguments.display_name,
        backend=arguments.backend,
        spec_config=values,
        settings=settings,
        argv=arguments.command or None,
        language=arguments.language or "python",
        launcher=arguments.launcher,
        user=arguments.user,
        prefix=arguments.prefix,
    )
    name = Path(folder).name
    print(f"Installed the kernel {name!r} in {folder}")
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


def _check_launcher(
    arguments: argparse.Namespace, values: dict[str, object], settings: dict[str, object]
) -> None:
    """What a launcher cannot do is refused. Its kernels have no saved workspace, but the
    sandbox's /workspace can be kept."""
    if not arguments.launcher:
        if arguments.volume:
            arguments.parser.error(
                "--volume is for --launcher. Other kernels have saved workspaces: --workspace"
            )
        return
    useless = [key for key in _NOT_OF_LAUNCHERS if settings.get(key)]
    if useless:
        raise SpecError(
            f"A kernel that is started through a launcher has no saved workspace and no pool, so "
            f"{', '.join(useless)} would do nothing. Leave it out, or install without --launcher."
        )
    if "workspace" in values:
        note("--workspace is called --volume for launchers; it still works, for now.")
    if arguments.volume:
        values["workspace"] = arguments.volume
