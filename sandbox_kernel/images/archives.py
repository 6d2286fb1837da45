"""Reads untrusted tar archives without unpacking them.

An archive becomes a stream of entries with validated names, links and sizes. Entries that could
harm whoever unpacks them later are refused. Memory use is bounded.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, BinaryIO, cast

from sandbox_kernel.errors import SpecError
from sandbox_kernel.untrusted_text import printable

MAX_BYTES = 64 * 2**30
MAX_ENTRIES = 2_000_000
MAX_HEADER = 2**20
_MAX_PATH, _MAX_NAME = 4096, 255
_COMPRESSIONS: Mapping[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ": lzma.open,
    b"BZh": bz2.open,
}
_ZSTD = b"\x28\xb5\x2f\xfd"
_EXTENSIONS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class BadArchive(SpecError):
    """An archive is broken or malicious."""


class _Entry(tarfile.TarInfo):
    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        # tarfile reads these into memory.
        if self.type in _EXTENSIONS and self.size > MAX_HEADER:
            raise BadArchive(f"has a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]


class _Limited:
    """A file of which at most ``limit`` bytes can be read."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self._left = limit

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise BadArchive(f"holds more than {MAX_BYTES >> 30} GiB")
        return data


def decompressed(file: BinaryIO, where: str) -> IO[bytes]:
    """The uncompressed content of a file; its first bytes say how it is compressed."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(_ZSTD):
        raise BadArchive(
            f"{where} is compressed with zstd, which is not supported. Compress it with gzip."
        )
    for magic, opened in _COMPRESSIONS.items():
        if start.startswith(magic):
            return cast(IO[bytes], opened(file))
    return file


def entries(
    file: IO[bytes], where: str, *, limit: int = MAX_BYTES
) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """The entries of an archive in order, regular files with their content.

    ``name`` is relative and without ``.`` and ``..`` (the root is ``""``). So is the ``linkname``
    of a hard link, which names an earlier regular file. ``where`` names the archive in errors.
    Read the content before the next entry.
    """
    kinds: dict[str, bytes] = {}
    try:
        with tarfile.open(
            fileobj=cast(Any, _Limited(file, limit)), mode="r|", tarinfo=_Entry, errorlevel=2
        ) as archive:
            total = 0
            for entry in archive:
                total += entry.size
                if len(kinds) >= MAX_ENTRIES or total > limit:
                    raise BadArchive(f"holds more than {MAX_ENTRIES} entries or {limit >> 30} GiB")
                _check(entry, kinds)
                _remember(entry, kinds)
                archive.members.clear()  # type: ignore[attr-defined]  # or it keeps them all
                yield entry, archive.extractfile(entry) if entry.isreg() else None
    except BadArchive as error:
        raise BadArchive(f"{where} is refused: it {error}.") from None
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
        raise BadArchive(f"{where} cannot be read as a tar archive: {error}") from error


def _check(entry: tarfile.TarInfo, kinds: dict[str, bytes]) -> None:
    shown = repr(printable(entry.name[:200]))
    entry.name = _relative(entry.name)
    parents = entry.name.split("/")[:-1]
    for depth in range(1, len(parents) + 1):
        if kinds.get("/".join(parents[:depth]), tarfile.DIRTYPE) != tarfile.DIRTYPE:
            raise BadArchive(f"puts {shown} into something that is not a folder")
    before = kinds.get(entry.name, entry.type)
    if before != entry.type and {before, entry.type} & {tarfile.DIRTYPE, tarfile.SYMTYPE}:
        raise BadArchive(f"has {shown} twice, as different things")
    if entry.islnk():
        entry.linkname = _relative(entry.linkname)
        if kinds.get(entry.linkname) not in (*tarfile.REGULAR_TYPES, tarfile.LNKTYPE):
            raise BadArchive(f"has a hard link {shown} to something that is no file in it")
    elif entry.issym():
        if not entry.linkname or "\0" in entry.linkname or len(entry.linkname) > _MAX_PATH:
            raise BadArchive(f"has a link {shown} with an invalid target")
    elif entry.ischr() or entry.isblk():
        if parents[:1] != ["dev"]:
            raise BadArchive(f"has the device {shown}")
    elif not (entry.isreg() or entry.isdir() or entry.isfifo()):
        raise BadArchive(f"has {shown} of an unknown kind")
    if not entry.name and not entry.isdir():
        raise BadArchive("has a root that is not a folder")
    if entry.size < 0:
        raise BadArchive(f"has {shown} of a negative size")


def _remember(entry: tarfile.TarInfo, kinds: dict[str, bytes]) -> None:
    kinds[entry.name] = entry.type
    folder = entry.name.rpartition("/")[0]
    while folder and folder not in kinds:
        kinds[folder] = tarfile.DIRTYPE
        folder = folder.rpartition("/")[0]


def _relative(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    too_long = len(name) > _MAX_PATH or any(
        len(part.encode(errors="surrogateescape")) > _MAX_NAME for part in parts
    )
    if ".." in parts or "\0" in name or too_long:
        raise BadArchive(f"has an entry with the name {printable(name[:200])!r}")
    return "/".join(parts)
