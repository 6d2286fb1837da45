"""``workspace save``, ``gc``, ``verify`` and ``rm``: the upkeep of a store."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.commands.workspace.arguments import (
    NAME_HELP,
    add_workspace_command,
    open_store,
    workspace_name,
)
from sandbox_kernel.cli.formatting import ProgressLine, note, shown_size
from sandbox_kernel.cli.options import Commands, positive
from sandbox_kernel.errors import SandboxError, WorkspaceNotFound
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.sandboxes.unsaved_files import Unsaved, all_unsaved, unsaved_of
from sandbox_kernel.untrusted_text import printable


def add(commands: Commands) -> None:
    parser = add_workspace_command(commands, "save", _save, name=False)
    about = "a workspace, the path of its notebook, or a sandbox; default: all unsaved ones"
    parser.add_argument("names", nargs="*", metavar="NAME", help=about)
    parser = add_workspace_command(commands, "gc", _gc, name=False)
    about = "delete all saves but the newest N of each workspace (default: none)"
    parser.add_argument("--keep", type=positive, default=0, metavar="N", help=about)
    parser.add_argument("--grace", type=float, metavar="SECONDS", help="default: seven days")
    add_workspace_command(commands, "verify", _verify, name=False)
    parser = add_workspace_command(commands, "rm", _rm, name=False, at="only this save")
    parser.add_argument("names", nargs="+", metavar="NAME", type=workspace_name, help=NAME_HELP)


def _save(arguments: argparse.Namespace) -> int:
    """Save files that could not be saved when their kernel ended.

    Their sandbox is kept until then (`ps` says 'unsaved'), and removed then unless it was kept
    for other reasons. --store saves them to another store.

    examples:
      sandbox-kernel workspace save
      sandbox-kernel workspace save work/demo.ipynb
      sandbox-kernel workspace save demo
    """
    found = _found(arguments.names)
    if not found:
        note("Nothing is unsaved.")
    failed = False
    for unsaved in found:
        try:
            foreground.run(_save_again(unsaved, arguments.store))
        except (SandboxError, OSError) as error:
            note(f"{unsaved}\nThe new attempt failed: {error}")
            failed = True
        else:
            print(printable(unsaved.name))
    return 1 if failed else 0


def _found(names: list[str]) -> list[Unsaved]:
    if not names:
        return list(all_unsaved(backend_names()))
    found: list[Unsaved] = []
    for name in names:
        these = unsaved_of(backend_names(), name)
        if not these:
            raise WorkspaceNotFound(
                f"No sandbox has unsaved files of {name!r}. `sandbox-kernel ps` shows sandboxes "
                f"that do; the files of a running kernel are saved with its notebook."
            )
        found += [one for one in these if one not in found]
    return found


async def _save_again(unsaved: Unsaved, url: str) -> None:
    from sandbox_kernel.jupyter.teardown import save_again
    from sandbox_kernel.workspace.store import Store

    store = await asyncio.to_thread(Store.open, url or unsaved.store)
    await save_again(unsaved, logging.getLogger("sandbox_kernel"), store)


def _gc(arguments: argparse.Namespace) -> None:
    """Free space that no save needs any more.

    Deletes workspaces whose notebooks were deleted longer ago than the grace time, and data
    that no save has used for that time. --grace 0 deletes at once, except for data that a
    running save may need.

    examples:
      sandbox-kernel workspace gc
      sandbox-kernel workspace gc --keep 100
      sandbox-kernel workspace gc --grace 0
    """
    from sandbox_kernel.workspace.garbage import GRACE, collect

    grace = GRACE if arguments.grace is None else arguments.grace
    report = collect(open_store(arguments), grace=grace, keep=arguments.keep)
    if report.saves:
        print(f"deleted {report.saves} saves")
    for name in report.workspaces:
        print(f"deleted {printable(name)}")
    print(
        f"{report.packs_deleted} packs deleted ({shown_size(report.bytes_freed)}), "
        f"{report.packs_rewritten} rewritten, {report.waiting} wait for their grace time"
    )
    if report.saving and report.waiting:
        note(f"{report.saving} saves are running, and may need some of it. Run it again later.")


def _verify(arguments: argparse.Namespace) -> int:
    """Read everything in the store, and check it.

    examples:
      sandbox-kernel workspace verify
    """
    from sandbox_kernel.workspace.garbage import verify

    store = open_store(arguments)
    count = len(store.packs.names())
    with ProgressLine() as line:
        done = itertools.count(1)
        report = verify(store, on_pack=lambda name: line.tell(f"pack {next(done)} of {count}"))
    for problem in report.problems:
        print(printable(problem))
    found = f"{len(report.problems)} problems" if report.problems else "all is well"
    print(f"{report.saves} saves, {report.packs} packs, {report.objects} objects: {found}")
    return 1 if report.problems else 0


def _rm(arguments: argparse.Namespace) -> None:
    """Delete workspaces, with their history.

    `workspace gc` frees their space. A workspace that does not exist counts as deleted.

    examples:
      sandbox-kernel workspace rm demo
      sandbox-kernel workspace rm demo && sandbox-kernel workspace gc --grace 0
    """
    store = open_store(arguments)
    for name in arguments.names:
        if store.remove(name, arguments.at):
            print(printable(name))
        else:
            note(f"There is no workspace {name!r}. Nothing to delete.")
