"""Objects that are made on the host go into the store, if it lacks them."""

from __future__ import annotations

from collections.abc import Mapping

from sandbox_kernel.guest.workspace.layout import pack
from sandbox_kernel.workspace.packs import CHUNK_KIND, TREE_KIND, PackWriter
from sandbox_kernel.workspace.reports import OnProgress, Progress
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, build


class Sink:
    """Stores what a scan finds, if the store lacks it."""

    def __init__(self, store: Store, writer: PackWriter, progress: OnProgress) -> None:
        self.elsewhere: set[str] = set()
        self._store = store
        self._writer = writer
        self._seen: set[bytes] = set()
        self._progress = progress

    def chunk(self, hash_: bytes, data: bytes) -> None:
        self._add(CHUNK_KIND, hash_, data)

    def known_chunk(self, hash_: bytes, size: int, path: str, index: int) -> None:
        """Nothing is known before an import."""

    def tree(self, hash_: bytes, data: bytes) -> None:
        self._add(TREE_KIND, hash_, data)

    def progress(self, files: int, size: int) -> None:
        self._progress(Progress("scan", files, size))

    def _add(self, kind: int, hash_: bytes, data: bytes) -> None:
        if hash_ in self._seen:
            return
        self._seen.add(hash_)
        at = self._store.packs.find(hash_)
        if at is not None:
            self.elsewhere.add(at.pack)
            return
        codec, packed = pack(data)
        self._writer.add(kind, hash_, codec, packed, len(data))


def add_tree(store: Store, entries: Mapping[str, Entry]) -> tuple[bytes, list[str]]:
    """The hash of a tree of entries whose contents are in the store, and the packs that its own
    objects are in."""
    store.packs.refresh()
    writer = store.writer()
    try:
        sink = Sink(store, writer, lambda progress: None)
        root = build(entries, sink.tree)
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    return root, [*sink.elsewhere, *writer.names]
