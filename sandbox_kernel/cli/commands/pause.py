"""``sandbox-kernel pause`` and ``resume``."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable

from sandbox_kernel import audit
from sandbox_kernel.cli.find_sandboxes import sandbox
from sandbox_kernel.cli.foreground import each, named
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.sandboxes.base import SandboxHandle


def add(commands: Commands) -> None:
    add_command(commands, "pause", pause).add_sandbox(several="+")
    add_command(commands, "resume", resume).add_sandbox(several="+")


def pause(arguments: argparse.Namespace) -> int:
    """Freeze sandboxes, with their memory.

    A kernel in a paused sandbox waits: nothing is lost, and the next cell that is run resumes it.
    A hosted sandbox costs no computing time while it is paused. Pausing a paused one is no error.

    examples:
      sandbox-kernel pause kernel-1a2b3c4d
    """
    return _each(arguments, "paused", lambda handle: handle.pause())


def resume(arguments: argparse.Namespace) -> int:
    """Let paused sandboxes continue.

    A stopped one is started again, with its files, if the backend can do that. A running one is
    left alone.

    examples:
      sandbox-kernel resume kernel-1a2b3c4d
    """
    return _each(arguments, "resumed", lambda handle: handle.resume())


def _each(
    arguments: argparse.Namespace,
    becomes: str,
    change: Callable[[SandboxHandle], Awaitable[None]],
) -> int:
    async def do(name: str, backend: str | None) -> None:
        async with sandbox(name, backend) as (_, handle):
            await change(handle)
            audit.note(handle, becomes)

    return each(named(arguments), do)
