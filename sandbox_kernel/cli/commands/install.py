"""``sandbox-kernel install``: make a kernel that people can choose in Jupyter."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.diagnosis import diagnose
from sandbox_kernel.cli.parser import Commands, add_command, add_spec_options, spec_values
from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.jupyter.configuration import OWN_HELP, read_configuration


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
    pausing = parser.add_argument_group("hosted sandboxes and microVMs that can be paused")
    pausing.add_argument("--pause-on-exit", action="store_true", help=OWN_HELP["pause_on_exit"])
    pausing.add_argument(
        "--idle-pause-seconds", metavar="SECONDS", type=float, help=OWN_HELP["idle_pause_seconds"]
    )
    # A sandbox's name in a kernelspec would let only one kernel run at a time.
    add_spec_options(parser, leave_out=["name"])


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from sandbox_kernel.jupyter.hosting import check_pausing
    from sandbox_kernel.jupyter.kernelspec import write_kernelspec
    from sandbox_kernel.sandboxes.backends import load_backend
    from sandbox_kernel.spec import SandboxSpec

    values = spec_values(arguments)
    spec = SandboxSpec.from_mapping(values, where="the command line")
    client = load_backend(arguments.backend)
    client.check(spec)
    pausing = _pausing(arguments)
    check_pausing(read_configuration(pausing, default_name="kernel"), client)
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
        pausing=pausing,
        argv=arguments.command or None,
        language=arguments.language or "python",
        launcher=arguments.launcher,
        user=arguments.user,
        prefix=arguments.prefix,
    )
    name = Path(folder).name
    print(f"Installed the kernel {name!r} in {folder}")
    print("Choose it in JupyterLab's launcher, or for example:")
    print(f"  jupyter console --kernel {name}")
    print(f"  jupyter execute --kernel_name={name} notebook.ipynb")
    return 0


def _pausing(arguments: argparse.Namespace) -> dict[str, object]:
    given = {
        "pause_on_exit": arguments.pause_on_exit or None,
        "idle_pause_seconds": arguments.idle_pause_seconds,
    }
    return {key: value for key, value in given.items() if value is not None}
