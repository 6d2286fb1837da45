"""``sandbox-kernel exec``: run a command in a sandbox that is there."""

from __future__ import annotations

import argparse
from typing import Any

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find import sandbox
from sandbox_kernel.cli.parser import Commands, add_command, add_sandbox
from sandbox_kernel.cli.streams import Session
from sandbox_kernel.errors import SpecError


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "exec",
        run,
        "run a command in a sandbox",
        details="Its output comes through as it is written; its input is\nours unless that is a "
        "terminal (see `shell`). The exit code is the command's, 128+N if signal\nN ended it. "
        "Ctrl-C interrupts the command; a second one ends it.",
        usage="NAME [options] [--] CMD [ARGS...]",
        examples=(
            "exec kernel-1a2b3c4d -- ls -l /workspace",
            "exec kernel-1a2b3c4d --timeout 10 -- python -c 'print(1)'",
            "exec kernel-1a2b3c4d -- sh -c 'cat > data.csv' < data.csv",
        ),
        takes_command=True,
        bare=True,
    )
    add_sandbox(parser)
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", help="kill it after so long")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set an environment variable; may be repeated",
    )
    parser.add_argument("--cwd", metavar="FOLDER", help="in the sandbox (default: /workspace)")


def run(arguments: argparse.Namespace) -> int:
    session = Session()
    return foreground.run(_exec(session, arguments), on_signal=session.on_signal)


async def _exec(session: Session, arguments: argparse.Namespace) -> int:
    options: dict[str, Any] = {
        "env": environment(arguments.env),
        "cwd": arguments.cwd,
        "timeout": arguments.timeout,
    }
    async with sandbox(arguments.name, arguments.backend) as (_, handle):
        return await session.exec(handle, arguments.command, **options)


def environment(entries: list[str]) -> dict[str, str]:
    """NAME=VALUE entries as a mapping."""
    for entry in entries:
        if not entry.partition("=")[0] or "=" not in entry:
            raise SpecError(f"--env takes NAME=VALUE, not {entry!r}.")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def positive(text: str) -> float:
    """A number of seconds, for argparse."""
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError
    return seconds


positive.__name__ = "number of seconds"  # argparse says "invalid <this> value"
