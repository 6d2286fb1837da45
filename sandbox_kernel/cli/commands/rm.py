"""``sandbox-kernel rm``: end sandboxes and delete what they hold."""

from __future__ import annotations

import argparse
import sys

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.each import each, named
from sandbox_kernel.cli.find import Found, sandbox, survey
from sandbox_kernel.cli.parser import Commands, add_command, add_which_backend
from sandbox_kernel.cli.text import note


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "rm",
        run,
        "remove sandboxes, with all that they hold",
        details="A sandbox that is named is removed\nwhether it runs or not: naming it is clear "
        "enough. --all leaves sandboxes with a running\nkernel alone unless --force is given, and "
        "asks first on a terminal. A sandbox that is not\nthere counts as removed. Named "
        "workspaces (--workspace) are kept,\nand so are sandboxes of other machines, unless they "
        "are named.",
        usage="NAME... | --all [--force]",
        examples=("rm kernel-1a2b3c4d", "rm --all", "rm --all --force"),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="as `ps` shows it")
    parser.add_argument("-a", "--all", action="store_true", help="all, but for running kernels")
    parser.add_argument(
        "-f", "--force", action="store_true", help="with --all: running kernels too, unasked"
    )
    add_which_backend(parser)


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.names) == arguments.all:
        arguments.parser.error("name the sandboxes to remove, or say --all")
    if not arguments.all:
        return _remove_each(named(arguments))
    found = [
        sandbox
        for sandbox in foreground.run(survey(note))
        if arguments.backend in (None, sandbox.info.backend) and not sandbox.elsewhere
    ]
    spared = [s for s in found if s.has_kernel and s.running and not arguments.force]
    doomed = [s for s in found if s not in spared]
    for kept in spared:
        note(f"{kept.info.name} has a running kernel and stays. Add --force, or name it.")
    if doomed and not arguments.force and not _confirmed(doomed):
        note("Nothing was removed.")
        return 1
    return _remove_each([(s.info.name, s.info.backend) for s in doomed])


def _confirmed(doomed: list[Found]) -> bool:
    if not sys.stdin.isatty():
        return True
    print("This removes, with all files in them:", *(f"  {s.info.name}" for s in doomed), sep="\n")
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _remove_each(sandboxes: list[tuple[str, str | None]]) -> int:
    return each(sandboxes, _remove, absent="Nothing to remove.")


async def _remove(name: str, backend: str | None) -> None:
    async with sandbox(name, backend) as (client, _):
        await client.remove(name)
