"""``sandbox-kernel workspace save``: try again what could not be saved."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.text import note
from sandbox_kernel.errors import SandboxError, WorkspaceNotFound
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.sandboxes.unsaved import Unsaved, all_unsaved, unsaved_of
from sandbox_kernel.text import printable

if TYPE_CHECKING:
    from sandbox_kernel.workspace.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a workspace, the path of its notebook, or a sandbox; else all that wait",
    )


def run(arguments: argparse.Namespace) -> int:
    found = _found(arguments.names)
    if not found:
        note("Nothing is unsaved.")
        return 0
    failed = False
    for unsaved in found:
        try:
            foreground.run(_save(unsaved, arguments.store))
        except (SandboxError, OSError) as error:
            note(f"{unsaved}\nAnd now: {error}")
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
                f"No sandbox has files of {name!r} that could not be saved. `sandbox-kernel ps` "
                f"shows where there are some; those of a kernel that runs are saved with its "
                f"notebook."
            )
        found += [one for one in these if one not in found]
    return found


async def _save(unsaved: Unsaved, url: str) -> None:
    from sandbox_kernel.jupyter.keeping import save_again

    await save_again(unsaved, logging.getLogger("sandbox_kernel"), _store(url or unsaved.store))


def _store(url: str) -> Store:
    from sandbox_kernel.workspace.store import Store

    return Store.open(url)
