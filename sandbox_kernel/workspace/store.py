"""The store: workspaces, and the files of their saves as objects in packs.

    format.json             version and identity of the store
    packs/<pack>.pack       objects: chunks of files, and trees
    workspaces/<name>/...   workspaces and their saves (``workspaces``)
    unused/<pack>.json      since when nothing has needed a pack (``garbage``)
    doomed/<pack>.json      since when a pack is to be deleted: no new save relies on it
    claims/<x>.json         who saves or collects garbage now (``store_users``)

A save appears when its packs are complete.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from sandbox_kernel.errors import PacksGone, StoreDamaged, StoreError
from sandbox_kernel.paths import data_dir
from sandbox_kernel.workspace import store_users
from sandbox_kernel.workspace.blobs import Blobs, open_blobs
from sandbox_kernel.workspace.packs import Packs, PackWriter
from sandbox_kernel.workspace.reports import Baseline, Change, SaveInfo
from sandbox_kernel.workspace.trees import Catalog, Entry, Totals, changes, entries_of, plain, walk
from sandbox_kernel.workspace.workspaces import Workspaces, new_id

FORMAT = "sandbox-kernel workspace store"
VERSION = 1
_MOST_HINTS = 1000
_MOST_CATALOGS = 16
log = logging.getLogger("sandbox_kernel")


class Store(Workspaces):
    """Workspaces and the files of their saves. Make one with ``Store.open``. Thread-safe. All calls
    block (S3 may take long), so an event loop makes them in a thread."""

    def __init__(self, blobs: Blobs) -> None:
        super().__init__(blobs)
        self.packs = Packs(blobs)
        self.id = self._identity()
        self._catalogs: dict[str, Catalog] = {}
        self._whole: set[str] = set()
        self._broken: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, url: str = "") -> Store:
        """The store at a URL that fsspec knows (``s3://bucket/folder``) or in a local folder; by
        default ``$SANDBOX_KERNEL_STORE``, else ``<data dir>/store``. Created if missing."""
        url = url or os.environ.get("SANDBOX_KERNEL_STORE", "") or str(data_dir() / "store")
        return cls(open_blobs(url))

    def _identity(self) -> str:
        try:
            found = self._json("format.json")
        except FileNotFoundError:
            self._put("format.json", {"format": FORMAT, "version": VERSION, "id": uuid.uuid4().hex})
            found = self._json("format.json")  # another process may have been later
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            raise StoreError(
                f"This version cannot use the store {self.url}: it has the format "
                f"{found.get('format')!r} {found.get('version')!r}, not {FORMAT!r} {VERSION}."
            )
        return str(found.get("id"))

    # --- reading a save

    def read(self, hash_: bytes) -> bytes:
        """The contents of an object, verified."""
        return self.packs.read(hash_)

    def check(self, save: SaveInfo) -> Totals:
        """Validate all trees of a save, before a walk. WorkspaceRefused, StoreDamaged."""
        self.packs.load(save.packs)
        return self.catalog(save.workspace).add(self.read, save.tree)

    def files(self, save: SaveInfo) -> Iterator[tuple[str, Entry]]:
        """Every path of a save, folders before their contents."""
        self.check(save)
        return walk(self.read, save.tree)

    def lookup(self, save: SaveInfo, path: str) -> Entry | None:
        """One entry of a save, by its path."""
        entry: Entry | None = Entry("", "d", tree=save.tree)
        for part in path.split("/"):
            if entry is None or entry.kind != "d":
                return None
            entry = next((e for e in entries_of(self.read, entry.tree) if e.name == part), None)
        return entry

    def diff(self, before: SaveInfo | None, after: SaveInfo) -> Sequence[Change]:
        """The changes from one save to another (None: from nothing), by path."""
        for save in (before, after):
            if save is not None:
                self.check(save)
        return list(changes(self.read, before.tree if before is not None else b"", after.tree))

    def baseline_files(self, baseline: Baseline) -> dict[str, Entry]:
        """The entries of a baseline by path, with hard links as separate files."""
        found = plain(walk(self.read, baseline.root)) if baseline.root else {}
        return {path: entry for path, entry in found.items() if path not in baseline.apart}

    # --- making a save

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Held while a save or baseline is made: ``gc`` deletes no pack that was there at the
        beginning, and the save relies on no pack that ``gc`` has doomed."""
        with store_users.claimed(self.blobs, "save"):
            self.packs.doom(self.doomed())
            yield

    def doomed(self) -> set[str]:
        """Packs that ``gc`` has decided to delete."""
        return {file.removesuffix(".json") for file in self.blobs.names("doomed")}

    def begin(self, name: str) -> tuple[SaveInfo | None, Sequence[str]]:
        """Within ``saving``: the newest save to build the next one on, and its packs that exist."""
        present = self.packs.names()
        if self.packs.refresh(present) or not present:
            self._look_again()
        base = self.latest(name)
        if base is None:
            return None, ()
        hints = [pack for pack in base.packs if pack in present]
        self.packs.load(hints)
        if base.root in self._broken or (len(hints) < len(base.packs) and not self._is_whole(base)):
            return None, ()  # somebody deleted packs by hand: everything must be sent
        return base, hints

    def writer(self) -> PackWriter:
        return PackWriter(self.blobs, self.packs)

    def publish(self, save: SaveInfo, needs: Collection[str] = ()) -> SaveInfo:
        """Add a save, with a new id; its objects must be in the store. Revives a retired workspace.
        PacksGone if a pack that it ``needs`` was deleted meanwhile."""
        parent = max(self.ids(save.workspace), default="")
        made = replace(
            save,
            id=new_id(parent),
            parent=save.parent or parent,
            created=save.created or time.time(),
            packs=list(dict.fromkeys(save.packs))[-_MOST_HINTS:],
        )
        self._put_save(made)
        if set(needs) - self.packs.names():
            self._delete_save(made.workspace, made.id)
            raise PacksGone(
                f"The store {self.url} was cleaned up, or deleted, while {made.workspace!r} was "
                f"being saved. Nothing was saved; save again."
            )
        self.revive(made.workspace)
        return made

    def restore(self, name: str, at: str) -> SaveInfo:
        """Make the files of an earlier save the newest save. The history is kept."""
        old = self.find(name, at)
        self.check(old)
        present = self.packs.names()
        return self.publish(
            replace(
                old,
                kind="restore",
                created=0.0,
                parent="",
                packs=[pack for pack in old.packs if pack in present],
                extra={**old.extra, "restored": old.id},
            )
        )

    def _delete_save(self, name: str, id_: str) -> None:
        super()._delete_save(name, id_)
        with self._lock:  # another workspace may get this name
            self._catalogs.pop(name, None)

    # --- what this process knows of the store

    def catalog(self, name: str) -> Catalog:
        """The known objects of a workspace. ``check`` and each save made here add to it."""
        with self._lock:
            if name not in self._catalogs and len(self._catalogs) >= _MOST_CATALOGS:
                self._catalogs.pop(next(iter(self._catalogs)))
            return self._catalogs.setdefault(name, Catalog())

    def distrust(self, save: SaveInfo) -> None:
        """The store lacks objects of a save: do not build on it."""
        self._broken.add(save.root)
        self.forget()

    def forget(self) -> None:
        """Forget everything that is known of the store."""
        self._forget_catalogs()
        self.packs.refresh(set())

    def _forget_catalogs(self) -> None:
        with self._lock:
            self._catalogs.clear()
            self._whole.clear()

    def _look_again(self) -> None:
        """Packs were deleted; perhaps the whole store."""
        self._forget_catalogs()
        before, self.id = self.id, self._identity()
        if before != self.id:
            log.warning("The store %s was deleted. A new one was made in its place.", self.url)

    def _is_whole(self, save: SaveInfo) -> bool:
        """Whether the store has all objects of a save, according to the indexes of its packs."""
        if save.root in self._whole:
            return True
        try:
            self.packs.load()
            needed = Catalog()
            needed.add(self.read, save.tree)
        except StoreDamaged:
            return False
        whole = all(self.packs.find(hash_) is not None for hash_ in needed.chunks)
        if whole:
            self._whole.add(save.root)
        return whole
