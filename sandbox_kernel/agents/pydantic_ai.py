"""SandboxKernelWorkspace: a sandbox as the workspace of a Pydantic AI agent.

    async with SandboxKernelWorkspace("local", memory_mib=1024) as workspace:
        result = await agent.run("Count the lines of data.csv.", workspace=workspace)

As its protocol asks, the sandbox is made on first use and outlives the agent's runs: whoever has
the backend closes it, and another one may be attached to the same sandbox by its ``ref``.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from sandbox_kernel.agents.bridge_files import BridgeFiles, Entry
from sandbox_kernel.agents.extras import missing
from sandbox_kernel.agents.sandbox_bridge import MAX_OUTPUT, SandboxBridge
from sandbox_kernel.errors import (
    SandboxElsewhere,
    SandboxGone,
    SandboxNotFound,
    SandboxPaused,
    SandboxUnavailable,
)
from sandbox_kernel.spec import DEFAULT_BACKEND

try:
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        SupportsCommands,
        SupportsFilesystem,
        SupportsRealpath,
        WorkspaceBackend,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
except ImportError as error:
    raise missing("pydantic-ai", error) from error

PROVIDER = "sandbox-kernel"
_GONE = (SandboxGone, SandboxNotFound, SandboxPaused, SandboxUnavailable, SandboxElsewhere)


class SandboxKernelWorkspace(
    WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath
):
    """A new sandbox, or with ``ref`` the one that it names. ``settings`` are those of SandboxSpec;
    ``timeout`` is for commands that come without one."""

    def __init__(
        self,
        backend: str = DEFAULT_BACKEND,
        *,
        ref: WorkspaceRef | None = None,
        timeout: float | None = None,
        **settings: Any,
    ) -> None:
        if ref is not None:
            provider, slash, backend = ref.provider.partition("/")
            if provider != PROVIDER or not slash:
                raise ValueError(
                    f"The workspace {ref.provider}:{ref.id} is not one of {PROVIDER}; give it to "
                    f"the backend that made it."
                )
        self.bridge = SandboxBridge(backend, attach=ref.id if ref else None, **settings)
        self._files = BridgeFiles(self.bridge)
        self._timeout = timeout
        self._folder: str | None = None

    # --- its life

    @property
    def ref(self) -> WorkspaceRef | None:
        """Names the sandbox, for another backend and for the command line; None until it exists."""
        if self.bridge.name is None:
            return None
        return WorkspaceRef(provider=f"{PROVIDER}/{self.bridge.backend}", id=self.bridge.name)

    async def close(self) -> None:
        """Remove the sandbox. Idempotent."""
        await self.bridge.close()

    async def detach(self) -> None:
        """Leave the sandbox running: its ``ref`` leads to it until its lease is over."""
        await self.bridge.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def working_dir(self) -> str:
        async with _available():
            await self.bridge.open()
            if self._folder is None:
                self._folder = await self._files.real_path(".")
            return self._folder

    # --- commands

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Run a command. A caller that is cancelled has it killed."""
        if isinstance(command, str) is not shell:
            raise TypeError("A command is a string with shell=True, and a list without.")
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(f"timeout is a positive number of seconds, not {timeout!r}.")
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        async with _available():
            done = await self.bridge.run(argv, env=env, timeout=timeout or self._timeout)
        if done.timed_out:
            raise WorkspaceTimeoutError(done.timed_out, stdout=done.out, stderr=done.err)
        if done.truncated:
            raise WorkspaceOutputLimitError(
                f"{argv[0]!r} in sandbox {self.bridge.name!r} printed more than {MAX_OUTPUT} "
                f"bytes. Write the output to a file, and read a part of it.",
                limit=MAX_OUTPUT,
                stdout=done.out,
                stderr=done.err,
            )
        return CommandResult(exit_code=done.exit_code, stdout=done.out, stderr=done.err)

    # --- files

    async def read_bytes(self, path: str) -> bytes:
        async with _available():
            return await self._files.read(_absolute(path))

    async def write_bytes(self, path: str, data: bytes) -> None:
        async with _available():
            await self._files.write(_absolute(path), data)

    async def stat(self, path: str) -> FileEntry:
        async with _available():
            return _file_entry(await self._files.stat(_absolute(path)))

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        async with _available():
            return [_file_entry(entry) for entry in await self._files.list(_absolute(path))]

    async def make_dir(self, path: str) -> None:
        async with _available():
            await self._files.make_folder(_absolute(path))

    async def remove(self, path: str) -> None:
        try:
            async with _available():
                await self._files.remove(_absolute(path))
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise ValueError(f"{path!r} holds the working folder, and stays.") from error
            raise

    async def exists(self, path: str) -> bool:
        async with _available():
            return await self._files.exists(_absolute(path))

    async def realpath(self, path: str) -> str:
        async with _available():
            return await self._files.real_path(_absolute(path))


@asynccontextmanager
async def _available() -> AsyncIterator[None]:
    """A sandbox that is gone has an error of the framework's own: nothing is tried again."""
    try:
        yield
    except _GONE as error:
        raise WorkspaceUnavailableError(str(error)) from error


def _absolute(path: str) -> str:
    if not posixpath.isabs(path):
        raise ValueError(f"A path in a workspace is absolute; {path!r} is not.")
    return path


def _file_entry(entry: Entry) -> FileEntry:
    return FileEntry(name=entry.name, path=entry.path, is_dir=entry.is_dir, size=entry.size)
