"""``sandbox-kernel logs``: what a sandbox has to say about itself."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find import sandbox
from sandbox_kernel.cli.parser import Commands, add_command, add_sandbox
from sandbox_kernel.text import printable


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "logs",
        run,
        "show a sandbox's log",
        details="That is what the sandbox and its agent have written,\nwith control characters "
        "escaped. What the kernel process prints goes to the log of the\nJupyter server when the "
        "kernel dies: asking for it would take the kernel over.",
        examples=("logs kernel-1a2b3c4d", "logs -n 20 kernel-1a2b3c4d"),
    )
    add_sandbox(parser)
    parser.add_argument(
        "-n", "--tail", type=int, metavar="N", help="only the last N lines (default: all)"
    )


def run(arguments: argparse.Namespace) -> int:
    text = foreground.run(_logs(arguments.name, arguments.backend, arguments.tail))
    if text:
        print(printable(text.removesuffix("\n")))
    return 0


async def _logs(name: str, backend: str | None, tail: int | None) -> str:
    async with sandbox(name, backend) as (_, handle):
        return await handle.logs(tail=tail)
