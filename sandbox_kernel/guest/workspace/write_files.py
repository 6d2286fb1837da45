"""Hydrate, in the sandbox: writes files as the host plans.

New files and folders are assembled in a staging folder inside the workspace, and moved into place
when all are complete: an interrupted hydrate leaves the workspace unchanged.
"""

import os
import struct
from collections import OrderedDict, defaultdict
from typing import Any, Callable, DefaultDict, Dict, List, Optional, Sequence, Tuple

from .nofollow import CREATE, FOLDER, Root, closing_fd, pread_exactly, pwrite_all, remove
from .scan_cache import Folder, Item, signature_of
from .tree_format import (
    CHUNK,
    RESERVED,
    digest,
    name_bytes,
    path_parts,
    pieces,
    unpack,
)

STAGING = (RESERVED + "hydrate").encode()
FILL_HEADER = struct.Struct(">BI")
FILL_TARGET = struct.Struct(">IQ")
"""The number of a file, and an offset in it."""
_MOST_OPEN = 64


class _Staged:
    """A file in the staging folder, at ``place`` and ``name``. Only a complete file in a new folder
    has a ``status``: it moves with that folder."""

    __slots__ = ("entry", "missing", "name", "path", "pieces", "place", "status")

    def __init__(
        self, path: str, entry: Sequence[Any], place: Sequence[bytes], name: bytes
    ) -> None:
        self.path = path
        self.entry = entry
        self.place = place
        self.name = name
        self.pieces = {at: (hash_, length) for at, hash_, length in pieces(entry[5], entry[4])}
        self.missing = len(self.pieces)
        self.status: Optional[os.stat_result] = None


class Apply:
    """One hydrate, as the host's messages direct it."""

    def __init__(self, root: str) -> None:
        self._root = Root(root)
        self._plan: DefaultDict[str, List[Any]] = defaultdict(list)
        self._new: Dict[str, List[bytes]] = {}  # new folder -> its staging path
        self._tops: List[Tuple[str, bytes]] = []
        self._open: "OrderedDict[int, int]" = OrderedDict()
        self._staged: Dict[int, _Staged] = {}
        self.deleted = self.written = 0
        remove(self._root.fd, STAGING)
        os.mkdir(STAGING, 0o700, dir_fd=self._root.fd)
        self._staging = Root(os.open(STAGING, FOLDER, dir_fd=self._root.fd))

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        if self._staging.fd >= 0:
            self._staging.close()
            remove(self._root.fd, STAGING)
        self._root.close()

    def stage(self, plan: Dict[str, Any]) -> None:
        """Take a batch of the plan (``workspace/send.py``)."""
        for key, items in plan.items():
            self._plan[key] += items
        for path, _, _, new in plan.get("folders", ()):
            if new:
                self._stage_folder(path)
        for number, path, entry in plan.get("files", ()):
            parent, _, name = path.rpartition("/")
            place = self._new.get(parent) if parent else None
            if place is None:
                staged = _Staged(path, entry, (), b"%d" % number)
            else:
                staged = _Staged(path, entry, place, name_bytes(name))
            self._staged[number] = staged
            if not staged.missing:
                self._complete(staged, self._create(staged))

    def _stage_folder(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        if parent in self._new:
            place = [*self._new[parent], name_bytes(name)]
        else:
            place = [b"new%d" % len(self._tops)]
            self._tops.append((path, place[0]))
        os.mkdir(place[-1], 0o700, dir_fd=self._staging.folder(place[:-1]))
        self._new[path] = place

    def _create(self, staged: _Staged) -> int:
        flags = CREATE & ~os.O_EXCL
        return os.open(staged.name, flags, 0o600, dir_fd=self._staging.folder(staged.place))

    def fill(self, payload: "bytes | bytearray") -> None:
        """Write a chunk to one or more places."""
        view = memoryview(payload)
        codec, count = FILL_HEADER.unpack(view[: FILL_HEADER.size])
        end = FILL_HEADER.size + count * FILL_TARGET.size
        data = unpack(codec, view[end:], CHUNK)
        for number, offset in FILL_TARGET.iter_unpack(view[FILL_HEADER.size : end]):
            self._write(number, offset, data)

    def reuse(self, number: int, path: str, places: Sequence[Tuple[int, int]]) -> bool:
        """Copy chunks from the present file, each to an offset and from one; False if it has
        changed."""
        staged = self._staged[number]
        try:
            source = self._root.read(path)
        except OSError:
            return False
        with closing_fd(source):
            for offset, present in places:
                hash_, length = staged.pieces[offset]
                data = pread_exactly(source, length, present)
                if digest(data).hex() != hash_:
                    return False
                self._write(number, offset, data)
        return True

    def _write(self, number: int, offset: int, data: "bytes | memoryview") -> None:
        staged = self._staged[number]
        if len(data) != staged.pieces[offset][1]:
            raise ValueError("chunk of the wrong length")
        fd = self._open.get(number)
        if fd is None:
            fd = self._create(staged)
            if staged.missing > 1:
                self._open[number] = fd
                if len(self._open) > _MOST_OPEN:
                    os.close(self._open.popitem(last=False)[1])
        pwrite_all(fd, data, offset)
        staged.missing -= 1
        if not staged.missing:
            self._open.pop(number, None)
            self._complete(staged, fd)

    def _complete(self, staged: _Staged, fd: int) -> None:
        _, _, mode, mtime, size, chunks = staged.entry
        with closing_fd(fd):
            if not chunks or isinstance(chunks[-1], int):
                os.ftruncate(fd, size)
            os.fchmod(fd, mode)
            os.utime(fd, ns=(mtime, mtime))
            if staged.place:
                staged.status = os.fstat(fd)

    # --- the end

    def finish(self, cache: Folder, progress: "Callable[[int, int], object]") -> None:
        """Move everything into place, and update the cache. ``progress`` gets file counts."""
        lacking = [staged.path for staged in self._staged.values() if staged.missing]
        if lacking:
            raise ValueError("%d files are incomplete, such as %s" % (len(lacking), lacking[0]))
        for path in self._plan["delete"]:
            self.deleted += self._root.delete(path)
        for path, _, _, new in self._plan["folders"]:
            if path and not new:
                parent, name = self._root.parent(path)
                os.chmod(name, 0o700, dir_fd=parent)  # writable; it gets its mode in the end
        self._staging.forget()
        for path, top in self._tops:
            parent, name = self._root.parent(path)
            os.rename(top, name, src_dir_fd=self._staging.fd, dst_dir_fd=parent)
        for number in sorted(self._staged):
            staged = self._staged[number]
            if staged.status is None:
                parent, name = self._root.parent(staged.path)
                os.rename(staged.name, name, src_dir_fd=self._staging.fd, dst_dir_fd=parent)
                staged.status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            self._note(cache, staged, staged.status)
            self.written += 1
            progress(self.written, 0)
        for path, entry in self._plan["meta"]:
            parent, name = self._root.parent(path)
            os.chmod(name, entry[2], dir_fd=parent)
            os.utime(name, ns=(entry[3], entry[3]), dir_fd=parent, follow_symlinks=False)
        for path, mtime, target in self._plan["links"]:
            parent, name = self._root.parent(path)
            remove(parent, name)
            os.symlink(name_bytes(target), name, dir_fd=parent)
            os.utime(name, ns=(mtime, mtime), dir_fd=parent, follow_symlinks=False)
            self.written += 1
        for path, target in self._plan["hard"]:
            self._link(path, target)
        for path, mode, mtime, _ in sorted(self._plan["folders"], reverse=True):
            self._root.forget()
            if path:
                fd = self._root.folder(path_parts(path))
                os.fchmod(fd, mode)
                os.utime(fd, ns=(mtime, mtime))
        self._root.forget()

    def _link(self, path: str, target: str) -> None:
        folder, source = self._root.parent(target)
        with closing_fd(os.dup(folder)) as from_fd:
            to_fd, name = self._root.parent(path)
            remove(to_fd, name)
            os.link(source, name, src_dir_fd=from_fd, dst_dir_fd=to_fd, follow_symlinks=False)
        self.written += 1

    def _note(self, cache: Folder, staged: _Staged, status: os.stat_result) -> None:
        *parents, name = staged.path.split("/")
        folder = cache
        for part in parents:
            folder = folder.folders.setdefault(part, Folder())
        data = sum(length for _, length in staged.pieces.values())
        folder.items[name] = Item(signature_of(status), staged.entry, data)
