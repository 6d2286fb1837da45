"""``workspace list``, ``log``, ``diff`` and ``restore``: workspaces and their saves."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from sandbox_kernel.cli.commands.workspace.arguments import add_workspace_command, open_store
from sandbox_kernel.cli.formatting import age, note, print_json, shown_path, shown_size, table
from sandbox_kernel.cli.options import Commands

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.workspace.reports import FailedSave, SaveInfo

_SIGNS = {"added": "A", "removed": "D", "changed": "M", "meta": "m"}


def add(commands: Commands) -> None:
    parser = add_workspace_command(commands, "list", _list, name=False, json=True)
    parser.add_flag("--all", help="include those of deleted notebooks")
    add_workspace_command(commands, "log", _log, json=True)
    parser = add_workspace_command(commands, "diff", _diff, json=True)
    parser.add_argument("before", metavar="A", nargs="?", default="", help="the earlier save")
    parser.add_argument("after", metavar="B", nargs="?", default="", help="the later save")
    at = "the save; default: the one before the newest"
    add_workspace_command(commands, "restore", _restore, at=at)


def _list(arguments: argparse.Namespace) -> None:
    """List the workspaces in the store.

    examples:
      sandbox-kernel workspace list
      sandbox-kernel workspace list --store s3://bucket/workspaces
    """
    store = open_store(arguments)
    rows, values = [("NAME", "SAVES", "FILES", "SIZE", "AGE", "NOTEBOOK")], []
    for name in store.names(retired=arguments.all):
        saves = store.saves(name)
        if not saves:
            continue  # removed just now
        newest = saves[-1]
        gone = bool(store.retired(name))
        values.append({**save_facts(newest), "saves": len(saves), "retired": gone})
        rows.append(
            (
                name,
                str(len(saves)),
                str(newest.files),
                shown_size(newest.bytes),
                age(time.time() - newest.created),
                newest.notebook + (" (deleted)" if gone else "") or "-",
            )
        )
    print_json(values) if arguments.json else print(table(rows))


def _log(arguments: argparse.Namespace) -> None:
    """List the saves of a workspace, newest first, and those that failed.

    examples:
      sandbox-kernel workspace log demo
      sandbox-kernel workspace log demo --json
    """
    from sandbox_kernel.workspace.reports import SaveInfo

    store = open_store(arguments)
    failures = store.failures(arguments.name)
    if not failures:
        store.find(arguments.name)
    history: list[SaveInfo | FailedSave] = [*store.saves(arguments.name), *failures]
    history.sort(key=lambda one: one.id, reverse=True)
    if arguments.json:
        print_json([save_facts(one) for one in history])
        return
    rows = [("SAVE", "AGE", "KIND", "FILES", "SIZE", "BACKEND", "SANDBOX", "PROBLEMS")]
    for one in history:
        if isinstance(one, SaveInfo):
            what = (one.kind, str(one.files), shown_size(one.bytes))
            problems = str(len(one.problems) or "-")
        else:
            what, problems = ("failed", "-", "-"), shown_path(one.message)
        when = age(time.time() - one.created)
        rows.append((one.id, when, *what, one.backend or "-", one.sandbox or "-", problems))
    print(table(rows))


def save_facts(save: SaveInfo | FailedSave) -> dict[str, object]:
    """The public fields of a save, for JSON."""
    values = asdict(save)
    values.pop("packs", None)
    return {"kind": "failed", **values.pop("extra", {}), **values}


def _diff(arguments: argparse.Namespace) -> None:
    """Show the changes from one save to another.

    A is added, D deleted, M changed, m only mode or time. Without B: from A to the newest save.
    Without both: the changes of the newest save.

    examples:
      sandbox-kernel workspace diff demo
      sandbox-kernel workspace diff demo 20260101t12 20260102t09
    """
    store = open_store(arguments)
    after = store.find(arguments.name, arguments.after)
    before: SaveInfo | None = None
    if arguments.before:
        before = store.find(arguments.name, arguments.before)
    elif after.parent in store.ids(arguments.name):
        before = store.find(arguments.name, after.parent)
    elif after.parent:
        note(f"The save before {after.id} is not kept any more, so all files count as added.")
    changes = store.diff(before, after)
    if arguments.json:
        print_json([asdict(change) for change in changes])
        return
    for change in changes:
        sizes = ""
        if change.kind == "changed":
            sizes = f"  ({change.size_before} -> {change.size_after} bytes)"
        print(f"{_SIGNS[change.kind]} {shown_path(change.path)}{sizes}")


def _restore(arguments: argparse.Namespace) -> None:
    """Make an earlier save the newest one.

    The next kernel of the notebook starts with it. The history stays in the log.

    examples:
      sandbox-kernel workspace restore demo --at 20260101t12
    """
    from sandbox_kernel.errors import WorkspaceNotFound

    store = open_store(arguments)
    at = arguments.at or store.find(arguments.name).parent
    if not at or (not arguments.at and at not in store.ids(arguments.name)):
        raise WorkspaceNotFound(
            f"The workspace {arguments.name!r} has no save before the newest one. "
            f"`sandbox-kernel workspace log {arguments.name}` lists all; choose one with --at."
        )
    made = store.restore(arguments.name, at)
    note(
        f"{arguments.name} has the files of {made.extra['restored']} again, for kernels that start "
        f"from now on. A running kernel keeps its files."
    )
    print(made.id)
