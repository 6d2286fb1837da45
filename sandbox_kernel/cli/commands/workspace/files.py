"""``workspace files``, ``show``, ``export`` and ``import``: the files of a save."""

from __future__ import annotations

import argparse
import stat
import sys
import time
from typing import TYPE_CHECKING

from sandbox_kernel.cli.commands.workspace.arguments import (
    AT_HELP,
    MOST_PROBLEMS,
    add_workspace_command,
    open_store,
)
from sandbox_kernel.cli.commands.workspace.history import save_facts
from sandbox_kernel.cli.formatting import ProgressLine, note, print_json, shown_path
from sandbox_kernel.cli.options import Commands, quota_of
from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.workspace.store import Store
    from sandbox_kernel.workspace.trees import Entry

_TYPES = {"f": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "h": stat.S_IFREG}


def add(commands: Commands) -> None:
    add_workspace_command(commands, "files", _files, at=AT_HELP, json=True)
    parser = add_workspace_command(commands, "show", _show, at=AT_HELP, json=True)
    parser.add_argument("path", metavar="PATH", nargs="?", help="a file of the save")
    parser = add_workspace_command(commands, "export", _export, at=AT_HELP)
    parser.add_argument("folder", metavar="FOLDER", help="created if missing")
    parser.add_flag("--overwrite", help="files changed there, too")
    parser.add_flag(
        "--hidden",
        help="also files that programs here may obey: names that begin with a dot (.git/hooks, "
        ".bashrc), Python environments",
    )
    about = "move files to a trash folder that exports made here and the sandbox has deleted"
    parser.add_flag("--delete", help=about)
    about = "with --delete: also files that came from this folder, if unchanged here"
    parser.add_flag("--delete-imported", help=about)
    parser.add_quota()
    parser = add_workspace_command(commands, "import", _import)
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="these files; may be repeated"
    )
    parser.add_argument("--notebook", default="", metavar="PATH", help="stored in the save")
    parser.add_quota()


def _files(arguments: argparse.Namespace) -> None:
    """List the files of a save.

    examples:
      sandbox-kernel workspace files demo
      sandbox-kernel workspace files demo --at 20260101t12
    """
    store = open_store(arguments)
    found = store.files(store.find(arguments.name, arguments.at))
    if arguments.json:
        names = {"path", "kind", "mode", "mtime_ns", "size", "target"}
        everything = ({"path": path, "mtime_ns": e.mtime, **e._asdict()} for path, e in found)
        print_json([{key: one[key] for key in one if key in names} for one in everything])
    else:
        for path, entry in found:
            print(_listed(path, entry))


def _listed(path: str, entry: Entry) -> str:
    """A line as of ``ls -l``."""
    mode = stat.filemode(_TYPES[entry.kind] | (0o777 if entry.kind == "l" else entry.mode))
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.mtime / 1e9))
    except (OverflowError, ValueError, OSError):
        when = "-" * 19
    sign = {"l": " -> ", "h": " = "}.get(entry.kind, "")
    return f"{mode} {entry.size:>12} {when} {shown_path(path)}{sign}{shown_path(entry.target)}"


def _show(arguments: argparse.Namespace) -> None:
    """Show the facts about a save, or the contents of one of its files.

    examples:
      sandbox-kernel workspace show demo
      sandbox-kernel workspace show demo results/table.csv --at 20260101t12
    """
    from sandbox_kernel.errors import WorkspaceNotFound

    store = open_store(arguments)
    save = store.find(arguments.name, arguments.at)
    if arguments.path is None:
        facts = save_facts(save)
        if arguments.json:
            print_json(facts)
            return
        facts.pop("problems")
        for key, value in facts.items():
            print(f"{key + ':':12} {printable(str(value))}".rstrip())
        for problem in list(save.problems)[:MOST_PROBLEMS]:
            print(f"{'problem:':12} {printable(problem)}")
        return
    store.check(save)
    entry = store.lookup(save, arguments.path)
    if entry is not None and entry.kind == "h":
        entry = store.lookup(save, entry.target)
    if entry is None or entry.kind != "f":
        raise WorkspaceNotFound(
            f"The save {save.id} of {arguments.name!r} has no file {arguments.path!r}. "
            f"`sandbox-kernel workspace files {arguments.name}` lists them."
        )
    _print_file(store, entry)


def _print_file(store: Store, entry: Entry) -> None:
    written = 0
    for offset, hash_, length in entry.pieces():
        _print_zeros(offset - written)
        sys.stdout.buffer.write(store.read(hash_))
        written = offset + length
    _print_zeros(entry.size - written)


def _print_zeros(count: int) -> None:
    while count > 0:
        count -= sys.stdout.buffer.write(bytes(min(count, 2**20)))


def _export(arguments: argparse.Namespace) -> None:
    """Write the files of a save to a folder.

    Only files that the sandbox has changed are written. If files in the folder have changed
    since they were last imported or exported, nothing is written.

    examples:
      sandbox-kernel workspace export demo ./results
      sandbox-kernel workspace export demo . --at 20260101t12
    """
    from sandbox_kernel.workspace.exports import export

    with ProgressLine() as line:
        report = export(
            open_store(arguments),
            arguments.name,
            arguments.folder,
            at=arguments.at,
            overwrite=arguments.overwrite,
            delete=arguments.delete,
            delete_imported=arguments.delete_imported,
            hidden=arguments.hidden,
            quota=quota_of(arguments),
            progress=line.files,
        )
    for path in report.written:
        print(shown_path(path))
    for path in report.deleted:
        print(f"deleted {shown_path(path)}")
    for problem in report.skipped:
        note(f"Left out: {problem}")
    if report.trash:
        note(f"Replaced and deleted files are in {report.trash}")


def _import(arguments: argparse.Namespace) -> None:
    """Make a save from a folder.

    examples:
      sandbox-kernel workspace import demo ./data
      sandbox-kernel workspace import demo . --only '*.csv'
    """
    from sandbox_kernel.workspace.imports import import_folder
    from sandbox_kernel.workspace.reports import UploadPolicy

    policy = UploadPolicy("globs", tuple(arguments.only)) if arguments.only else None
    with ProgressLine() as line:
        report = import_folder(
            open_store(arguments),
            arguments.name,
            arguments.folder,
            policy=policy,
            notebook=arguments.notebook,
            quota=quota_of(arguments),
            progress=line.files,
        )
    for problem in list(report.problems)[:MOST_PROBLEMS]:
        note(f"Left out: {printable(problem)}")
    note(str(report))
    print(report.save.id)
