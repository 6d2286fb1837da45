"""``sandbox-kernel exec``."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import sandbox
from sandbox_kernel.cli.options import Commands, add_command, add_sandbox, add_timeout
from sandbox_kernel.cli.streams import AttachedCommand
from sandbox_kernel.errors import SpecError
from sandbox_kernel.sandboxes.command import Command


def add(commands: Commands) -> None:
    usage = "NAME [options] [--] CMD [ARGS...]"
    parser = add_command(commands, "exec", run, usage=usage, takes_command=True, bare=True)
    add_sandbox(parser)
    add_timeout(parser)
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set an environment variable; may be repeated",
    )
    parser.add_argument("--cwd", metavar="FOLDER", help="in the sandbox (default: /workspace)")


def run(arguments: argparse.Namespace) -> int:
    """Run a command in a sandbox.

    Its output comes through as it is written; its input is ours unless that is a terminal (see
    `shell`). The exit code is the command's, 128+N if signal N ended it. Ctrl-C interrupts the
    command; a second one ends it.

    examples:
      sandbox-kernel exec kernel-1a2b3c4d -- ls -l /workspace
      sandbox-kernel exec kernel-1a2b3c4d --timeout 10 -- python -c 'print(1)'
      sandbox-kernel exec kernel-1a2b3c4d -- sh -c 'cat > data.csv' < data.csv
    """
    attached = AttachedCommand()
    return foreground.run(_exec(attached, arguments), on_signal=attached.on_signal)


async def _exec(attached: AttachedCommand, arguments: argparse.Namespace) -> int:
    command = Command(arguments.command, environment(arguments.env), arguments.cwd)
    async with sandbox(arguments.name, arguments.backend) as (_, handle):
        return await attached.exec(handle, command, timeout=arguments.timeout)


def environment(entries: list[str]) -> dict[str, str]:
    """NAME=VALUE entries as a mapping."""
    for entry in entries:
        if not entry.partition("=")[0] or "=" not in entry:
            raise SpecError(f"--env takes NAME=VALUE, not {entry!r}.")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}
