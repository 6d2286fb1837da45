"""``sandbox-kernel shell``: an interactive terminal in a sandbox."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find import sandbox
from sandbox_kernel.cli.parser import Commands, add_command, add_sandbox
from sandbox_kernel.cli.streams import STDIN, STDOUT, Session, raw_terminal
from sandbox_kernel.errors import SandboxError

SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "shell",
        run,
        "open a terminal in a sandbox",
        details="Runs bash, or sh where there is no bash, or the\ncommand behind --. All keys, "
        "Ctrl-C too, go to the sandbox; leave with `exit` or Ctrl-D.",
        usage="NAME [[--] CMD [ARGS...]]",
        examples=("shell kernel-1a2b3c4d", "shell kernel-1a2b3c4d -- python"),
        takes_command=False,
        bare=True,
    )
    add_sandbox(parser)


def run(arguments: argparse.Namespace) -> int:
    async def work(session: Session) -> int:
        async with sandbox(arguments.name, arguments.backend) as (_, handle):
            return await session.exec(
                handle, arguments.command or SHELL, env=terminal_environment(), terminal=True
            )

    return on_terminal(work)


def on_terminal(work: Callable[[Session], Coroutine[Any, Any, int]]) -> int:
    """Run what uses a Session with a terminal, with our own in raw mode."""
    if not (os.isatty(STDIN) and os.isatty(STDOUT)):
        raise SandboxError(
            "A terminal is needed, but stdin or stdout is none. Use `sandbox-kernel exec` to run "
            "a command without one."
        )
    session = Session()
    with raw_terminal():
        return foreground.run(work(session), on_signal=session.on_signal, also=(signal.SIGWINCH,))


def terminal_environment() -> dict[str, str]:
    """Programs in the sandbox must know what terminal they write to; nothing else goes in."""
    return {"TERM": os.environ["TERM"]} if os.environ.get("TERM") else {}
