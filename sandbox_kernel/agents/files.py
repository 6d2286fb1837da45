"""The files of a sandbox's workspace: read, write, list, upload, download.

``Notebook`` and the adapters call a SandboxFiles on the loop of its handle. It needs nothing of the
sandbox but commands, and Python in it. Paths are relative to the workspace, or absolute and below
it: a path that leads out is refused here. (Links in the sandbox may lead on to what else is in the
sandbox, which its own code could read anyway.) Nothing is written on this host but by ``download``,
and by that only below its target.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import posixpath
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sandbox_kernel import audit
from sandbox_kernel.agents.copying import copy_in, copy_out, in_time, last_output
from sandbox_kernel.errors import (
    ExecFailed,
    FileMissing,
    QuotaExceeded,
    SpecError,
    WorkspaceError,
    WorkspaceRefused,
)
from sandbox_kernel.guest import file_calls
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.workspace.copy_out import CopyWriter
from sandbox_kernel.workspace.reports import Quota

MOST_BYTES = 32 * 2**20
"""Bytes that ``read`` and ``write`` take at once; ``upload`` and ``download`` are for more."""
MOST_ENTRIES = 10_000
"""Entries of one folder that ``list`` gives."""
MOST_COPIED = Quota(max_bytes=2 * 2**30, max_files=100_000)
"""What ``upload`` and ``download`` copy at once."""
_LONGEST_PATH = 4096
_LONGEST_LINE = 4 * _LONGEST_PATH
_PIECE = 2**18
_PROGRAM = inspect.getsource(file_calls)
AnyPath = str | os.PathLike[str]
Kind = Literal["file", "folder", "link", "other"]


@dataclass(frozen=True)
class FileInfo:
    """An entry of a folder in the workspace."""

    path: str
    """Relative to the workspace."""
    kind: Kind
    size: int
    modified: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Listing:
    """A folder's entries by name, and how many more there are than were asked for."""

    entries: list[FileInfo]
    more: int = 0


@dataclass(frozen=True)
class Copied:
    """What ``download`` wrote on this host."""

    path: str
    files: int
    bytes: int
    left_out: tuple[str, ...] = ()
    """What was not copied, each with the reason: hidden files, links that lead out."""


def path_inside(path: AnyPath, workspace: str) -> str:
    """A path relative to the workspace, which is ``.`` itself; SpecError if it leads out of it."""
    try:
        text = os.fspath(path)
        usable = "\0" not in text and len(os.fsencode(text)) <= _LONGEST_PATH
    except (TypeError, UnicodeError):
        usable, text = False, repr(path)
    if not usable:
        raise SpecError(f"{text[:100]!r} is no path in a workspace.")
    relative = posixpath.relpath(posixpath.join(workspace, text), workspace)
    if relative == ".." or relative.startswith("../"):
        raise SpecError(
            f"{printable(text)} is outside of the workspace. Give a path relative to "
            f"{workspace}, or one below it."
        )
    return relative


class SandboxFiles:
    """The files of one sandbox."""

    def __init__(self, handle: SandboxHandle) -> None:
        self._handle = handle

    async def read(self, path: AnyPath, *, max_bytes: int = MOST_BYTES) -> bytes:
        """A file's contents. FileMissing; QuotaExceeded if it has more than ``max_bytes``."""
        inside = path_inside(path, self._handle.workdir)
        audit.note(self._handle, "copied", way="out", path=inside)
        header, data = await self._call("read", inside, max_bytes, most=max_bytes)
        if header.get("size") != len(data):
            raise self._refused(inside, "another number of bytes than it said")
        return data

    async def write(self, path: AnyPath, data: bytes | str) -> None:
        """Write a file at once or not at all, and the folders above it that are missing. A file
        that is there is replaced."""
        inside = path_inside(path, self._handle.workdir)
        data = data.encode() if isinstance(data, str) else bytes(data)
        if len(data) > MOST_BYTES:
            raise QuotaExceeded(
                f"{printable(inside)} would have {len(data)} bytes; at most {MOST_BYTES} are "
                f"written at once. Use upload."
            )
        audit.note(self._handle, "copied", way="in", path=inside)
        await self._call("write", inside, len(data), stdin=data)

    async def list(self, path: AnyPath = ".") -> list[FileInfo]:
        """A folder's entries by name, or a file's own. QuotaExceeded beyond MOST_ENTRIES."""
        found = await self.listing(path, MOST_ENTRIES)
        if found.more:
            raise QuotaExceeded(
                f"{path} in sandbox {self._handle.name!r} has {found.more} more than "
                f"{MOST_ENTRIES} entries. List the folders in it, or use listing."
            )
        return found.entries

    async def listing(self, path: AnyPath = ".", most: int = 1000) -> Listing:
        """At most ``most`` of a folder's entries by name, or a file's own."""
        most = max(0, min(most, MOST_ENTRIES))
        folder = path_inside(path, self._handle.workdir)
        header, data = await self._call("list", folder, most, most=most * 2048)
        entries = [self._entry(folder, line) for line in data.splitlines()[:most]]
        count = header.get("count")
        if not isinstance(count, int) or isinstance(count, bool):
            raise self._refused(folder, "no number of entries")
        return Listing(entries, max(0, count - most))

    async def upload(
        self,
        source: AnyPath,
        path: AnyPath = ".",
        *,
        quota: Quota = MOST_COPIED,
    ) -> int:
        """Copy a file or folder of this host into the workspace. A copy into an existing folder
        keeps its own name there. The number of files."""
        inside = path_inside(path, self._handle.workdir)
        return await copy_in(self._handle, os.fspath(source), inside, quota)

    async def download(
        self,
        path: AnyPath,
        target: AnyPath = ".",
        *,
        force: bool = False,
        hidden: bool = False,
        quota: Quota = MOST_COPIED,
    ) -> Copied:
        """Copy a file or folder of the workspace to this host, where it appears when it is
        complete. A copy into an existing folder keeps its own name there. ``force`` replaces a
        file. Without ``hidden``, names with a dot, which programs here may obey, are left out, and
        links that lead out always are."""
        inside = path_inside(path, self._handle.workdir)
        name = posixpath.basename(inside if inside != "." else self._handle.workdir)
        receiver = CopyWriter(
            os.fspath(target), name or self._handle.name, force=force, hidden=hidden, quota=quota
        )
        await copy_out(self._handle, inside, receiver)
        return Copied(receiver.path, receiver.files, receiver.bytes, tuple(receiver.skipped))

    async def _call(
        self,
        call: str,
        inside: str,
        number: int,
        *,
        stdin: bytes = b"",
        most: int = 0,
    ) -> tuple[dict[str, Any], bytes]:
        """The first line of the answer, and at most ``most`` bytes after it."""
        python = self._handle.python or "python3"
        argv = [python, "-I", "-c", _PROGRAM, call, inside, str(number)]
        async with await self._handle.open_command(Command(argv)) as stream:
            try:
                for at in range(0, len(stdin), _PIECE):
                    await in_time(self._handle, stream.write(stdin[at : at + _PIECE]))
                await in_time(self._handle, stream.close_stdin())
            except (BrokenPipeError, ConnectionError):
                pass  # the answer says why it stopped reading
            answer = bytearray()
            while data := await in_time(self._handle, stream.read()):
                answer += data
                if len(answer) > most + _LONGEST_LINE:
                    raise self._refused(inside, "more than was asked for")
            if b"\n" not in answer:
                raise ExecFailed(
                    f"{printable(inside)} in sandbox {self._handle.name!r} could not be reached: "
                    f"{await last_output(self._handle, stream) or 'Python ended early.'}"
                )
        line, _, rest = bytes(answer).partition(b"\n")
        return self._checked(inside, line), rest

    def _checked(self, inside: str, line: bytes) -> dict[str, Any]:
        try:
            header = json.loads(line[:_LONGEST_LINE])
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise self._refused(inside, "no answer that can be read")
        if "error" not in header:
            return header
        what = f"{printable(inside)} in sandbox {self._handle.name!r}"
        reason = printable(str(header["error"])[:300])
        kind = header.get("kind")
        if kind == "missing":
            raise FileMissing(f"{what} does not exist: {reason}. list shows what does.")
        if kind == "large":
            raise QuotaExceeded(f"{what} {reason}, which is more than asked for. Use download.")
        raise WorkspaceError(f"{what}: {reason}.")

    def _entry(self, folder: str, line: bytes) -> FileInfo:
        try:
            name, kind, size, modified = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            raise self._refused(folder, "an entry that cannot be read") from None
        valid = (
            isinstance(name, str)
            and len(name) <= _LONGEST_PATH
            and not ("/" in name or "\0" in name or name in (".", ".."))
            and kind in get_args(Kind)
            and type(size) is int
            and 0 <= size < 2**63
            and isinstance(modified, (int, float))
            and math.isfinite(modified)
        )
        if not valid:
            raise self._refused(folder, "an entry that cannot be")
        return FileInfo(posixpath.normpath(posixpath.join(folder, name)), kind, size, modified)

    def _refused(self, inside: str, what: str) -> WorkspaceRefused:
        return WorkspaceRefused(
            f"Sandbox {self._handle.name!r} answered for {printable(inside)} with {what}."
        )
