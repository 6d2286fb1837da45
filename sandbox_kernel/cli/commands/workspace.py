"""``sandbox-kernel workspace``: saved workspaces, their history, and their way to the host."""

from __future__ import annotations

import argparse
import itertools
import os
import stat
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from sandbox_kernel.cli.commands import workspace_save
from sandbox_kernel.cli.parser import Commands, add_command
from sandbox_kernel.cli.text import age, note, print_json, table
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.text import printable

if TYPE_CHECKING:  # importing it takes time that other commands need not spend
    from sandbox_kernel.workspace.reports import FailedSave, Limits, SaveInfo
    from sandbox_kernel.workspace.store import Store
    from sandbox_kernel.workspace.trees import Entry

_MOST_PROBLEMS = 50
_NAME_HELP = "the workspace, as `workspace list` shows it, or the path of its notebook"
_SIGNS = {"added": "A", "removed": "D", "changed": "M", "meta": "m"}


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "workspace",
        lambda arguments: 2,
        "look at saved workspaces, and bring them back",
        details="A workspace is\nwhat the code of a notebook has written, save by save, in a store "
        "that outlives the\nsandboxes: $SANDBOX_KERNEL_STORE, or a folder of Jupyter's data "
        "folder. Each notebook\nhas its own; kernels of `install --workspace NAME` share one. (A "
        "volume, `run --volume`, is\nsomething else: a folder of this machine, at /workspace in a "
        "local jail.)",
        examples=(
            "workspace list",
            "workspace log work/demo.ipynb",
            "workspace export work-demo-3f2a9c41 ./results",
        ),
    )
    inner = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for adding in (
        _add_list,
        _add_log,
        _add_diff,
        _add_files,
        _add_show,
        _add_restore,
        _add_save,
        _add_export,
        _add_import,
        _add_gc,
        _add_verify,
        _add_rm,
    ):
        adding(inner)


def _command(commands: Commands, *args: object, **kwargs: object) -> argparse.ArgumentParser:
    parser = add_command(commands, *args, **kwargs)  # type: ignore[arg-type]
    parser.add_argument(
        "--store", default="", metavar="URL", help="the store: a folder, or a URL as s3://bucket/x"
    )
    return parser


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", type=_workspace, help=_NAME_HELP)


def _workspace(text: str) -> str:
    """A workspace by its name, or by its notebook."""
    if not text.endswith(NOTEBOOK):
        return text
    from sandbox_kernel.workspace.names import name_for_notebook

    return name_for_notebook(os.path.abspath(text))


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"a number of at least 1 is needed, not {text!r}")
    return number


def _add_at(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--at",
        default="",
        metavar="SAVE",
        help="a save, by its id or the start of it; else the newest",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _store(arguments: argparse.Namespace) -> Store:
    from sandbox_kernel.workspace.store import Store

    return Store.open(arguments.store)


# --- list, log, diff, files, show


def _add_list(commands: Commands) -> None:
    parser = _command(
        commands,
        "list",
        _list,
        "list the workspaces in the store",
        examples=("workspace list", "workspace list --store s3://bucket/workspaces"),
    )
    parser.add_argument("--all", action="store_true", help="those of deleted notebooks, too")
    _add_json(parser)


def _list(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    rows, values = [("NAME", "SAVES", "FILES", "SIZE", "AGE", "NOTEBOOK")], []
    for name in store.names(retired=arguments.all):
        saves = store.saves(name)
        if not saves:
            continue  # removed meanwhile
        newest = saves[-1]
        gone = bool(store.retired(name))
        values.append({**_public(newest), "saves": len(saves), "retired": gone})
        rows.append(
            (
                name,
                str(len(saves)),
                str(newest.files),
                _size(newest.bytes),
                age(time.time() - newest.created),
                newest.notebook + (" (deleted)" if gone else "") or "-",
            )
        )
    print_json(values) if arguments.json else print(table(rows))
    return 0


def _add_log(commands: Commands) -> None:
    parser = _command(
        commands,
        "log",
        _log,
        "list the saves of a workspace, newest first, and those that failed",
        examples=("workspace log demo", "workspace log demo --json"),
    )
    _add_name(parser)
    _add_json(parser)


def _log(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.workspace.reports import SaveInfo

    store = _store(arguments)
    failures = store.failures(arguments.name)
    if not failures:
        store.find(arguments.name)
    history: list[SaveInfo | FailedSave] = [*store.saves(arguments.name), *failures]
    history.sort(key=lambda one: one.id, reverse=True)
    if arguments.json:
        print_json(
            [
                _public(one) if isinstance(one, SaveInfo) else {"kind": "failed", **asdict(one)}
                for one in history
            ]
        )
        return 0
    rows: list[tuple[str, ...]] = [
        ("SAVE", "AGE", "KIND", "FILES", "SIZE", "BACKEND", "SANDBOX", "PROBLEMS")
    ]
    for one in history:
        start, end = (one.id, age(time.time() - one.created)), (one.backend, one.sandbox)
        if isinstance(one, SaveInfo):
            files, size = str(one.files), _size(one.bytes)
            problems = str(len(one.problems)) if one.problems else "-"
            rows.append((*start, one.kind, files, size, *(x or "-" for x in end), problems))
        else:
            rows.append((*start, "failed", "-", "-", *(x or "-" for x in end), _name(one.message)))
    print(table(rows))
    return 0


def _add_diff(commands: Commands) -> None:
    parser = _command(
        commands,
        "diff",
        _diff,
        "tell what changed from one save to another",
        details="A is added,\nD deleted, M changed, m only mode or time. Without B: from A to the "
        "newest save. Without\nboth: what the newest save changed.",
        examples=("workspace diff demo", "workspace diff demo 20260101t12 20260102t09"),
    )
    _add_name(parser)
    parser.add_argument("before", metavar="A", nargs="?", default="", help="the earlier save")
    parser.add_argument("after", metavar="B", nargs="?", default="", help="the later save")
    _add_json(parser)


def _diff(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    after = store.find(arguments.name, arguments.after)
    ids = store.ids(arguments.name)
    if arguments.before:
        before: SaveInfo | None = store.find(arguments.name, arguments.before)
    else:
        # What came before the first, or before all that were kept, was nothing.
        before = store.find(arguments.name, after.parent) if after.parent in ids else None
        if before is None and after.parent:
            note(f"The save before {after.id} is not kept any more, so all files count as added.")
    changes = store.diff(before, after)
    if arguments.json:
        print_json([asdict(change) for change in changes])
        return 0
    for change in changes:
        sizes = ""
        if change.kind == "changed":
            sizes = f"  ({change.size_before} -> {change.size_after} bytes)"
        print(f"{_SIGNS[change.kind]} {_name(change.path)}{sizes}")
    return 0


def _add_files(commands: Commands) -> None:
    parser = _command(
        commands,
        "files",
        _files,
        "list the files of a save",
        examples=("workspace files demo", "workspace files demo --at 20260101t12"),
    )
    _add_name(parser)
    _add_at(parser)
    _add_json(parser)


def _files(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    save = store.find(arguments.name, arguments.at)
    if arguments.json:
        print_json(
            [
                {
                    "path": path,
                    "kind": entry.kind,
                    "mode": entry.mode,
                    "mtime_ns": entry.mtime,
                    "size": entry.size,
                    "target": entry.target,
                }
                for path, entry in store.files(save)
            ]
        )
        return 0
    for path, entry in store.files(save):
        print(f"{_mode(entry)} {entry.size:>12} {_when(entry)} {_name(path)}{_target(entry)}")
    return 0


def _add_show(commands: Commands) -> None:
    parser = _command(
        commands,
        "show",
        _show,
        "show what is known about a save, or the contents of one of its files",
        examples=("workspace show demo", "workspace show demo results/table.csv --at 20260101t12"),
    )
    _add_name(parser)
    parser.add_argument("path", metavar="PATH", nargs="?", help="a file of the save")
    _add_at(parser)
    _add_json(parser)


def _show(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.errors import WorkspaceNotFound

    store = _store(arguments)
    save = store.find(arguments.name, arguments.at)
    if arguments.path is None:
        facts = _public(save)
        if arguments.json:
            print_json(facts)
            return 0
        facts.pop("problems")
        for key, value in facts.items():
            print(f"{key + ':':12} {printable(str(value))}".rstrip())
        for problem in list(save.problems)[:_MOST_PROBLEMS]:
            print(f"{'problem:':12} {printable(problem)}")
        return 0
    store.check(save)
    root = bytes.fromhex(save.root)
    entry = store.lookup(root, arguments.path)
    if entry is not None and entry.kind == "h":
        entry = store.lookup(root, entry.target)
    if entry is None or entry.kind != "f":
        raise WorkspaceNotFound(
            f"The save {save.id} of {arguments.name!r} has no file {arguments.path!r}. "
            f"`sandbox-kernel workspace files {arguments.name}` lists them."
        )
    _print_file(store, entry)
    return 0


def _print_file(store: Store, entry: Entry) -> None:
    from sandbox_kernel.guest.workspace.layout import CHUNK

    out, at = sys.stdout.buffer, 0
    for index, hash_, _ in entry.pieces():
        _zeros(index * CHUNK - at)
        out.write(store.read(hash_))
        at = min(entry.size, (index + 1) * CHUNK)
    _zeros(entry.size - at)


def _zeros(count: int) -> None:
    while count > 0:
        sys.stdout.buffer.write(bytes(min(count, 2**20)))
        count -= 2**20


# --- restore, export, import


def _add_restore(commands: Commands) -> None:
    parser = _command(
        commands,
        "restore",
        _restore,
        "make an earlier save the newest one",
        details="The next\nkernel of the notebook starts with it. Nothing is lost: what was newest "
        "stays in the log.",
        examples=("workspace restore demo --at 20260101t12",),
    )
    _add_name(parser)
    parser.add_argument(
        "--at", default="", metavar="SAVE", help="the save; else the one before the newest"
    )


def _restore(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.errors import WorkspaceNotFound

    store = _store(arguments)
    at = arguments.at or store.find(arguments.name).parent
    if not at or (not arguments.at and at not in store.ids(arguments.name)):
        raise WorkspaceNotFound(
            f"Of the workspace {arguments.name!r}, no save before the newest one is kept. "
            f"`sandbox-kernel workspace log {arguments.name}` lists what there is; name one "
            f"of them with --at."
        )
    made = store.restore(arguments.name, at)
    note(
        f"{arguments.name} is as it was at {made.extra['restored']}, for kernels that start from "
        f"now on. One that runs keeps its files."
    )
    print(made.id)
    return 0


def _add_save(commands: Commands) -> None:
    parser = _command(
        commands,
        "save",
        workspace_save.run,
        "save files that could not be saved when their kernel ended",
        details="Their\nsandbox is kept until then (`ps` says 'unsaved'), and goes afterwards. A "
        "sandbox that was\nnot kept for that alone stays. --store saves them to another store than "
        "they were meant for.",
        usage="[NAME...] [--store URL]",
        examples=("workspace save", "workspace save work/demo.ipynb", "workspace save demo"),
    )
    workspace_save.add_arguments(parser)


def _add_export(commands: Commands) -> None:
    parser = _command(
        commands,
        "export",
        _export,
        "write the files of a save to a folder",
        details="Only what the\nsandbox has changed is written. Files that have changed in the "
        "folder since they were\nimported, or exported last, are not written over: then nothing "
        "is written.",
        examples=("workspace export demo ./results", "workspace export demo . --at 20260101t12"),
    )
    _add_name(parser)
    parser.add_argument("folder", metavar="FOLDER", help="made if it is not there")
    _add_at(parser)
    parser.add_argument("--overwrite", action="store_true", help="files changed there, too")
    parser.add_argument(
        "--hidden",
        action="store_true",
        help="also what programs here may obey: names that begin with a dot (.git/hooks, .bashrc), "
        "Python environments",
    )
    parser.add_argument(
        "--delete",
        action="store_true",
        help="move to a trash folder what exports made here and the sandbox has deleted since",
    )
    parser.add_argument(
        "--delete-imported",
        action="store_true",
        help="with --delete: also what came from this folder; never what has changed here",
    )
    _add_limits(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-files", type=_positive, metavar="N", help="default: 500,000")
    parser.add_argument("--max-bytes", type=_positive, metavar="N", help="default: 20 GiB")


def _limits(arguments: argparse.Namespace) -> Limits:
    from sandbox_kernel.workspace.reports import Limits

    given = {"max_files": arguments.max_files, "max_bytes": arguments.max_bytes}
    return Limits(**{key: value for key, value in given.items() if value is not None})


def _export(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.cli import progress
    from sandbox_kernel.workspace.exports import export

    with progress.shown() as line:
        report = export(
            _store(arguments),
            arguments.name,
            arguments.folder,
            at=arguments.at,
            overwrite=arguments.overwrite,
            delete=arguments.delete,
            delete_imported=arguments.delete_imported,
            hidden=arguments.hidden,
            limits=_limits(arguments),
            progress=line.files,
        )
    for path in report.written:
        print(_name(path))
    for path in report.deleted:
        print(f"deleted {_name(path)}")
    for problem in report.skipped:
        note(f"Left out: {problem}")
    if report.trash:
        note(f"What was replaced or deleted is in {report.trash}")
    return 0


def _add_import(commands: Commands) -> None:
    parser = _command(
        commands,
        "import",
        _import,
        "make a save from a folder",
        examples=("workspace import demo ./data", "workspace import demo . --only '*.csv'"),
    )
    _add_name(parser)
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="these files; may be repeated"
    )
    parser.add_argument("--notebook", default="", metavar="PATH", help="noted in the save")
    _add_limits(parser)


def _import(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.cli import progress
    from sandbox_kernel.workspace.imports import import_folder
    from sandbox_kernel.workspace.reports import UploadPolicy

    policy = UploadPolicy("globs", tuple(arguments.only)) if arguments.only else None
    with progress.shown() as line:
        report = import_folder(
            _store(arguments),
            arguments.name,
            arguments.folder,
            policy=policy,
            notebook=arguments.notebook,
            limits=_limits(arguments),
            progress=line.files,
        )
    for problem in list(report.problems)[:_MOST_PROBLEMS]:
        note(f"Left out: {printable(problem)}")
    note(str(report))
    print(report.save.id)
    return 0


# --- gc, verify, rm


def _add_gc(commands: Commands) -> None:
    parser = _command(
        commands,
        "gc",
        _gc,
        "free what no save needs any more",
        details="Deletes\nworkspaces whose notebooks were deleted longer ago than the grace time, "
        "and data that no\nsave has used for that time. --grace 0 deletes at once, except for data "
        "that a running\nsave may need.",
        examples=("workspace gc", "workspace gc --keep 100", "workspace gc --grace 0"),
    )
    parser.add_argument(
        "--keep",
        type=_positive,
        default=0,
        metavar="N",
        help="delete all saves but the newest N of each workspace (default: none is deleted)",
    )
    parser.add_argument(
        "--grace", type=float, default=None, metavar="SECONDS", help="default: seven days"
    )


def _gc(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.workspace.collect import GRACE, collect

    grace = GRACE if arguments.grace is None else arguments.grace
    report = collect(_store(arguments), grace=grace, keep=arguments.keep)
    if report.saves:
        print(f"deleted {report.saves} saves")
    for name in report.workspaces:
        print(f"deleted {printable(name)}")
    print(
        f"{report.packs_deleted} packs deleted ({_size(report.bytes_freed)}), "
        f"{report.packs_rewritten} written anew, {report.waiting} wait for their grace time"
    )
    if report.saving and report.waiting:
        note(f"{report.saving} saves went on meanwhile, and may need some of it. Run it again.")
    return 0


def _add_verify(commands: Commands) -> None:
    _command(
        commands,
        "verify",
        _verify,
        "read everything in the store, and check it",
        examples=("workspace verify",),
    )


def _verify(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.cli import progress
    from sandbox_kernel.workspace.collect import verify

    store = _store(arguments)
    count = len(store.packs.names())
    with progress.shown() as line:
        done = itertools.count(1)
        report = verify(store, on_pack=lambda name: line.tell(f"pack {next(done)} of {count}"))
    for problem in report.problems:
        print(printable(problem))
    found = f"{len(report.problems)} problems" if report.problems else "all is well"
    print(f"{report.saves} saves, {report.packs} packs, {report.objects} objects: {found}")
    return 1 if report.problems else 0


def _add_rm(commands: Commands) -> None:
    parser = _command(
        commands,
        "rm",
        _rm,
        "delete workspaces, with their history",
        details="What only they\nused is freed by `workspace gc`. One that is not there counts as "
        "deleted.",
        examples=(
            "workspace rm demo",
            "workspace rm demo && sandbox-kernel workspace gc --grace 0",
        ),
    )
    parser.add_argument("names", nargs="+", metavar="NAME", type=_workspace, help=_NAME_HELP)
    parser.add_argument("--at", default="", metavar="SAVE", help="only this save")


def _rm(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    for name in arguments.names:
        if store.remove(name, arguments.at):
            print(printable(name))
        else:
            note(f"There is no workspace {name!r}. Nothing to delete.")
    return 0


# --- text


def _public(save: SaveInfo) -> dict[str, object]:
    values = {key: value for key, value in asdict(save).items() if key not in ("packs", "extra")}
    return {**values, **{k: v for k, v in save.extra.items() if k not in values}}


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"


def _name(path: str) -> str:
    """A path that can be printed, in one line."""
    plain = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return printable(plain).replace("\n", "\\n").replace("\t", "\\t")


def _mode(entry: Entry) -> str:
    kinds = {"f": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "h": stat.S_IFREG}
    mode = 0o777 if entry.kind == "l" else entry.mode
    return stat.filemode(kinds[entry.kind] | mode)


def _when(entry: Entry) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.mtime / 1e9))
    except (OverflowError, ValueError, OSError):
        return "-" * 19


def _target(entry: Entry) -> str:
    if entry.kind == "l":
        return f" -> {_name(entry.target)}"
    return f" = {_name(entry.target)}" if entry.kind == "h" else ""
