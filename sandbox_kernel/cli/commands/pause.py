"""``sandbox-kernel pause`` and ``resume``: freeze sandboxes with all that runs, and go on."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli.each import each, named
from sandbox_kernel.cli.find import sandbox
from sandbox_kernel.cli.parser import SANDBOX_HELP, Commands, add_command, add_which_backend


def add(commands: Commands) -> None:
    pausing = add_command(
        commands,
        "pause",
        run_pause,
        "freeze sandboxes, with their memory",
        details="A kernel in a paused sandbox\nwaits: nothing is lost, and the next cell that is "
        "run resumes it. A hosted sandbox costs\nno computing time while it is paused. Pausing "
        "one that is paused is no error.",
        examples=("pause kernel-1a2b3c4d",),
    )
    resuming = add_command(
        commands,
        "resume",
        run_resume,
        "let paused sandboxes go on",
        details="One that was stopped is started\nagain, with its files, where the backend can. "
        "One that runs is left alone.",
        examples=("resume kernel-1a2b3c4d",),
    )
    for parser in (pausing, resuming):
        parser.add_argument("names", nargs="+", metavar="NAME", help=SANDBOX_HELP)
        add_which_backend(parser)


def run_pause(arguments: argparse.Namespace) -> int:
    return each(named(arguments), _pause)


def run_resume(arguments: argparse.Namespace) -> int:
    return each(named(arguments), _resume)


async def _pause(name: str, backend: str | None) -> None:
    async with sandbox(name, backend) as (_, handle):
        await handle.pause()


async def _resume(name: str, backend: str | None) -> None:
    async with sandbox(name, backend) as (_, handle):
        await handle.resume()
