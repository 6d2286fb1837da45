"""Which notebook a workspace belongs to: the notebook's cells decide, not its path.

A workspace that is named after its notebook has a record of it (``notebook.json``): an id from the
store, the notebook's path, and hashes of its cells when it was last saved or opened. The record
tells a notebook from another one that was later made under its name, and a save finds its workspace
by the id after a rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sandbox_kernel.workspace.reports import SaveInfo
from sandbox_kernel.workspace.store import Store

RECORD = "notebook.json"
_MOST_BYTES = 64 * 2**20
_MOST_CELLS = 1000
_MOST_SEARCHED = 200
_LONGEST = 50


@dataclass(frozen=True)
class NotebookRecord:
    """The notebook of a workspace."""

    id: str
    """The workspace's, in this store."""
    notebook: str = ""
    host: str = ""
    mtime: int = 0
    size: int = -1
    cells: tuple[str, ...] | None = None
    """Short hashes of the cells' ids; None if unknown."""
    sources: tuple[str, ...] = ()
    """Short hashes of the cells' contents."""
    digest: str = ""
    """Hash of the whole file; empty if unknown."""


def look(path: str) -> NotebookRecord | None:
    """Describe a notebook as it is now, without an id; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            known = NotebookRecord(
                "", path, socket.gethostname(), status.st_mtime_ns, status.st_size
            )
            data = file.read(_MOST_BYTES + 1)
    except OSError:
        return None
    if len(data) > _MOST_BYTES:
        return known
    known = replace(known, digest=hashlib.sha256(data).hexdigest()[:32])
    try:
        cells = json.loads(data)["cells"][:_MOST_CELLS]
        return replace(
            known,
            cells=_hashes(cell.get("id") for cell in cells),
            sources=_hashes("".join(cell.get("source", "")).strip() for cell in cells),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return known  # being written, or not a notebook


def is_same(known: NotebookRecord | None, now: NotebookRecord | None) -> bool | None:
    """Whether a notebook is the known one; None if unclear.

    It is if it is untouched, if it still has one of its cells, or, because it may have been
    generated again, half of their contents.
    """
    if known is None or now is None or known.size < 0:
        return None
    if (known.mtime, known.size) == (now.mtime, now.size):
        return True
    if known.cells is None or now.cells is None:
        return None
    if set(known.cells) & set(now.cells):
        return True
    both = set(known.sources) & set(now.sources)
    return bool(known.sources) and 2 * len(both) >= len(set(known.sources))


def _is_moved(known: NotebookRecord, now: NotebookRecord) -> bool:
    """Whether a notebook elsewhere is the known one: copies of a template have equal cells, too."""
    untouched = (known.mtime, known.size) == (now.mtime, now.size)
    return untouched or (bool(known.digest) and known.digest == now.digest)


def claim(store: Store, name: str, notebook: str) -> tuple[str, list[str]]:
    """When a notebook is opened, make sure that workspace ``name`` is its own: its id, and
    messages about what changed. Blocks.

    Sets aside a workspace that another notebook left under this name. Finds the workspace of a
    notebook that is back, or that was moved behind the server's back.
    """
    changes: list[str] = []
    now, known = look(notebook), read(store, name)
    verdict = is_same(known, now)
    retired = bool(store.retired(name))
    if verdict is False or (retired and not verdict):
        changes += _set_aside(store, name, notebook)
        known = None
    elif retired:
        store.revive(name)
        changes.append(f"Workspace {name} is in use again: {notebook} is back")
    if not store.ids(name) and now is not None and (now.cells or now.sources):
        found, like = _find(store, now, name)
        if found is None and like:
            changes.append(
                f"Workspace {like} belongs to a notebook with cells of {notebook} that has "
                f"disappeared. `sandbox-kernel workspace export {like} FOLDER` writes its files"
            )
        if found is not None:
            other, known = found
            changes.append(f"Workspace {other} belongs to {notebook}, which uses it now as {name}")
            if known.notebook == notebook:
                move(store, other, name, notebook)
            else:  # it may be in use elsewhere
                store.copy(other, name, notebook)
                known = None
    id_ = known.id if known is not None else secrets.token_hex(8)
    _write(
        store, name, replace(now or known or NotebookRecord(""), id=id_, notebook=notebook), known
    )
    return id_, changes


def note(store: Store, name: str, id_: str, notebook: str) -> None:
    """After a notebook was saved, update its record."""
    now = look(notebook)
    if now is not None and id_:
        _write(store, name, replace(now, id=id_), read(store, name))


def read(store: Store, name: str) -> NotebookRecord | None:
    """The record of a workspace's notebook, if it has a valid one."""
    try:
        values = {"digest": "", **json.loads(store.blobs.get(_path(name)))}
        known = {field.name: values[field.name] for field in fields(NotebookRecord)}
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    cells = known["cells"]
    known["cells"] = tuple(cells) if cells is not None else None
    return NotebookRecord(**{**known, "sources": tuple(known["sources"])})


def place_of(store: Store, name: str, id_: str) -> str:
    """The name of the workspace with an id, once ``name``: it may be renamed or set aside."""
    if not id_:
        return name
    here = read(store, name)
    if here is not None and here.id == id_:
        return name
    for other in store.blobs.folders("workspaces"):
        record = read(store, other) if other != name else None
        if record is not None and record.id == id_:
            return other
    return name if here is None else f"{_end_of(name)}-of-{id_[:8]}"


def settle(store: Store, save: SaveInfo, id_: str) -> SaveInfo:
    """Move a new save to its workspace, if that was renamed during the save."""
    place = place_of(store, save.workspace, id_)
    if place == save.workspace:
        return save
    record = read(store, place)
    store.move_save(save, place, record.notebook if record is not None else "")
    return replace(save, workspace=place)


def move(store: Store, name: str, new: str, notebook: str) -> list[str]:
    """Rename the workspace of a notebook that was moved. Messages about what changed."""
    changes: list[str] = []
    record, taken = read(store, name), read(store, new)
    if not set(store.ids(new)) <= set(store.ids(name)) or (record is None and taken is not None):
        changes += _set_aside(store, new, notebook)
    if record is not None:
        # First, so that a concurrent save finds the new name.
        _write(store, new, replace(record, notebook=notebook), None)
        store.blobs.delete(_path(name))
    store.rename(name, new, notebook)
    if record is not None:
        _move_baseline(store, new, *map(os.path.dirname, (record.notebook, notebook)))
    return changes


def _move_baseline(store: Store, name: str, folder: str, new: str) -> None:
    """If the notebook's folder was moved, its baseline holds for the new one."""
    before, after = os.path.realpath(folder), os.path.realpath(new)
    if before != after and not os.path.exists(before):
        known = store.baseline(name, before)
        if known.root and not store.baseline(name, after).root:
            store.set_baseline(name, after, known)


def copy(store: Store, name: str, new: str, notebook: str) -> list[str]:
    """Copy the workspace of a notebook that was copied. Messages about what changed."""
    changes = _set_aside(store, new, notebook) if store.ids(new) else []
    if store.copy(name, new, notebook):
        _write(
            store, new, replace(look(notebook) or NotebookRecord(""), id=secrets.token_hex(8)), None
        )
    return changes


def _set_aside(store: Store, name: str, notebook: str) -> list[str]:
    """Rename and retire the workspace that another notebook left under this name."""
    record = read(store, name)
    aside = f"{_end_of(name)}-old-{secrets.token_hex(4)}"
    if record is not None and store.ids(name):
        _write(store, aside, record, None)
    store.blobs.delete(_path(name))
    if not store.rename(name, aside):
        return []
    store.retire(aside)
    return [
        f"Workspace {name} belonged to another notebook {notebook}; it is kept as {aside} until "
        f"gc. `sandbox-kernel workspace export {aside} FOLDER` writes its files"
    ]


def _find(
    store: Store, now: NotebookRecord, name: str
) -> tuple[tuple[str, NotebookRecord] | None, str]:
    """A workspace of this notebook under another name, because it was set aside or the notebook was
    moved; and one that may be its own."""
    moved: tuple[str, NotebookRecord] | None = None
    like = ""
    for other in list(store.blobs.folders("workspaces"))[:_MOST_SEARCHED]:
        record = read(store, other) if other != name else None
        if record is None or record.host != now.host or not is_same(record, now):
            continue
        if not store.ids(other):
            continue
        if record.notebook == now.notebook:
            return (other, record), ""
        if is_same(record, look(record.notebook)):
            continue  # a copy of it
        if _is_moved(record, now):
            moved = other, record
        elif not store.retired(other):
            like = other
    return moved, like


def _end_of(name: str) -> str:
    """The end of a name, with room for a suffix."""
    return name[-_LONGEST:].lstrip("-._")


def _hashes(values: Any) -> tuple[str, ...]:
    texts = (value for value in values if isinstance(value, str) and value)
    found = (hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12] for text in texts)
    return tuple(dict.fromkeys(found))


def _write(store: Store, name: str, record: NotebookRecord, before: NotebookRecord | None) -> None:
    if record != before:
        store.blobs.put(_path(name), json.dumps(asdict(record)).encode())


def _path(name: str) -> str:
    return f"workspaces/{name}/{RECORD}"
