"""``sandbox-kernel logs``."""

from __future__ import annotations

import argparse
import asyncio

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import sandbox
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.untrusted_text import printable

INTERVAL = 0.5
_MARK = 1000


def add(commands: Commands) -> None:
    parser = add_command(commands, "logs", run)
    parser.add_sandbox()
    about = "only the last N lines (default: all)"
    parser.add_argument("-n", "--tail", type=int, metavar="N", help=about)
    parser.add_flag("-f", "--follow", help="print new lines until the sandbox ends")


def run(arguments: argparse.Namespace) -> None:
    """Show a sandbox's log.

    The sandbox and its agent write it; control characters are escaped. Output of the kernel process
    goes to the log of the Jupyter server when the kernel dies: reading it here would take the
    kernel over.

    examples:
      sandbox-kernel logs kernel-1a2b3c4d
      sandbox-kernel logs -n 20 kernel-1a2b3c4d
      sandbox-kernel logs -f work/demo.ipynb
    """
    foreground.run(_logs(arguments))


async def _logs(arguments: argparse.Namespace) -> None:
    async with sandbox(arguments.name, arguments.backend) as (_, handle):
        _print(await handle.logs(tail=arguments.tail))
        if not arguments.follow:
            return
        shown = await handle.logs()
        while True:
            await asyncio.sleep(INTERVAL)
            # First the status, then the log: so no line that was written before the end is missed.
            ended = (await handle.info()).status in ("stopped", "gone")
            log = await handle.logs()
            _print(_added(shown, log))
            shown = log
            if ended:
                return


def _added(before: str, after: str) -> str:
    """The new lines of a log of which only the end is kept."""
    if after.startswith(before):
        return after[len(before) :]
    # Its beginning was dropped: continue behind the last lines that were printed.
    mark = before[-_MARK:]
    return after[after.rfind(mark) + len(mark) :] if mark in after else after


def _print(text: str) -> None:
    if text:
        print(printable(text.removesuffix("\n")), flush=True)
