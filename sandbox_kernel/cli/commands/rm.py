"""``sandbox-kernel rm``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Mapping
from functools import partial

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import FoundSandbox, sandbox, survey
from sandbox_kernel.cli.foreground import each, named
from sandbox_kernel.cli.formatting import note
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.errors import SandboxError, SandboxNotFound
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.sandboxes.unattended import all_left, is_spare
from sandbox_kernel.sandboxes.unsaved_files import Unsaved, unsaved_in


def add(commands: Commands) -> None:
    parser = add_command(commands, "rm", run, usage="NAME... | --all [--force] | --left | --warm")
    parser.add_sandbox(several="*")
    parser.add_flag("-a", "--all", help="all except running kernels")
    parser.add_flag("-f", "--force", help="unsaved files, and with --all running kernels, too")
    about = "those that wait for a stopped server or a killed process, when their files are saved"
    parser.add_flag("--left", help=about)
    parser.add_flag("--warm", help="spares, which wait for the next kernels")


def run(arguments: argparse.Namespace) -> int:
    """Remove sandboxes, with everything in them.

    A named sandbox is removed whether it runs or not, unless it has files that could not be saved
    (`ps` says 'unsaved'): these take --force. --all leaves sandboxes with a running kernel alone
    unless --force is given, and asks first on a terminal. A sandbox that does not exist counts as
    removed. --warm removes the spares that wait for the next kernels; kernels that start later have
    new ones, unless the setting warm_spares is false. Volumes (`run --volume`) are kept, and so are
    sandboxes of other machines, unless they are named.

    examples:
      sandbox-kernel rm kernel-1a2b3c4d
      sandbox-kernel rm --all
      sandbox-kernel rm --all --force
      sandbox-kernel rm --left
      sandbox-kernel rm --warm
    """
    chosen = [bool(arguments.names), arguments.all, arguments.left, arguments.warm]
    if chosen.count(True) != 1:
        arguments.parser.error("name the sandboxes to remove, or say --all, --left or --warm")
    if arguments.warm:
        return _remove_spares(arguments.backend)
    if arguments.left:
        backends = [arguments.backend] if arguments.backend else backend_names()
        left: dict[tuple[str, str | None], Record] = {
            (record.name, record.backend): record for record in all_left(backends)
        }
        if arguments.force:
            return _remove_each(list(left), force=True)
        return each(left, partial(_end_left, left))
    if not arguments.all:
        return _remove_each(named(arguments), force=arguments.force)
    found = [
        sandbox
        for sandbox in foreground.run(survey(note))
        if arguments.backend in (None, sandbox.info.backend) and not sandbox.elsewhere
    ]
    force = arguments.force
    spared = [s for s in found if not force and ((s.has_kernel and s.running) or s.unsaved)]
    doomed = [s for s in found if s not in spared]
    for kept in spared:
        why = f"{kept.info.name} has a running kernel and stays. Add --force, or name it."
        note(_refusal(kept.unsaved) if kept.unsaved else why)
    if doomed and not force and not _confirmed(doomed):
        note("Nothing was removed.")
        return 1
    return _remove_each([(s.info.name, s.info.backend) for s in doomed], force=True)


def _confirmed(doomed: list[FoundSandbox]) -> bool:
    if not sys.stdin.isatty():
        return True
    print("This removes, with all files in them:", *(f"  {s.info.name}" for s in doomed), sep="\n")
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _remove_spares(backend: str | None) -> int:
    from sandbox_kernel.kernels.spare_shelf import end_holders  # lazy: start-up time

    if backend is None:
        end_holders()
    backends = [backend] if backend else backend_names()
    found = [r for one in backends for r in Records().list(one) if is_spare(r)]
    return _remove_each([(record.name, record.backend) for record in found], force=False)


def _remove_each(sandboxes: list[tuple[str, str | None]], *, force: bool) -> int:
    return each(sandboxes, partial(_remove, force=force), absent="Nothing to remove.")


async def _end_left(
    records: Mapping[tuple[str, str | None], Record], name: str, backend: str | None
) -> None:
    from sandbox_kernel.jupyter.teardown import end_left  # lazy: start-up time

    await end_left(records[name, backend], logging.getLogger("sandbox_kernel"))


async def _remove(name: str, backend: str | None, *, force: bool) -> None:
    async with sandbox(name, backend) as (client, handle):
        if not force:
            with contextlib.suppress(SandboxNotFound):  # another machine made it
                unsaved = unsaved_in(Records().load(client.backend, handle.name))
                if unsaved is not None:
                    raise SandboxError(_refusal(unsaved))
        await client.remove(handle.name)


def _refusal(unsaved: Unsaved) -> str:
    return (
        f"{unsaved}\nIt stays. Save them with `sandbox-kernel workspace save {unsaved.name}`, or "
        f"give them up with --force."
    )
