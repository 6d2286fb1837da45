"""``sandbox-kernel logs``: what a sandbox has to say about itself."""

from __future__ import annotations

import argparse
import asyncio

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find import sandbox
from sandbox_kernel.cli.parser import Commands, add_command, add_sandbox
from sandbox_kernel.text import printable

INTERVAL = 0.5
_MARK = 1000


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "logs",
        run,
        "show a sandbox's log",
        details="That is what the sandbox and its agent have written,\nwith control characters "
        "escaped. What the kernel process prints goes to the log of the\nJupyter server when the "
        "kernel dies: asking for it would take the kernel over.",
        examples=("logs kernel-1a2b3c4d", "logs -n 20 kernel-1a2b3c4d", "logs -f work/demo.ipynb"),
    )
    add_sandbox(parser)
    parser.add_argument(
        "-n", "--tail", type=int, metavar="N", help="only the last N lines (default: all)"
    )

    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with what is written, until it ends"
    )


def run(arguments: argparse.Namespace) -> int:
    foreground.run(
        _logs(arguments.name, arguments.backend, arguments.tail, follow=arguments.follow)
    )
    return 0


async def _logs(name: str, backend: str | None, tail: int | None, *, follow: bool) -> None:
    async with sandbox(name, backend) as (_, handle):
        _print(await handle.logs(tail=tail))
        if not follow:
            return
        shown = await handle.logs()
        while True:
            await asyncio.sleep(INTERVAL)
            # In this order: what was written before it ended is in the log then.
            ended = (await handle.info()).status in ("stopped", "gone")
            log = await handle.logs()
            _print(_added(shown, log))
            shown = log
            if ended:
                return


def _added(before: str, after: str) -> str:
    """What came to a log of which only the end is kept."""
    if after.startswith(before):
        return after[len(before) :]
    # Its beginning was dropped: go on behind what was last seen of it.
    mark = before[-_MARK:]
    return after[after.rfind(mark) + len(mark) :] if mark in after else after


def _print(text: str) -> None:
    if text:
        print(printable(text.removesuffix("\n")), flush=True)
