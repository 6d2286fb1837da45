"""The workspace of a sandbox that the host cannot look into, as a copy on the host.

``stand_in`` has it taken after each command, and what the test has changed in it brought in before
the next one. A test that waits on the host for what a command does in the background sees nothing.
"""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
import tempfile
from pathlib import Path

from sandbox_kernel.agents.raw_exec import RawResult, run_raw
from sandbox_kernel.sandboxes.base import SandboxHandle

_TAKE = '[ ! -e "/$1" ] || exec tar --sort=name -C / -cf - -- "$1"'
_GIVE = 'rm -rf -- "$@" && exec tar -C / -xpf -'
_CHANGED_MEANWHILE = 1
"""tar's exit code when a file has grown while it was read."""
_LIMIT = 600.0

Stamps = dict[str, tuple[int, ...]]


class HostCopy:
    """Of one folder. Its methods run on the background loop."""

    def __init__(self, root: Path) -> None:
        self._name = str(root).lstrip("/")
        self._folder = tempfile.TemporaryDirectory(prefix="sk-copy-")
        self._lock = asyncio.Lock()
        self._archive = b""
        self._number = 0
        self._known: Stamps = {}

    @property
    def _view(self) -> str:
        return f"{self._folder.name}/{self._number}"

    async def take(self, handle: SandboxHandle) -> str:
        """A folder with the root folder's part that is of interest, as it is now. An earlier one
        stays, for who has it open."""
        async with self._lock:
            await self._give(handle)
            taken = await run_raw(
                *(handle, ["/bin/sh", "-c", _TAKE, "take", self._name]), cwd="/", timeout=_LIMIT
            )
            _check(taken, _CHANGED_MEANWHILE)
            if taken.stdout != self._archive or not self._number:
                self._archive = taken.stdout
                self._number += 1
                await asyncio.to_thread(self._unpack)
            return self._view

    async def give(self, handle: SandboxHandle) -> None:
        """Bring in what has changed on the host since."""
        async with self._lock:
            await self._give(handle)

    def close(self) -> None:
        self._folder.cleanup()

    def _unpack(self) -> None:
        os.mkdir(self._view)
        if self._archive:
            with tarfile.open(fileobj=io.BytesIO(self._archive)) as archive:
                archive.extraction_filter = lambda member, _: (
                    member
                )  # Python 3.11.2 takes no filter
                archive.extractall(self._view)
        self._known = self._stamps()

    async def _give(self, handle: SandboxHandle) -> None:
        known, now = self._known, await asyncio.to_thread(self._stamps)
        if now == known:
            return
        changed = sorted(name for name in now if now[name] != known.get(name))
        gone = [name for name in known if name not in now]
        replaced = [
            name for name in changed if name in known and not _both_folders(name, known, now)
        ]
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as writer:
            for name in changed:
                writer.add(f"{self._view}/{name}", name, recursive=False)
        archive.seek(0)
        removed = [f"/{name}" for name in (*gone, *replaced)]
        argv = ["/bin/sh", "-c", _GIVE, "give", *removed]
        _check(await run_raw(handle, argv, stdin=archive, cwd="/", timeout=_LIMIT))
        self._known = now

    def _stamps(self) -> Stamps:
        """Each path, and what tells whether it has changed."""
        found: Stamps = {}
        waiting = [self._name] if os.path.lexists(f"{self._view}/{self._name}") else []
        while waiting:
            name = waiting.pop()
            seen = os.lstat(f"{self._view}/{name}")
            found[name] = (seen.st_mode,)
            if stat.S_ISDIR(seen.st_mode):
                waiting += [f"{name}/{one}" for one in os.listdir(f"{self._view}/{name}")]
            else:
                found[name] += (seen.st_size, seen.st_mtime_ns, seen.st_ino)
        return found


def _both_folders(name: str, known: Stamps, now: Stamps) -> bool:
    return stat.S_ISDIR(known[name][0]) and stat.S_ISDIR(now[name][0])


def _check(result: RawResult, *also: int) -> None:
    if result.exit_code not in (0, *also) or result.truncated:
        raise RuntimeError(f"The copy on the host is not true: {result.problem or result}")
