"""The names, links and a few files of an image, enough to find its Python.

Reads layers, lowest first, as a runtime would unpack them, but unpacks nothing.
"""

from __future__ import annotations

import re
import tarfile
from typing import IO

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_HEAD = 64
_MAX_WHOLE = 8 * 2**20
_MAX_LINKS = 40
# Files that are read: the C library (for its version), the users, virtual environments.
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

    def add(self, entry: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        """Add an entry of the topmost layer."""
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
                    self._bytes[entry.name] = content.read(-1 if whole else _HEAD)

    def resolve(self, path: str) -> str | None:
        """The path with all links resolved, within the image. None if it does not exist."""
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
        """The sorted names in a folder."""
        return sorted(self._children.get(self.resolve(folder) or "", ()))

    def read(self, path: str) -> bytes:
        """The bytes kept of a file; b"" if none were."""
        return self._bytes.get(self.resolve(path) or "", b"")

    def files(self, name: re.Pattern[str]) -> list[str]:
        """Paths that match, of files of which bytes were kept."""
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
