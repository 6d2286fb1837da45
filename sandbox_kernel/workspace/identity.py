"""Which notebook a workspace belongs to: that is told by the notebook itself, not by its path.

Beside its saves a workspace without a name of the user's own has a record of its notebook
(``notebook.json``): an id that the store gives it, the notebook's path, and what the notebook was
like when it was saved or opened last. A notebook that was deleted, and another one that was made
under its name, can be told apart by that, and a save finds its workspace under whichever name it
has now.
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
class Record:
    """What is known of the notebook of a workspace."""

    id: str
    """Of the workspace, in this store."""
    notebook: str = ""
    host: str = ""
    mtime: int = 0
    size: int = -1
    cells: tuple[str, ...] | None = None
    """The cells' ids, as short hashes; None if they are not known."""
    sources: tuple[str, ...] = ()
    """What is in the cells, as short hashes."""
    digest: str = ""
    """Of the whole file; empty if it is not known."""


def look(path: str) -> Record | None:
    """What a notebook is like now, without an id; None if it is not there or cannot be read."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            known = Record("", path, socket.gethostname(), status.st_mtime_ns, status.st_size)
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
        return known  # being written, or none that Jupyter could read


def is_same(known: Record | None, now: Record | None) -> bool | None:
    """Whether a notebook is the one that is known; None if that cannot be told.

    It is if it has not been touched, if it still has one of its cells, or (it was generated anew)
    half of what was in them.
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


def _is_moved(known: Record, now: Record) -> bool:
    """Whether a notebook elsewhere is the one that is known: that it has the same cells is not
    enough for that, as all copies of a template have them."""
    untouched = (known.mtime, known.size) == (now.mtime, now.size)
    return untouched or (bool(known.digest) and known.digest == now.digest)


def claim(store: Store, name: str, notebook: str) -> tuple[str, list[str]]:
    """A notebook is opened: make sure that workspace ``name`` is its own. Its id, and what had to
    be done for that, in words. Blocks.

    What another notebook left under this name is set aside. One that is back, or was moved here
    without a word to the server, gets its files.
    """
    told: list[str] = []
    now, known = look(notebook), read(store, name)
    verdict = is_same(known, now)
    retired = bool(store.retired(name))
    if verdict is False or (retired and not verdict):
        told += _set_aside(store, name, notebook)
        known = None
    elif retired:
        store.revive(name)
        told.append(f"Workspace {name} is used again: {notebook} is back")
    if not store.ids(name) and now is not None and (now.cells or now.sources):
        found, like = _find(store, now, name)
        if found is None and like:
            told.append(
                f"Workspace {like} was left by a notebook with cells of {notebook} that is not "
                f"where it was. `sandbox-kernel workspace export {like} FOLDER` writes its files"
            )
        if found is not None:
            other, known = found
            told.append(f"Workspace {other} belongs to {notebook}, and is brought there as {name}")
            if known.notebook == notebook:
                move(store, other, name, notebook)
            else:  # it may be in use elsewhere
                store.copy(other, name, notebook)
                known = None
    id_ = known.id if known is not None else secrets.token_hex(8)
    _write(store, name, replace(now or known or Record(""), id=id_, notebook=notebook), known)
    return id_, told


def note(store: Store, name: str, id_: str, notebook: str) -> None:
    """A notebook was saved: that is what it is like now."""
    now = look(notebook)
    if now is not None and id_:
        _write(store, name, replace(now, id=id_), read(store, name))


def read(store: Store, name: str) -> Record | None:
    """The record of a workspace's notebook, if it has one that makes sense."""
    try:
        values = {"digest": "", **json.loads(store.blobs.get(_path(name)))}
        known = {field.name: values[field.name] for field in fields(Record)}
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    cells = known["cells"]
    known["cells"] = tuple(cells) if cells is not None else None
    return Record(**{**known, "sources": tuple(known["sources"])})


def place_of(store: Store, name: str, id_: str) -> str:
    """The name that the workspace with an id has now, if it was ``name`` before: it may have been
    moved or set aside meanwhile."""
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
    """After a save was made: bring it to where its workspace is, if that was moved meanwhile."""
    place = place_of(store, save.workspace, id_)
    if place == save.workspace:
        return save
    record = read(store, place)
    store.move_save(save, place, record.notebook if record is not None else "")
    return replace(save, workspace=place)


def move(store: Store, name: str, new: str, notebook: str) -> list[str]:
    """A notebook was moved: its workspace gets another name. What had to be done, in words."""
    told: list[str] = []
    record, taken = read(store, name), read(store, new)
    if not set(store.ids(new)) <= set(store.ids(name)) or (record is None and taken is not None):
        told += _set_aside(store, new, notebook)
    if record is not None:
        # First: whoever saves meanwhile finds that the workspace has gone elsewhere.
        _write(store, new, replace(record, notebook=notebook), None)
        store.blobs.delete(_path(name))
    store.rename(name, new, notebook)
    if record is not None:
        _move_baseline(store, new, *map(os.path.dirname, (record.notebook, notebook)))
    return told


def _move_baseline(store: Store, name: str, folder: str, new: str) -> None:
    """If the notebook was moved with its folder, what is known of that is true of the new one."""
    before, after = os.path.realpath(folder), os.path.realpath(new)
    if before != after and not os.path.exists(before):
        known = store.baseline(name, before)
        if known.root and not store.baseline(name, after).root:
            store.set_baseline(name, after, known)


def copy(store: Store, name: str, new: str, notebook: str) -> list[str]:
    """A notebook was copied: its workspace is, too. What had to be done, in words."""
    told = _set_aside(store, new, notebook) if store.ids(new) else []
    if store.copy(name, new, notebook):
        _write(store, new, replace(look(notebook) or Record(""), id=secrets.token_hex(8)), None)
    return told


def _set_aside(store: Store, name: str, notebook: str) -> list[str]:
    """Under this name is what another notebook has left: give it another one, and retire it."""
    record = read(store, name)
    aside = f"{_end_of(name)}-old-{secrets.token_hex(4)}"
    if record is not None and store.ids(name):
        _write(store, aside, record, None)
    store.blobs.delete(_path(name))
    if not store.rename(name, aside):
        return []
    store.retire(aside)
    return [
        f"Workspace {name} was left by another notebook that was {notebook}; it is kept as {aside} "
        f"until gc. `sandbox-kernel workspace export {aside} FOLDER` writes its files"
    ]


def _find(store: Store, now: Record, name: str) -> tuple[tuple[str, Record] | None, str]:
    """A workspace of this notebook under another name: set aside, or left by a notebook that has
    been moved away from where it was; and one that may be."""
    moved: tuple[str, Record] | None = None
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
            continue  # this is a copy of it
        if _is_moved(record, now):
            moved = other, record
        elif not store.retired(other):
            like = other
    return moved, like


def _end_of(name: str) -> str:
    """As much of a name as leaves room for more."""
    return name[-_LONGEST:].lstrip("-._")


def _hashes(values: Any) -> tuple[str, ...]:
    texts = (value for value in values if isinstance(value, str) and value)
    found = (hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12] for text in texts)
    return tuple(dict.fromkeys(found))


def _write(store: Store, name: str, record: Record, before: Record | None) -> None:
    if record != before:
        store.blobs.put(_path(name), json.dumps(asdict(record)).encode())


def _path(name: str) -> str:
    return f"workspaces/{name}/{RECORD}"
