"""``sandbox-kernel uninstall``: remove a kernel from Jupyter."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli.parser import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "uninstall",
        run,
        "remove a kernel that `install` made",
        details="Kernels\nof other projects are left alone; sandboxes that run are not touched.",
        examples=("uninstall small",),
    )
    parser.add_argument("name", metavar="NAME", help="the kernel's name, as `list` shows it")


def run(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.jupyter.kernelspec import remove_kernelspec

    print(f"Removed {remove_kernelspec(arguments.name)}")
    return 0
