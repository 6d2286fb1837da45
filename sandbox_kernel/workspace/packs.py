"""Packs: files of the store that hold many objects each.

    magic | stored bytes of the objects | index | footer

The index has one record for each object; the footer has its offset and SHA-256. A pack is written
once and never changed. Only the indexes say which pack has an object.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from sandbox_kernel.errors import StoreDamaged, StoreError
from sandbox_kernel.guest.workspace.tree_format import CHUNK, MAX_TREE, TREE_KIND, digest, unpack
from sandbox_kernel.tunnel.background import Workers
from sandbox_kernel.workspace.blobs import Blobs

FOLDER = "packs"
_SUFFIX = ".pack"
MAGIC = b"SKPACK1\n"
RECORD = struct.Struct(">32sQIIBB")
"""hash, offset, stored length, plain length, codec (0 plain, 1 zlib), kind (0 chunk, 1 tree)"""
FOOTER = struct.Struct(">QQ32s8s")
"""offset of the index, number of records, SHA-256 of the index, magic"""
PACK_SIZE = 16 * 2**20
_TAIL = 64 * 1024
_WINDOW, _GAP = 4 * 2**20, 64 * 1024
_AHEAD = 2
_LOOKS = 5


class Location(NamedTuple):
    pack: str
    offset: int
    stored: int
    plain: int
    codec: int
    kind: int


class Stored(NamedTuple):
    """An object of a pack, verified."""

    hash: bytes
    codec: int
    data: bytes | memoryview
    plain: bytes | memoryview


class Packs:
    """The packs of a store, with the indexes that this process has loaded. Thread-safe."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._lock = threading.RLock()
        self._index: dict[bytes, Location] = {}
        self._loaded: set[str] = set()
        self._doomed: frozenset[str] = frozenset()

    # --- the index

    def find(self, hash_: bytes) -> Location | None:
        """Where an object is, if a loaded pack that is not doomed has it."""
        found = self._index.get(hash_)
        return None if found is None or found.pack in self._doomed else found

    def doom(self, names: Iterable[str]) -> None:
        """Set which packs ``gc`` is about to delete."""
        with self._lock:
            self._doomed = frozenset(names)
            self._forget(self._doomed)

    def sizes(self) -> dict[str, int]:
        """All packs in the store, by name, with their sizes."""
        return {
            name.removesuffix(_SUFFIX): size
            for name, size in self._blobs.files(FOLDER).items()
            if name.endswith(_SUFFIX)
        }

    def names(self) -> set[str]:
        """Names of all packs in the store."""
        found = self._blobs.names(FOLDER)
        return {name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)}

    def refresh(self, present: set[str] | None = None) -> bool:
        """Forget packs that are not ``present`` (default: in the store). Whether there were any."""
        present = self.names() if present is None else present
        with self._lock:
            gone = self._loaded - present
            self._forget(gone)
            return bool(gone)

    def _forget(self, names: Collection[str]) -> None:
        if not self._loaded.isdisjoint(names):
            self._loaded -= set(names)
            self._index = {h: at for h, at in self._index.items() if at.pack not in names}

    def load(self, names: Iterable[str] | None = None) -> None:
        """Load the indexes of these packs, or of all."""
        with self._lock:
            there = self.names() if names is None else names
            # Doomed packs last: the first pack with an object counts.
            wanted = sorted(
                (n for n in there if n not in self._loaded), key=self._doomed.__contains__
            )
            if not wanted:
                return
            with Workers(min(16, len(wanted))) as pool:
                for name, records in zip(wanted, pool.map(self._read_index, wanted), strict=True):
                    if records is not None:
                        self._loaded.add(name)
                        for hash_, location in records:
                            if self._index.setdefault(hash_, location).pack in self._doomed:
                                self._index[hash_] = location

    def add(self, name: str, records: Iterable[tuple[bytes, Location]]) -> None:
        """Find the objects of a new pack there from now on; gc copies some from other packs."""
        with self._lock:
            self._loaded.add(name)
            self._index.update(records)

    def _read_index(self, name: str) -> list[tuple[bytes, Location]] | None:
        try:
            return list(self.records(name))
        except FileNotFoundError:
            return None  # gc has deleted it: live objects are in another pack

    def records(self, name: str) -> Iterator[tuple[bytes, Location]]:
        """The index of a pack. StoreDamaged."""
        path = pack_path(name)
        size = self._blobs.size(path)
        tail = self._blobs.get_range(path, max(0, size - _TAIL), min(size, _TAIL))
        if len(tail) < FOOTER.size:
            raise self._damaged(name, "it is too short")
        offset, count, checksum, magic = FOOTER.unpack(tail[-FOOTER.size :])
        length = count * RECORD.size
        if magic != MAGIC or offset + length + FOOTER.size != size:
            raise self._damaged(name, "it has no valid footer")
        if length + FOOTER.size <= len(tail):
            index = tail[len(tail) - FOOTER.size - length : len(tail) - FOOTER.size]
        else:
            index = self._blobs.get_range(path, offset, length)
        if digest(index) != checksum:
            raise self._damaged(name, "the checksum of its index is wrong")
        for hash_, start, stored, plain, codec, kind in RECORD.iter_unpack(index):
            limit = MAX_TREE if kind == TREE_KIND else CHUNK
            if kind > TREE_KIND or plain > limit or start + stored > offset:
                raise self._damaged(name, "its index is invalid")
            yield hash_, Location(name, start, stored, plain, codec, kind)

    # --- reading

    def read(self, hash_: bytes) -> bytes:
        """The contents of an object, verified."""
        for _ in range(_LOOKS):
            location = self._find_or_load(hash_)
            try:
                data = self._blobs.get_range(
                    pack_path(location.pack), location.offset, location.stored
                )
            except FileNotFoundError:  # gc has moved the object and deleted the pack
                self.refresh()
                continue
            return bytes(self._verified(hash_, location, data).plain)
        raise self._moving()

    def read_many(self, hashes: Iterable[bytes]) -> Iterator[Stored]:
        """Objects in pack order, each once and verified. Reads large ranges, a little ahead."""
        left = dict.fromkeys(hashes)
        for _ in range(_LOOKS):
            try:
                for stored in self._read_windows(list(left)):
                    del left[stored.hash]
                    yield stored
                return
            except FileNotFoundError:  # as in ``read``
                self.refresh()
        raise self._moving()

    def _moving(self) -> StoreError:
        return StoreError(
            f"Packs of the store {self._blobs.url} kept moving while they were read. Try again "
            f"when `sandbox-kernel workspace gc` has ended."
        )

    def _read_windows(self, hashes: Iterable[bytes]) -> Iterator[Stored]:
        wanted = {hash_: self._find_or_load(hash_) for hash_ in hashes}
        order = sorted(wanted.items(), key=lambda item: (item[1].pack, item[1].offset))
        windows = _windows(order)
        with Workers(_AHEAD) as pool:

            def read(window: Window) -> Future[bytes]:
                pack, start, end, _ = window
                return pool.submit(self._blobs.get_range, pack_path(pack), start, end - start)

            reads = deque(map(read, windows[:_AHEAD]))
            for number, (_, start, _, objects) in enumerate(windows, _AHEAD):
                view = memoryview(reads.popleft().result())
                reads.extend(map(read, windows[number : number + 1]))
                for hash_, location in objects:
                    at = location.offset - start
                    yield self._verified(hash_, location, view[at : at + location.stored])

    def _find_or_load(self, hash_: bytes) -> Location:
        found = self._index.get(hash_)
        if found is None:
            self.load()
            found = self._index.get(hash_)
        if found is None:
            raise StoreDamaged(
                f"The store {self._blobs.url} has no object {hash_.hex()}. "
                f"`sandbox-kernel workspace verify` lists which saves need it."
            )
        return found

    def _verified(self, hash_: bytes, location: Location, data: bytes | memoryview) -> Stored:
        try:
            plain = unpack(location.codec, data, location.plain)
        except ValueError as error:
            raise self._damaged(location.pack, f"object {hash_.hex()}: {error}") from None
        if digest(plain) != hash_:
            raise self._damaged(location.pack, f"object {hash_.hex()} has another SHA-256")
        return Stored(hash_, location.codec, data, plain)

    def check(self, name: str, records: Iterable[tuple[bytes, Location]]) -> Iterator[str]:
        """Read a whole pack with these ``records``; the problems found."""
        data = memoryview(self._blobs.get(pack_path(name)))
        for hash_, location in records:
            try:
                part = data[location.offset : location.offset + location.stored]
                self._verified(hash_, location, part)
            except StoreDamaged as error:
                yield str(error)

    def delete(self, name: str) -> None:
        self._blobs.delete(pack_path(name))
        self.refresh()

    def _damaged(self, name: str, what: str) -> StoreDamaged:
        return StoreDamaged(f"The store {self._blobs.url}: the pack {name} is damaged: {what}.")


class PackWriter:
    """Collects objects and writes them as packs, one at a time in a thread: at most two packs are
    in memory. A context manager: objects count as stored when it has exited without an error.
    After an error, the packs already written are garbage."""

    def __init__(self, blobs: Blobs, packs: Packs) -> None:
        self.elsewhere: set[str] = set()
        """Packs with objects that need not be added."""
        self.plain_bytes = 0
        self._blobs = blobs
        self._packs = packs
        self._parts: list[bytes | memoryview] = [MAGIC]
        self._size = len(MAGIC)
        self._records: list[tuple[bytes, Location]] = []
        self._name = _new_name()
        self._pool = Workers(1)
        self._writing: Future[None] | None = None
        self._written: dict[str, list[tuple[bytes, Location]]] = {}

    @property
    def names(self) -> list[str]:
        """The new packs."""
        return list(self._written)

    def add(
        self, kind: int, hash_: bytes, codec: int, data: bytes | memoryview, plain: int
    ) -> None:
        at = Location(self._name, self._size, len(data), plain, codec, kind)
        self._records.append((hash_, at))
        self._parts.append(data)
        self._size += len(data)
        self.plain_bytes += plain
        if self._size >= PACK_SIZE:
            self._flush()

    def need_not(self, hash_: bytes) -> bool:
        """Whether the store has an object, which then need not be added."""
        at = self._packs.find(hash_)
        if at is not None:
            self.elsewhere.add(at.pack)
        return at is not None

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with self._pool:
            if error is not None:
                return
            if self._records:
                self._flush()
            if self._writing is not None:
                self._writing.result()
        for name, records in self._written.items():
            self._packs.add(name, records)

    def _flush(self) -> None:
        index = b"".join(
            RECORD.pack(h, at.offset, at.stored, at.plain, at.codec, at.kind)
            for h, at in self._records
        )
        footer = FOOTER.pack(self._size, len(self._records), digest(index), MAGIC)
        parts, name = [*self._parts, index, footer], self._name
        if self._writing is not None:
            self._writing.result()
        self._written[name] = self._records
        self._writing = self._pool.submit(self._blobs.put, pack_path(name), *parts)
        self._parts, self._size, self._records = [MAGIC], len(MAGIC), []
        self._name = _new_name()


def _new_name() -> str:
    return f"{int(time.time()):010x}-{secrets.token_hex(10)}"


def pack_path(name: str) -> str:
    return f"{FOLDER}/{name}{_SUFFIX}"


Window = tuple[str, int, int, list[tuple[bytes, Location]]]


def _windows(order: Iterable[tuple[bytes, Location]]) -> list[Window]:
    """Group neighbours in a pack into single reads: pack, start, end, objects."""
    windows: list[Window] = []
    for hash_, at in order:
        end = at.offset + at.stored
        if windows:
            pack, start, before, objects = windows[-1]
            if pack == at.pack and at.offset - before <= _GAP and end - start <= _WINDOW:
                objects.append((hash_, at))
                windows[-1] = (pack, start, max(before, end), objects)
                continue
        windows.append((at.pack, at.offset, end, [(hash_, at)]))
    return windows
