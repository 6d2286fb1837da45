"""BridgeFiles: an agent's files in the sandbox of a SandboxBridge.

Paths are the sandbox's, relative ones from its working folder; the sandbox itself is the wall. Its
errors are Python's own (FileNotFoundError, IsADirectoryError, PermissionError, ...). What it sends
is bounded and validated.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.agents.sandbox_bridge import SandboxBridge
from sandbox_kernel.errors import ExecFailed
from sandbox_kernel.untrusted_text import printable

MAX_FILE = 100 * 2**20
"""Bytes that ``read`` gives back, if the caller says nothing."""
MAX_ENTRIES = 10_000
_MAX_ANSWER = 16 * 2**20
_MAX_WORDS = 300


class FileTooLarge(OSError):
    """A file has more bytes than the caller takes, or a folder too many entries."""


@dataclass(frozen=True)
class Entry:
    """A file or folder. A link is described by what it leads to."""

    name: str
    path: str
    is_dir: bool
    size: int | None
    """None if it is not a regular file."""


class BridgeFiles:
    """All methods may be called from any asyncio loop, as those of the bridge."""

    def __init__(self, bridge: SandboxBridge) -> None:
        self._bridge = bridge

    async def read(self, path: str, *, most: int = MAX_FILE) -> bytes:
        """The contents of a regular file. FileTooLarge."""
        answer = await self._ask("read", path, answer=2 * most + _MAX_ANSWER, limit=most)
        try:
            contents = base64.b64decode(answer["contents"], validate=True)
        except (KeyError, TypeError, binascii.Error):
            raise self._nonsense(answer) from None
        if len(contents) > most:
            raise self._nonsense(answer)
        return contents

    async def write(self, path: str, contents: bytes) -> None:
        """Write a file, through a link, and make the folders on the way."""
        await self._ask("write", path, base64.b64encode(contents))

    async def stat(self, path: str) -> Entry:
        return self._entry(await self._ask("stat", path), path)

    async def list(self, path: str) -> Sequence[Entry]:
        """What is in a folder, by name."""
        answer = await self._ask("list", path, limit=MAX_ENTRIES)
        entries = answer.get("entries")
        if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
            raise self._nonsense(answer)
        found = [self._entry(entry, path, inside=True) for entry in entries]
        return sorted(found, key=lambda entry: entry.name)

    async def make_folder(self, path: str) -> None:
        """Also those on the way. No error if it is there."""
        await self._ask("make", path)

    async def remove(self, path: str) -> None:
        """A file, a link, or a folder with all that is in it. Not the working folder (EBUSY)."""
        await self._ask("remove", path)

    async def exists(self, path: str) -> bool:
        return (await self._ask("exists", path)).get("exists") is True

    async def real_path(self, path: str) -> str:
        """Absolute, without links; names that do not exist stay as they are."""
        answer = await self._ask("real", path)
        found = answer.get("path")
        if not isinstance(found, str) or not posixpath.isabs(found):
            raise self._nonsense(answer)
        return _text(found)

    async def _ask(
        self,
        operation: str,
        path: str,
        data: bytes = b"",
        *,
        answer: int = _MAX_ANSWER,
        **more: Any,
    ) -> dict[str, Any]:
        request = {"operation": operation, "path": path, **more}
        said, sandbox = await self._bridge.ask(request, data, answer)
        try:
            found = json.loads(said)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            words = printable(said[-_MAX_WORDS:].decode(errors="replace")).strip()
            raise ExecFailed(
                f"Sandbox {sandbox!r} could not {operation} {path!r}: {words or 'no answer'}. Its "
                f"Python may be missing or broken."
            )
        number = found.get("errno")
        if number is not None:
            raise _failure(number, path, sandbox)
        return found

    def _entry(self, found: Any, path: str, *, inside: bool = False) -> Entry:
        if not isinstance(found, dict):
            raise self._nonsense(found)
        name, is_dir, size = (found.get(key) for key in ("name", "dir", "size"))
        if not isinstance(name, str) or "/" in name or not isinstance(is_dir, bool):
            raise self._nonsense(found)
        if size is not None and (type(size) is not int or size < 0):
            raise self._nonsense(found)
        name = _text(name)
        return Entry(name, posixpath.join(path, name) if inside else path, is_dir, size)

    def _nonsense(self, answer: object) -> ExecFailed:
        return ExecFailed(
            f"Sandbox {self._bridge.name!r} answered nonsense about a file: "
            f"{printable(repr(answer)[:_MAX_WORDS])}."
        )


def _failure(number: object, path: str, sandbox: str) -> OSError:
    """Python chooses the class by the number."""
    number = number if isinstance(number, int) and number in errno.errorcode else errno.EIO
    where = f"{path!r} in sandbox {sandbox!r}"
    if number == errno.EFBIG:
        return FileTooLarge(number, f"{where} is larger than the limit; read a part with a command")
    return OSError(number, f"{os.strerror(number)}: {where}")


def _text(name: str) -> str:
    """File names need not be text."""
    return name.encode(errors="replace").decode()
