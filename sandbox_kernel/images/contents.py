"""What is in an image, as far as one must know to find its Python: names, links, a few files.

Filled from layers, lowest first, in the way that a runtime would unpack them; nothing is unpacked.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import IO, cast

from sandbox_kernel.images.layers import Entry

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_HEAD = 64
_MAX_WHOLE = 8 * 2**20
_MAX_LINKS = 40
# Files that are looked into: the C library (for its version), the users, marks of an environment.
_WHOLE = re.compile(
    r"(.*/)?(libc\.so\.6|libc-2\.\d+\.so|ld-musl-[^/]+\.so\.1|pyvenv\.cfg)|etc/passwd"
)


class Contents:
    """The files of an image by path, relative to its root."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {"": "folder"}
        self._links: dict[str, str] = {}
        self._bytes: dict[str, bytes] = {}
        self._children: dict[str, set[str]] = {}

    def add(self, entry: tarfile.TarInfo, content: IO[bytes] | None) -> bytes:
        """Take in an entry of the topmost layer. What was read of its content is given back."""
        folder, _, name = entry.name.rpartition("/")
        if name == _OPAQUE:
            for child in list(self._children.get(folder, ())):
                self._remove(f"{folder}/{child}" if folder else child)
        elif name.startswith(_WHITEOUT):
            hidden = name.removeprefix(_WHITEOUT)
            self._remove(f"{folder}/{hidden}" if folder else hidden)
        elif entry.isdir():
            self._put(entry.name, "folder")
        elif entry.issym():
            self._put(entry.name, "link")
            self._links[entry.name] = entry.linkname
        elif entry.islnk():
            self._put(entry.name, "file")
            self._bytes[entry.name] = self._bytes.get(entry.linkname, b"")
        else:
            self._put(entry.name, "file")
            if content is not None:
                whole = _WHOLE.fullmatch(entry.name) and entry.size <= _MAX_WHOLE
                in_bin = "bin" in folder.split("/")[-1:] and name.startswith("python")
                if whole or in_bin:
                    self._bytes[entry.name] = data = content.read(-1 if whole else _HEAD)
                    return data
        return b""

    def watch(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """The same entries, taken in as they pass by."""
        for entry, content in entries:
            read = self.add(entry, content)
            yield entry, cast("IO[bytes]", _Again(read, content)) if content and read else content

    def resolve(self, path: str) -> str | None:
        """Where a path leads to, through links, within the image. None: nowhere."""
        waiting = [part for part in reversed(path.split("/")) if part not in ("", ".")]
        here: list[str] = []
        links = 0
        while waiting:
            part = waiting.pop()
            if part == "..":
                here = here[:-1]
                continue
            path = "/".join([*here, part])
            kind = self._kinds.get(path)
            if kind == "link":
                links += 1
                if links > _MAX_LINKS:
                    return None
                target = self._links[path]
                here = [] if target.startswith("/") else here
                waiting += [p for p in reversed(target.split("/")) if p not in ("", ".")]
            elif kind is None or (waiting and kind != "folder"):
                return None
            else:
                here.append(part)
        return "/".join(here)

    def is_file(self, path: str) -> bool:
        found = self.resolve(path)
        return found is not None and self._kinds[found] == "file"

    def is_folder(self, path: str) -> bool:
        found = self.resolve(path)
        return found is not None and self._kinds[found] == "folder"

    def names(self, folder: str) -> list[str]:
        """What is in a folder, sorted."""
        return sorted(self._children.get(self.resolve(folder) or "", ()))

    def read(self, path: str) -> bytes:
        """The bytes that were kept of a file; b"" if none were."""
        return self._bytes.get(self.resolve(path) or "", b"")

    def files(self, name: re.Pattern[str]) -> list[str]:
        """Paths of the files that bytes were kept of and whose whole path matches."""
        return sorted(path for path in self._bytes if name.fullmatch(path))

    def _put(self, path: str, kind: str) -> None:
        if self._kinds.get(path) != kind:
            if path:
                self._remove(path)
            self._kinds[path] = kind
        self._links.pop(path, None)
        self._bytes.pop(path, None)
        while path:
            path, _, name = path.rpartition("/")
            if self._kinds.get(path) != "folder":
                self._links.pop(path, None)
                self._bytes.pop(path, None)
            self._kinds[path] = "folder"
            self._children.setdefault(path, set()).add(name)

    def _remove(self, path: str) -> None:
        waiting = [path]
        while waiting:
            gone = waiting.pop()
            waiting += [f"{gone}/{child}" for child in self._children.pop(gone, ())]
            for known in (self._kinds, self._links, self._bytes):
                known.pop(gone, None)
        folder, _, name = path.rpartition("/")
        self._children.get(folder, set()).discard(name)


class _Again:
    """A file of which the beginning was read already, from the beginning."""

    def __init__(self, read: bytes, file: IO[bytes]) -> None:
        self._read = read
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = 2**62
        first, self._read = self._read[:size], self._read[size:]
        return first + self._file.read(size - len(first)) if len(first) < size else first
