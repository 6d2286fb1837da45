"""Writes layers reproducibly: the same files give the same bytes, on any machine and day."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from sandbox_kernel.errors import SpecError
from sandbox_kernel.images.archives import MAX_BYTES, MAX_ENTRIES

Entry = tuple[tarfile.TarInfo, IO[bytes] | None]

_LEFT_EMPTY = ("dev", "proc", "sys")
"""Folders that a running system fills; their content is left out."""
_EARLIEST = 315532800
"""1980: zip archives, among them wheels, cannot hold earlier times."""


def fixed_time() -> int:
    """The mtime of files in images: $SOURCE_DATE_EPOCH, else the beginning of 1980."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if text and not (text.isdigit() and int(text) < 2**32):
        raise SpecError(f"SOURCE_DATE_EPOCH takes seconds since 1970, not {text!r}.")
    return int(text) if text else _EARLIEST


@dataclass(frozen=True)
class Layer:
    """A written layer."""

    digest: str
    """Of the compressed file, ``sha256:...``."""
    size: int
    diff_id: str
    """Digest of the uncompressed content."""


class Hashing:
    """A file that hashes what it reads or writes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        return self._hashed(self._file.read(size))

    def write(self, data: bytes) -> int:
        self._file.write(self._hashed(data))
        return len(data)

    def _hashed(self, data: bytes) -> bytes:
        self._hash.update(data)
        self.size += len(data)
        return data

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def write_layer(path: Path, entries: Iterable[Entry]) -> Layer:
    """Write a compressed layer. Entries are normalised as ``normalised`` says."""
    time = fixed_time()
    with path.open("wb") as file:
        outer = Hashing(file)
        with gzip.GzipFile("", "wb", 6, cast(Any, outer), mtime=0) as packed:
            inner = Hashing(packed)
            with tarfile.open(
                fileobj=cast(Any, inner), mode="w|", format=tarfile.PAX_FORMAT
            ) as archive:
                for entry, content in entries:
                    if entry.name and not (entry.ischr() or entry.isblk()):
                        archive.addfile(normalised(entry, time), content)
    return Layer(outer.digest, outer.size, inner.digest)


def normalised(entry: tarfile.TarInfo, time: int) -> tarfile.TarInfo:
    """The entry without what differs between machines and days. Python sources keep their mtime,
    on which their compiled files depend."""
    made = tarfile.TarInfo(entry.name)
    sparse_or_plain = entry.isreg()
    made.type = tarfile.REGTYPE if sparse_or_plain else entry.type
    made.size = entry.size if sparse_or_plain else 0
    made.linkname = entry.linkname
    made.mode = stat.S_IMODE(entry.mode)
    made.uid, made.gid = entry.uid & 0x7FFFFFFF, entry.gid & 0x7FFFFFFF
    keep = sparse_or_plain and entry.name.endswith(".py")
    made.mtime = min(max(int(entry.mtime), 0), 2**32 - 1) if keep else time
    return made


def without_live_folders(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries without those in /dev, /proc and /sys."""
    for entry, content in entries:
        first, _, rest = entry.name.partition("/")
        if first not in _LEFT_EMPTY or not rest:
            yield entry, content


def folder_entries(root: Path) -> Iterator[Entry]:
    """The sorted files under a folder, without following links or leaving the file system. Files of
    this user belong to root in the image. Sockets and devices are left out."""
    device = root.stat().st_dev
    archive = tarfile.open(fileobj=io.BytesIO(), mode="w")  # noqa: SIM115  (knows hard links)
    total = count = 0

    def walk(folder: str, prefix: str) -> Iterator[Entry]:
        nonlocal total, count
        with os.scandir(folder) as found:
            items = sorted(found, key=lambda item: os.fsencode(item.name))
        for item in items:
            entry = archive.gettarinfo(item.path, prefix + item.name)
            # None: a socket.
            if entry is None or entry.ischr() or entry.isblk():
                continue
            entry.uid = 0 if entry.uid == os.geteuid() else entry.uid
            entry.gid = 0 if entry.gid == os.getegid() else entry.gid
            total, count = total + entry.size, count + 1
            if total > MAX_BYTES or count > MAX_ENTRIES:
                raise SpecError(f"{root} holds more than {MAX_BYTES >> 30} GiB or too many files.")
            if entry.isreg():
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                with io.FileIO(os.open(item.path, flags)) as content:
                    yield entry, content
            else:
                yield entry, None
            if entry.isdir() and os.lstat(item.path).st_dev == device:
                yield from walk(item.path, f"{prefix}{item.name}/")

    yield from walk(str(root), "")


def made_folder(name: str, *, uid: int = 0, gid: int = 0) -> Entry:
    """An entry for a folder."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, uid, gid
    return entry, None


def made_file(name: str, content: bytes, *, mode: int = 0o644) -> Entry:
    """An entry for a file of root's."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    return entry, io.BytesIO(content)
