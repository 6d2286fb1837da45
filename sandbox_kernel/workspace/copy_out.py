"""Writes a stream of files from a sandbox (``guest/copy_stream.py``) to the host.

The stream is hostile: every header is bounded and validated, only the one new file or folder is
written, and it appears under its name when it is complete. As with ``export``, modes are reduced,
and symlinks out of the folder and hidden names are left out.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

from sandbox_kernel.errors import QuotaExceeded, WorkspaceError, WorkspaceRefused
from sandbox_kernel.guest.copy_stream import LENGTH
from sandbox_kernel.guest.workspace.nofollow import CREATE, Root, remove
from sandbox_kernel.guest.workspace.tree_format import (
    MAX_DEPTH,
    MAX_SIZE,
    RESERVED,
    name_bytes,
    path_parts,
)
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.workspace.export_guard import hidden_part, why_not_link
from sandbox_kernel.workspace.exports import HARMLESS_MODES
from sandbox_kernel.workspace.reports import Quota
from sandbox_kernel.workspace.trees import (
    checked_integer,
    checked_link,
    checked_mode,
    checked_path,
    checked_time,
)

MAX_HEADER = 2**17


class CopyWriter:
    """Takes a stream piece by piece. ``feed`` and ``close`` block: call them in a thread.

    ``target`` is the new file or folder, or an existing folder that gets a ``name``. ``force``
    replaces an existing file.
    """

    def __init__(self, target: str, name: str, *, force: bool, hidden: bool, quota: Quota) -> None:
        if os.path.isdir(target):
            target = os.path.join(target, name)
        self.path = os.path.abspath(target)
        parent, last = os.path.split(self.path)
        if os.path.lexists(self.path) and (os.path.isdir(self.path) or not force):
            way = (
                "Remove it first."
                if os.path.isdir(self.path)
                else "Add --force (force=True) to replace it."
            )
            raise WorkspaceError(f"{printable(self.path)} exists already. {way}")
        try:
            self._root = Root(parent)
        except OSError as error:
            raise WorkspaceError(f"The folder {parent} cannot be used: {error}") from error
        self._name = os.fsencode(last)
        self._temporary = f"{RESERVED}copy-{secrets.token_hex(8)}".encode()
        self._hidden, self._quota = hidden, quota
        self._waiting = bytearray()
        self._file = -1
        self._left = 0
        self._header: dict[str, Any] = {}
        self._links: dict[str, str] = {}
        self._folders: list[tuple[list[bytes], int, int]] = []
        self.files = self.bytes = self._entries = 0
        self.skipped: list[str] = []
        self.done = False

    def feed(self, data: bytes) -> bool:
        """Write a piece. True at the end, when everything is in its place."""
        self._waiting += data
        try:
            while not self.done and self._step():
                pass
        except OSError as error:
            raise WorkspaceError(f"Writing to {printable(self.path)} failed: {error}") from error
        return self.done

    def close(self) -> None:
        """Remove an incomplete copy. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._root.fd >= 0:
            if not self.done:
                remove(self._root.fd, self._temporary)
            self._root.close()

    def _step(self) -> bool:
        """Process one part of the buffer; False if it needs more data."""
        if self._left:
            taken = bytes(self._waiting[: self._left])
            del self._waiting[: len(taken)]
            self._left -= len(taken)
            view = memoryview(taken)
            while view and self._file >= 0:
                view = view[os.write(self._file, view) :]
            if not self._left:
                self._end_of_file()
            return bool(taken)
        if len(self._waiting) < LENGTH.size:
            return False
        (length,) = LENGTH.unpack_from(self._waiting)
        if length > MAX_HEADER:
            raise self._refused(f"a header of {length} bytes")
        if len(self._waiting) < LENGTH.size + length:
            return False
        header = bytes(self._waiting[LENGTH.size : LENGTH.size + length])
        del self._waiting[: LENGTH.size + length]
        if length:
            self._entry(header)
        else:
            self._finish()
        return True

    def _entry(self, data: bytes) -> None:
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise self._refused("an invalid header")
        if "error" in header:
            raise WorkspaceError(f"The sandbox could not read {printable(str(header['error']))}.")
        try:
            path, kind, size = self._checked(header)
        except (KeyError, TypeError, ValueError) as error:
            raise self._refused(f"an invalid entry ({printable(str(error))})") from None
        self._entries += 1
        self.bytes += size
        if self._entries > self._quota.max_files or self.bytes > self._quota.max_bytes:
            raise QuotaExceeded(
                f"The copy has more than {self._quota.max_files} files and folders, or "
                f"{self._quota.max_bytes} bytes. Nothing was written. Raise the limits with "
                f"--max-files and --max-bytes (quota=)."
            )
        skipped = ""
        if self._guarded(path):
            skipped = "hidden; programs here could obey it (--hidden copies it)"
        elif kind == "l":
            self._links[path] = header["target"]
        elif kind == "x":
            skipped = "neither a file nor a folder"
        if skipped:
            self.skipped.append(f"{printable(path)}: {skipped}")
        *parents, last = self._parts(path)
        self._header, self._left = header, size
        if kind == "d" and not skipped:
            os.mkdir(last, 0o700, dir_fd=self._root.folder(parents))
            self._folders.append(([*parents, last], header["mode"], header["mtime"]))
        elif kind == "f":
            if not skipped:
                self._file = os.open(last, CREATE, 0o600, dir_fd=self._root.folder(parents))
            if not size:
                self._end_of_file()

    def _checked(self, header: dict[str, Any]) -> tuple[str, str, int]:
        path, kind = header["path"], header["kind"]
        if path != "":
            checked_path(path)
        if (path == "") != (not self._entries) or path.count("/") >= MAX_DEPTH:
            raise ValueError("wrong place")
        if kind not in (("f", "d", "l", "x") if path else ("f", "d")):
            raise ValueError("neither a file nor a folder")
        if kind == "l":
            checked_link(header["target"])
        else:
            checked_mode(header["mode"])
            checked_time(header["mtime"])
        return path, kind, checked_integer(header["size"], 0, MAX_SIZE) if kind == "f" else 0

    def _end_of_file(self) -> None:
        if self._file >= 0:
            self.files += 1
            os.fchmod(self._file, self._header["mode"] & HARMLESS_MODES | 0o600)
            os.utime(self._file, ns=(self._header["mtime"],) * 2)
            os.close(self._file)
            self._file = -1

    def _finish(self) -> None:
        if not self._entries:
            raise self._refused("nothing")
        for path, target in self._links.items():
            reason = why_not_link(path, target, self._targets, self._guarded)
            if reason:
                self.skipped.append(f"{printable(path)}: {reason}")
                continue
            *parents, last = self._parts(path)
            os.symlink(name_bytes(target), last, dir_fd=self._root.folder(parents))
        for parts, mode, mtime in reversed(self._folders):
            fd = self._root.folder(parts)
            os.fchmod(fd, mode & HARMLESS_MODES | 0o700)
            os.utime(fd, ns=(mtime, mtime))
        self._root.forget()
        os.rename(self._temporary, self._name, src_dir_fd=self._root.fd, dst_dir_fd=self._root.fd)
        self.done = True

    def _parts(self, path: str) -> list[bytes]:
        return [self._temporary, *(path_parts(path) if path else [])]

    def _guarded(self, path: str) -> str:
        return "" if self._hidden else hidden_part(path)

    def _targets(self, path: str) -> list[str]:
        return [self._links[path]] if path in self._links else []

    def _refused(self, what: str) -> WorkspaceRefused:
        return WorkspaceRefused(f"The sandbox sent {what}. Nothing was written.")
