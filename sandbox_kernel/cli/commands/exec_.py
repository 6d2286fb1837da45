"""``sandbox-kernel exec`` and ``shell``."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import sandbox
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.cli.streams import STDIN, STDOUT, AttachedCommand, raw_terminal, terminal_size
from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.sandboxes.command import Command

SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")


def add(commands: Commands) -> None:
    usage = "NAME [options] [--] CMD [ARGS...]"
    parser = add_command(commands, "exec", run, usage=usage, takes_command=True, bare=True)
    parser.add_sandbox()
    parser.add_timeout()
    about = "set an environment variable; may be repeated"
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help=about)
    parser.add_argument("--cwd", metavar="FOLDER", help="in the sandbox (default: /workspace)")
    usage = "NAME [[--] CMD [ARGS...]]"
    add_command(commands, "shell", shell, usage=usage, takes_command=False, bare=True).add_sandbox()


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


def shell(arguments: argparse.Namespace) -> int:
    """Open a terminal in a sandbox.

    Runs bash, or sh where there is no bash, or the command behind --. All keys, Ctrl-C too, go to
    the sandbox; leave with `exit` or Ctrl-D.

    examples:
      sandbox-kernel shell kernel-1a2b3c4d
      sandbox-kernel shell kernel-1a2b3c4d -- python
    """

    async def work(attached: AttachedCommand) -> int:
        async with sandbox(arguments.name, arguments.backend) as (_, handle):
            argv = arguments.command or SHELL
            command = Command(argv, terminal_environment(), tty=terminal_size())
            return await attached.exec(handle, command)

    return on_terminal(work)


def on_terminal(work: Callable[[AttachedCommand], Coroutine[Any, Any, int]]) -> int:
    """Run what uses an AttachedCommand with a terminal, with our own in raw mode."""
    if not (os.isatty(STDIN) and os.isatty(STDOUT)):
        raise SandboxError(
            "A terminal is needed, but stdin or stdout is not one. Use `sandbox-kernel exec` to "
            "run a command without a terminal."
        )
    attached = AttachedCommand()
    with raw_terminal():
        return foreground.run(work(attached), on_signal=attached.on_signal, also=(signal.SIGWINCH,))


def terminal_environment() -> dict[str, str]:
    """Programs in the sandbox must know what terminal they write to; nothing else goes in."""
    return {"TERM": os.environ["TERM"]} if os.environ.get("TERM") else {}
