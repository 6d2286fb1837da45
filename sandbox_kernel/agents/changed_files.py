"""Which files of the workspace a cell has created, changed or deleted.

A small program in the sandbox looks at the workspace each time it is asked, and tells what is new
since it looked last. It compares names, sizes, inodes and times, and reads no contents. Hidden
files, caches and packages are left out, and a workspace with more than 20 000 files is not watched.

Watching is opt-in: it costs a process in the sandbox (some 10 MB of its memory), and at the end of
each cell a round trip and a stat for each file. What changes between two looks is a cell's, whoever
did it: a thread that an earlier cell has left running, too.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

from sandbox_kernel.agents.result import ChangedFile
from sandbox_kernel.errors import SandboxError, SandboxTimeout, WorkspaceRefused
from sandbox_kernel.guest import watch_files
from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle
from sandbox_kernel.sandboxes.command import Command

PATIENCE = 10.0
"""Seconds that one look may take."""
_LONGEST_ANSWER = 2**22
_LONGEST_PATH = 4096 * 6
_PROGRAM = inspect.getsource(watch_files)
_KINDS = ("created", "changed", "deleted")


class ChangedFiles:
    """Watches one sandbox's workspace. Belongs to the loop of the handle.

    Call ``look`` before a cell and forget what it returns, and again after it. Between two cells
    one look is enough, if what happens between them may count for the second.
    """

    def __init__(self, handle: SandboxHandle) -> None:
        self.handle = handle
        self._stream: ExecStream | None = None
        self._rest = bytearray()
        self._turn = asyncio.Lock()
        self.more = 0
        """How many more changes the last look has found than it told."""
        self.unseen = False
        """Whether the workspace has too many files to be watched."""

    async def look(self) -> list[ChangedFile]:
        """What has changed since the last look; nothing at the first one.

        SandboxError if the sandbox does not answer; the next call starts again.
        """
        async with self._turn:
            try:
                answer = await self._answer()
                return self._checked(answer)
            except BaseException:
                await asyncio.shield(self._end())
                raise

    async def close(self) -> None:
        """End the program in the sandbox. Idempotent."""
        async with self._turn:
            await self._end()

    async def _answer(self) -> bytes:
        limit = asyncio.timeout(PATIENCE)
        try:
            async with limit:
                if self._stream is None:
                    argv = [self.handle.python or "python3", "-I", "-c", _PROGRAM]
                    self._stream = await self.handle.open_command(Command(argv))
                await self._stream.write(b"\n")
                while b"\n" not in self._rest:
                    data = await self._stream.read()
                    if not data or len(self._rest) > _LONGEST_ANSWER:
                        raise self._refused("no answer" if not data else "too much")
                    self._rest += data
        except TimeoutError:
            if not limit.expired():
                raise
            raise SandboxTimeout(
                f"Which files have changed in sandbox {self.handle.name!r} was not known within "
                f"{PATIENCE:g} s."
            ) from None
        except OSError as error:
            raise SandboxError(
                f"Which files have changed in sandbox {self.handle.name!r} is not known: {error}"
            ) from error
        line, _, rest = bytes(self._rest).partition(b"\n")
        self._rest = bytearray(rest)
        return line

    def _checked(self, line: bytes) -> list[ChangedFile]:
        try:
            answer: Any = json.loads(line)
            self.more, self.unseen = max(0, int(answer["more"])), answer["unseen"] is True
            return [_change(*change) for change in answer["changes"][: watch_files.MOST_CHANGES]]
        except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
            raise self._refused("no answer that can be read") from None

    def _refused(self, what: str) -> WorkspaceRefused:
        return WorkspaceRefused(
            f"Which files have changed in sandbox {self.handle.name!r} is not known: it sent "
            f"{what}."
        )

    async def _end(self) -> None:
        stream, self._stream = self._stream, None
        self._rest.clear()
        if stream is not None:
            await stream.close()


def _change(path: object, kind: object, size: object) -> ChangedFile:
    """One change, if it can be; ValueError."""
    if not isinstance(path, str) or not path or len(path) > _LONGEST_PATH or "\0" in path:
        raise ValueError("no path")
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("a path that leads out")
    if type(size) is not int or not 0 <= size < 2**63:
        raise ValueError("no size")
    for known in _KINDS:
        if kind == known:
            return ChangedFile(path, known, size)  # type: ignore[arg-type]
    raise ValueError("no kind")
