"""``workspace save``: tries to save files again that could not be saved."""

from __future__ import annotations

import argparse
import asyncio
import logging

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.commands.workspace.arguments import add_workspace_command
from sandbox_kernel.cli.formatting import note
from sandbox_kernel.cli.options import Commands
from sandbox_kernel.errors import SandboxError, WorkspaceNotFound
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.sandboxes.unsaved_files import Unsaved, all_unsaved, unsaved_of
from sandbox_kernel.untrusted_text import printable


def add_save(commands: Commands) -> None:
    parser = add_workspace_command(commands, "save", _save, name=False)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a workspace, the path of its notebook, or a sandbox; default: all unsaved ones",
    )


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
        return 0
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
