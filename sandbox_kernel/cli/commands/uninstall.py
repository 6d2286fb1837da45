"""``sandbox-kernel uninstall``."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli.options import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(commands, "uninstall", run)
    parser.add_argument("name", metavar="NAME", help="the kernel's name, as `list` shows it")


def run(arguments: argparse.Namespace) -> int:
    """Remove a kernel that `install` made.

    Kernels of other projects and running sandboxes are left alone.

    examples:
      sandbox-kernel uninstall small
    """
    from sandbox_kernel.jupyter.kernelspec import remove_kernelspec  # lazy: start-up time

    print(f"Removed {remove_kernelspec(arguments.name)}")
    return 0
