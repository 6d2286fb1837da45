"""The store: workspaces and their saves.

    format.json                             version and identity of the store
    packs/<pack>.pack                       objects: chunks of files, and trees
    workspaces/<name>/saves/<id>.json       one file a save; the newest is the workspace's state
    workspaces/<name>/failures/<id>.json    a save that could not be made, and why
    workspaces/<name>/baselines/<x>.json    what a host folder had at its last import or export
    workspaces/<name>/retired.json          since when the workspace has no notebook any more
    workspaces/<name>/notebook.json         which notebook it belongs to (identity.py)
    unused/<pack>.json                      since when nothing has needed a pack
    doomed/<pack>.json                      since when it is to be deleted: no save relies on it
    claims/<x>.json                         who saves, or collects garbage, just now

Nothing is ever changed in place, and no two writers write the same file: saves of two processes
are both there. A save appears when its packs are complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from typing import Any

from sandbox_kernel.errors import (
    PacksGone,
    StoreDamaged,
    StoreError,
    WorkspaceExists,
    WorkspaceNotFound,
)
from sandbox_kernel.paths import data_dir
from sandbox_kernel.workspace import claims
from sandbox_kernel.workspace.blobs import Blobs, FsspecBlobs, LocalBlobs, open_blobs
from sandbox_kernel.workspace.changes import changes
from sandbox_kernel.workspace.ids import is_id, new_id
from sandbox_kernel.workspace.names import check_workspace_name
from sandbox_kernel.workspace.packs import Packs, PackWriter
from sandbox_kernel.workspace.reports import Baseline, Change, FailedSave, SaveInfo
from sandbox_kernel.workspace.trees import Catalog, Entry, Totals, entries_of, totals_of, walk

FORMAT = "sandbox-kernel workspace store"
VERSION = 1
MOST_HINTS = 1000
MOST_FAILURES = 20
_RACES = 5
log = logging.getLogger("sandbox_kernel")
_FIELDS = {f.name for f in fields(SaveInfo)}
_FAILED_FIELDS = {f.name for f in fields(FailedSave)}


class Store:
    """Workspaces by name, each with its saves. Make one with ``Store.open``. Thread-safe; all calls
    block (S3 may take long), so a loop calls them in a thread."""

    def __init__(self, blobs: LocalBlobs | FsspecBlobs) -> None:
        self.blobs = blobs
        self.url = blobs.url
        self.packs = Packs(blobs)
        self.id = self._identity()
        self._catalogs: dict[str, Catalog] = {}
        self._whole: set[str] = set()
        self._broken: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, url: str = "") -> Store:
        """The store at a URL that fsspec knows (``s3://bucket/folder``) or in a local folder; by
        default ``$SANDBOX_KERNEL_STORE``, else ``<data dir>/store``. Made if it is not there."""
        url = url or os.environ.get("SANDBOX_KERNEL_STORE", "") or str(data_dir() / "store")
        return cls(open_blobs(url))

    def _identity(self) -> str:
        try:
            found = self._json("format.json")
        except FileNotFoundError:
            made = {"format": FORMAT, "version": VERSION, "id": uuid.uuid4().hex}
            self._put("format.json", made)
            found = self._json("format.json")  # another process may have been later
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            raise StoreError(
                f"{self.url} is no store that this version can use: it says "
                f"{found.get('format')!r} {found.get('version')!r}, not {FORMAT!r} {VERSION}."
            )
        return str(found.get("id"))

    # --- workspaces and saves

    def names(self, *, retired: bool = False) -> Sequence[str]:
        """Names of workspaces with a save, sorted. Retired ones only if asked for."""
        found = self.blobs.folders("workspaces")
        return [name for name in found if self.ids(name) and (retired or not self.retired(name))]

    def ids(self, name: str) -> list[str]:
        """Ids of all saves of a workspace, oldest first."""
        found = self.blobs.names(f"workspaces/{check_workspace_name(name)}/saves")
        ids = (file.removesuffix(".json") for file in found if file.endswith(".json"))
        return sorted(id_ for id_ in ids if is_id(id_))

    def saves(self, name: str) -> Sequence[SaveInfo]:
        """All saves of a workspace, oldest first; empty if there is none."""
        return [self.load(name, id_) for id_ in self.ids(name)]

    def latest(self, name: str) -> SaveInfo | None:
        """The newest save, or None."""
        for _ in range(_RACES):
            ids = self.ids(name)
            if not ids:
                return None
            with suppress(WorkspaceNotFound):  # removed just now
                return self.load(name, ids[-1])
        raise WorkspaceNotFound(f"The saves of {name!r} are being removed by another process.")

    def find(self, name: str, at: str = "") -> SaveInfo:
        """The newest save, or the one whose id is or begins with ``at``. WorkspaceNotFound."""
        ids = self.ids(name)
        if not ids:
            raise WorkspaceNotFound(
                f"There is no workspace {name!r} in the store {self.url}. "
                f"`sandbox-kernel workspace list` shows what there is."
            )
        if not at:
            return self.load(name, ids[-1])
        found = [id_ for id_ in ids if id_.startswith(at)] or [i for i in ids if i.endswith(at)]
        if len(found) != 1:
            several = f"{len(found)} saves" if found else "no save"
            raise WorkspaceNotFound(
                f"The workspace {name!r} has {several} {at!r}. "
                f"`sandbox-kernel workspace log {name}` lists them."
            )
        return self.load(name, found[0])

    def load(self, name: str, id_: str) -> SaveInfo:
        """One save, by its whole id. WorkspaceNotFound, StoreDamaged."""
        path = _save_path(name, id_)
        try:
            values = self._json(path)
        except FileNotFoundError:
            raise WorkspaceNotFound(f"The save {id_} of {name!r} has just been removed.") from None
        checksum = values.pop("sha256", None)
        known = {key: value for key, value in values.items() if key in _FIELDS}
        try:
            if checksum != _checksum(values) or len(bytes.fromhex(values["root"])) != 32:
                raise ValueError("its checksum is wrong")
            return SaveInfo(**known)
        except (TypeError, ValueError, KeyError) as error:
            raise StoreDamaged(f"The save {path} in {self.url} is damaged: {error}.") from error

    def publish(self, save: SaveInfo, needs: Collection[str] = ()) -> SaveInfo:
        """Add a save, whose objects must be in the store; its id is made here. A workspace that
        was retired is not so any more. PacksGone if one of the packs that it ``needs`` was deleted
        meanwhile; ``SaveInfo.packs`` is only a hint."""
        name = check_workspace_name(save.workspace)
        ids = self.ids(name)
        parent = ids[-1] if ids else ""
        id_ = new_id(parent)
        made = replace(
            save, id=id_, parent=save.parent or parent, created=save.created or time.time()
        )
        made = replace(made, packs=list(dict.fromkeys(made.packs))[-MOST_HINTS:])
        values = asdict(made)
        self._put(_save_path(name, id_), {**values, "sha256": _checksum(values)})
        if set(needs) - self.packs.names():
            self.blobs.delete(_save_path(name, id_))
            raise PacksGone(
                f"The store {self.url} was cleaned up, or deleted, while {name!r} was being saved. "
                f"Nothing was saved; save again."
            )
        self.revive(name)
        return made

    def note_failure(self, name: str, backend: str, sandbox: str, error: Exception) -> None:
        """A save of this workspace has failed: keep that with its history. Of many, the last."""
        ids = self.ids(name)
        id_ = new_id(ids[-1] if ids else "")
        failed = FailedSave(id_, time.time(), backend, sandbox, str(error))
        self._put(_failure_path(name, id_), asdict(failed))
        for old in self._failure_ids(name)[:-MOST_FAILURES]:
            self.blobs.delete(_failure_path(name, old))

    def failures(self, name: str) -> Sequence[FailedSave]:
        """Saves that could not be made, oldest first, as far as they are remembered."""
        found = []
        for id_ in self._failure_ids(name):
            try:
                values = self._json(_failure_path(name, id_))
                known = {key: value for key, value in values.items() if key in _FAILED_FIELDS}
                found.append(FailedSave(**known))
            except FileNotFoundError:
                continue  # another process has just forgotten it
            except TypeError as error:
                raise StoreDamaged(f"{_failure_path(name, id_)} is damaged: {error}.") from error
        return found

    def _failure_ids(self, name: str) -> list[str]:
        found = self.blobs.names(f"workspaces/{check_workspace_name(name)}/failures")
        return sorted(file.removesuffix(".json") for file in found if file.endswith(".json"))

    def diff(self, before: SaveInfo | None, after: SaveInfo) -> Sequence[Change]:
        """What changed from one save to another (None: from nothing), by path."""
        for save in (before, after):
            if save is not None:
                self.check(save)
        old = bytes.fromhex(before.root) if before is not None else b""
        return list(changes(self.read, old, bytes.fromhex(after.root), ""))

    def restore(self, name: str, at: str) -> SaveInfo:
        """Make an earlier save's files the newest save. Nothing of the history is lost."""
        old = self.find(name, at)
        self.check(old)
        extra = {**old.extra, "restored": old.id}
        present = self.packs.names()
        packs = [pack for pack in old.packs if pack in present]
        return self.publish(
            replace(old, kind="restore", created=0.0, parent="", packs=packs, extra=extra)
        )

    def rename(self, name: str, new: str, notebook: str = "") -> bool:
        """Give a workspace another name (a notebook was moved). False if it has no saves.
        WorkspaceExists if ``new`` has saves and is not retired. Safe to repeat."""
        check_workspace_name(new)
        ids = self.ids(name)
        if not ids:
            return False
        taken = set(self.ids(new))
        if taken and not taken <= set(ids):
            if not self.retired(new):
                raise WorkspaceExists(
                    f"There is a workspace {new!r} already. Remove it first with "
                    f"`sandbox-kernel workspace rm {new}`."
                )
            self.remove(new)
        while ids:  # saves may come while it is done
            for id_ in ids:
                with suppress(WorkspaceNotFound):  # removed just now
                    self.move_save(self.load(name, id_), new, notebook)
            ids = self.ids(name)
        for kept in ("baselines", "failures"):
            for file in self.blobs.names(f"workspaces/{name}/{kept}"):
                data = self.blobs.get(f"workspaces/{name}/{kept}/{file}")
                self.blobs.put(f"workspaces/{new}/{kept}/{file}", data)
        self.revive(new)
        self._forget(name)
        return True

    def move_save(self, save: SaveInfo, new: str, notebook: str = "") -> None:
        """Bring one save to another workspace. No error if it has been moved there already."""
        if save.id in self.ids(save.workspace):
            self._copy_save(save, new, notebook)
            self.blobs.delete(_save_path(save.workspace, save.id))

    def copy(self, name: str, new: str, notebook: str = "") -> bool:
        """A second workspace, which begins with the newest save of the first. False if there is
        none; WorkspaceExists if ``new`` has saves."""
        save = self.latest(name)
        if save is None:
            return False
        if self.ids(check_workspace_name(new)) and not self.retired(new):
            raise WorkspaceExists(f"There is a workspace {new!r} already.")
        if self.retired(new):
            self.remove(new)
        self._copy_save(replace(save, parent=""), new, notebook)
        return True

    def _copy_save(self, save: SaveInfo, new: str, notebook: str) -> None:
        values = asdict(replace(save, workspace=new, notebook=notebook or save.notebook))
        self._put(_save_path(new, save.id), {**values, "sha256": _checksum(values)})

    def retire(self, name: str) -> bool:
        """The notebook was deleted: hide the workspace, and let ``gc`` delete it after its grace
        time. False if there is none."""
        if not self.ids(name):
            return False
        self._put(f"workspaces/{name}/retired.json", {"since": time.time()})
        return True

    def retired(self, name: str) -> float:
        """Since when a workspace has been retired; 0 if it is not."""
        try:
            return float(self._json(f"workspaces/{name}/retired.json").get("since", 0.0))
        except FileNotFoundError:
            return 0.0

    def revive(self, name: str) -> bool:
        """Undo ``retire``. False if it was not retired."""
        if not self.retired(name):
            return False
        self.blobs.delete(f"workspaces/{name}/retired.json")
        return True

    def remove(self, name: str, at: str = "") -> bool:
        """Delete a workspace's saves now, or one of them; ``gc`` frees what only they used. False
        if there is none."""
        check_workspace_name(name)
        ids = [self.find(name, at).id] if at else self.ids(name)
        for id_ in ids:
            self.blobs.delete(_save_path(name, id_))
        if not at:
            self._forget(name)
        with self._lock:
            self._catalogs.pop(name, None)
        return bool(ids)

    def _forget(self, name: str) -> None:
        """All that is kept beside the saves of a workspace."""
        for kept in ("baselines", "failures"):
            for file in self.blobs.names(f"workspaces/{name}/{kept}"):
                self.blobs.delete(f"workspaces/{name}/{kept}/{file}")
        for file in ("retired.json", "notebook.json"):
            self.blobs.delete(f"workspaces/{name}/{file}")
        with self._lock:
            self._catalogs.pop(name, None)

    # --- what is in a save

    def read(self, hash_: bytes) -> bytes:
        """The contents of an object, verified."""
        return self.packs.read(hash_)

    def check(self, save: SaveInfo) -> Totals:
        """Validate all trees of a save before they are walked. WorkspaceRefused, StoreDamaged."""
        self.packs.load(save.packs)
        catalog = self.catalog(save.workspace)

        def read(hash_: bytes) -> bytes:
            catalog.trees.add(hash_)
            return self.read(hash_)

        root = bytes.fromhex(save.root)
        return totals_of(read, root, catalog.totals, on_entries=catalog.learn)

    def files(self, save: SaveInfo) -> Iterator[tuple[str, Entry]]:
        """Every path of a save, folders before what is in them."""
        self.check(save)
        return walk(self.read, bytes.fromhex(save.root))

    def lookup(self, root: bytes, path: str) -> Entry | None:
        """One entry of a tree, by its path."""
        entry: Entry | None = None
        for part in path.split("/"):
            if entry is not None and entry.kind != "d":
                return None
            tree = entry.tree if entry is not None else root
            entry = next((e for e in entries_of(self.read, tree) if e.name == part), None)
            if entry is None:
                return None
        return entry

    def catalog(self, name: str) -> Catalog:
        """What is known of a workspace. Grows with ``check`` and with each save made here."""
        with self._lock:
            if name not in self._catalogs and len(self._catalogs) >= 16:
                self._catalogs.pop(next(iter(self._catalogs)))
            return self._catalogs.setdefault(name, Catalog())

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around all that makes a save or a baseline: ``gc`` deletes nothing then that was there
        in the beginning, and what it was about to delete is not relied on."""
        with claims.claimed(self.blobs, "save"):
            self.packs.doom(self.doomed())
            yield

    def begin(self, name: str) -> tuple[SaveInfo | None, Sequence[str]]:
        """Before a save is made, within ``saving``: the newest save, and which packs of it are
        still there. What other processes have deleted is forgotten."""
        present = self.packs.names()
        if self.packs.refresh(present) or not present:
            self._look_again()
        base = self.latest(name)
        if base is None:
            return None, ()
        hints = [pack for pack in base.packs if pack in present]
        self.packs.load(hints)
        if base.root in self._broken or (len(hints) < len(base.packs) and not self._is_whole(base)):
            return None, ()  # somebody has deleted packs by hand: all is needed anew
        return base, hints

    def distrust(self, save: SaveInfo) -> None:
        """The store lacks some of a save: do not build on it."""
        self._broken.add(save.root)
        self.forget()

    def forget(self) -> None:
        """Rely on nothing that was known of the store."""
        with self._lock:
            self._catalogs.clear()
            self._whole.clear()
        self.packs.refresh(set())

    def _look_again(self) -> None:
        """Something was deleted; perhaps the whole store, by somebody who wanted it empty."""
        with self._lock:
            self._catalogs.clear()
            self._whole.clear()
        before, self.id = self.id, self._identity()
        if before != self.id:
            log.warning("The store %s was deleted, and is made anew.", self.url)

    def _is_whole(self, save: SaveInfo) -> bool:
        """Whether the store has all that a save needs, as far as the indexes of its packs tell."""
        if save.root in self._whole:
            return True
        chunks: set[bytes] = set()

        def learn(entries: Sequence[Entry]) -> None:
            chunks.update(hash_ for entry in entries for _, hash_, _ in entry.pieces())

        try:
            self.packs.load()
            totals_of(self.read, bytes.fromhex(save.root), {}, on_entries=learn)
        except StoreDamaged:
            return False
        whole = all(self.packs.find(hash_) is not None for hash_ in chunks)
        if whole:
            self._whole.add(save.root)
        return whole

    def doomed(self) -> set[str]:
        """Packs that ``gc`` has decided to delete."""
        return {file.removesuffix(".json") for file in self.blobs.names("doomed")}

    def writer(self) -> PackWriter:
        return PackWriter(self.blobs, self.packs)

    # --- baselines

    def baseline(self, name: str, folder: str) -> Baseline:
        """What is known of a host folder; an empty one if nothing is."""
        try:
            found = self._json(_baseline_path(name, folder))
        except FileNotFoundError:
            return Baseline()
        lists = {key: found.get(key, ()) for key in ("apart", "made", "replaced")}
        return Baseline(bytes.fromhex(found["root"]), taken=found.get("taken", 0.0), **lists)

    def set_baseline(self, name: str, folder: str, baseline: Baseline) -> None:
        value = {**asdict(baseline), "folder": folder, "root": baseline.root.hex()}
        self._put(_baseline_path(name, folder), value)

    def roots(self, name: str) -> Iterator[bytes]:
        """Every tree that must be kept for a workspace."""
        for id_ in self.ids(name):
            with suppress(WorkspaceNotFound):  # removed just now
                yield bytes.fromhex(self.load(name, id_).root)
        for file in self.blobs.names(f"workspaces/{name}/baselines"):
            with suppress(FileNotFoundError):
                yield bytes.fromhex(self._json(f"workspaces/{name}/baselines/{file}")["root"])

    # --- small files

    def _json(self, path: str) -> dict[str, Any]:
        data = self.blobs.get(path)
        try:
            value = json.loads(data)
            if not isinstance(value, dict):
                raise TypeError("no object")
        except (ValueError, TypeError) as error:
            raise StoreDamaged(f"The file {path} in {self.url} is damaged: {error}.") from error
        return value

    def _put(self, path: str, value: dict[str, Any]) -> None:
        self.blobs.put(path, json.dumps(value, indent=1).encode() + b"\n")


def _save_path(name: str, id_: str) -> str:
    return f"workspaces/{check_workspace_name(name)}/saves/{id_}.json"


def _failure_path(name: str, id_: str) -> str:
    return f"workspaces/{check_workspace_name(name)}/failures/{id_}.json"


def _baseline_path(name: str, folder: str) -> str:
    key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
    return f"workspaces/{check_workspace_name(name)}/baselines/{key}.json"


def _checksum(values: dict[str, Any]) -> str:
    plain = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


__all__ = ["Blobs", "Catalog", "Store"]
