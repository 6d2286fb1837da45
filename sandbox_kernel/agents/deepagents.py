"""SandboxKernelBackend: a sandbox as the backend of a LangChain deep agent.

    with SandboxKernelBackend("local", memory_mib=1024) as backend:
        agent = create_deep_agent(model, backend=backend)

Each method has an asyncio twin (``aexecute``, ...) that can be cancelled. BaseSandbox derives the
tools for files from these.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Sequence
from typing import Any, Self

from sandbox_kernel.agents.bridge_files import BridgeFiles
from sandbox_kernel.agents.extras import missing
from sandbox_kernel.agents.sandbox_bridge import SandboxBridge, blocking
from sandbox_kernel.spec import DEFAULT_BACKEND

try:
    from deepagents.backends.protocol import (
        ExecuteResponse,
        FileDownloadResponse,
        FileUploadResponse,
    )
    from deepagents.backends.sandbox import BaseSandbox
except ImportError as error:
    raise missing("deepagents", error) from error

SHELL = ("/bin/sh", "-c")
_CODES = {
    errno.ENOENT: "file_not_found",
    errno.EISDIR: "is_directory",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.EINVAL: "invalid_path",
    errno.ENOTDIR: "invalid_path",
    errno.ENAMETOOLONG: "invalid_path",
}
"""What deepagents calls the errors that a model can do something about."""


class SandboxKernelBackend(BaseSandbox):
    """A new sandbox, made on first use, or with ``attach`` one that exists, by its name. ``close``
    removes it; otherwise it ends with its lease after this process. ``settings`` are those of
    SandboxSpec. ``timeout`` is for commands that come without one."""

    def __init__(
        self,
        backend: str = DEFAULT_BACKEND,
        *,
        attach: str | None = None,
        timeout: float | None = None,
        **settings: Any,
    ) -> None:
        self.bridge = SandboxBridge(backend, attach=attach, **settings)
        self._files = BridgeFiles(self.bridge)
        self._timeout = timeout

    # --- its life

    @property
    def id(self) -> str:
        """The sandbox's name, for ``attach`` and for the command line. Makes it, if need be."""
        if self.bridge.name is None:
            blocking(self.bridge.open())
        return self.bridge.name or ""

    def close(self) -> None:
        """Remove the sandbox. Idempotent."""
        blocking(self.bridge.close())

    def detach(self) -> None:
        """Leave the sandbox running: ``attach=id`` goes on with it until its lease is over."""
        blocking(self.bridge.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bridge.close()

    # --- commands

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a shell command. One that takes too long is killed: exit code 124."""
        return blocking(self.aexecute(command, timeout=timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        limit = timeout or self._timeout
        done = await self.bridge.run([*SHELL, command], merged=True, timeout=limit)
        output = done.out
        if done.timed_out:
            output = f"{output.rstrip()}\nError: {done.timed_out}".lstrip()
        return ExecuteResponse(output=output, exit_code=done.exit_code, truncated=done.truncated)

    # --- files

    def upload_files(self, files: Sequence[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files by their absolute paths. A failure is in the response, and ends nothing."""
        return blocking(self.aupload_files(files))

    async def aupload_files(self, files: Sequence[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path, await self._put(path, data)) for path, data in files]

    def download_files(self, paths: Sequence[str]) -> list[FileDownloadResponse]:
        """Read files by their absolute paths. A failure is in the response, and ends nothing."""
        return blocking(self.adownload_files(paths))

    async def adownload_files(self, paths: Sequence[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path, *await self._fetch(path)) for path in paths]

    async def _put(self, path: str, data: bytes) -> str | None:
        if not posixpath.isabs(path):
            return "invalid_path"
        try:
            await self._files.write(path, data)
        except OSError as error:
            return _code(error)
        return None

    async def _fetch(self, path: str) -> tuple[bytes | None, str | None]:
        if not posixpath.isabs(path):
            return None, "invalid_path"
        try:
            return await self._files.read(path), None
        except OSError as error:
            return None, _code(error)


def _code(error: OSError) -> str:
    return _CODES.get(error.errno or 0, str(error))
