"""SandboxKernelSandbox: a sandbox for AG2's tools that run code and shell commands.

    async with SandboxKernelSandbox("local", memory_mib=1024) as sandbox:
        agent = Agent("coder", config=config, tools=[SandboxCodeTool(sandbox)])

Files are confined to the working folder, as AG2 asks, on top of the sandbox itself.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Self

from sandbox_kernel.agents.bridge_files import BridgeFiles
from sandbox_kernel.agents.extras import missing
from sandbox_kernel.agents.sandbox_bridge import SandboxBridge
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.spec import DEFAULT_BACKEND

try:
    from ag2.tools.sandbox import ExecResult, SandboxBase
except ImportError as error:
    raise missing("ag2", error) from error

MAX_OUTPUT = 100_000
"""Characters of a command's output that a model gets."""


class SandboxKernelSandbox(SandboxBase):
    """A new sandbox, made on first use, or with ``attach`` one that exists, by its name. ``aclose``
    removes it. ``settings`` are those of SandboxSpec; ``timeout`` is for commands that come without
    one."""

    def __init__(
        self,
        backend: str = DEFAULT_BACKEND,
        *,
        attach: str | None = None,
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
        **settings: Any,
    ) -> None:
        self.bridge = SandboxBridge(backend, attach=attach, **settings)
        self._files = BridgeFiles(self.bridge)
        self._timeout = timeout
        self._max_output = max_output
        self._workdir = PurePosixPath(SandboxHandle.workdir)

    async def __aenter__(self) -> Self:
        self._workdir = PurePosixPath((await self.bridge.open()).workdir)
        return self

    async def aclose(self) -> None:
        """Remove the sandbox. Idempotent."""
        await self.bridge.close()

    async def detach(self) -> None:
        """Leave the sandbox running: ``attach`` goes on with it until its lease is over."""
        await self.bridge.detach()

    def __deepcopy__(self, memo: object) -> Self:
        """Agents copy their tools; there is one sandbox."""
        return self

    @asynccontextmanager
    async def open(self, context: object = None) -> AsyncIterator[Self]:
        """As a SandboxFactory, which AG2's tools take: the same sandbox for each call."""
        await self.__aenter__()
        yield self

    @property
    def workdir(self) -> PurePosixPath:
        return self._workdir

    @property
    def host_workdir(self) -> Path | None:
        """The host sees nothing of it."""
        return None

    async def exec(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> ExecResult:
        """Run a command. One that takes too long is killed: exit code 124."""
        if not argv:
            return ExecResult(output="", exit_code=2)
        limit = timeout or self._timeout
        most = 4 * self._max_output  # bytes, of which a character has four at most
        done = await self.bridge.run(argv, env=env, timeout=limit, merged=True, max_output=most)
        output = done.out.strip()
        if done.truncated or len(output) > self._max_output:
            first = min(len(output), self._max_output)
            output = f"{output[:first]}\n[truncated: showing the first {first} characters]"
        if done.timed_out:
            output = f"{output}\n{done.timed_out}".lstrip()
        return ExecResult(output=output, exit_code=done.exit_code)

    async def put_file(self, path: PurePosixPath, content: bytes) -> None:
        await self._files.write(await self._confined(path), content)

    async def remove_file(self, path: PurePosixPath) -> None:
        try:
            await self._files.remove(await self._confined(path))
        except FileNotFoundError:
            return

    async def _confined(self, path: PurePosixPath) -> str:
        """ValueError unless the file's folder, without links, is in the working folder."""
        if path.is_absolute():
            raise ValueError(f"{path} is absolute; a path is relative to the working folder.")
        root = await self._files.real_path(".")
        folder = await self._files.real_path(posixpath.dirname(str(path)) or ".")
        if posixpath.commonpath([root, folder]) != root or path.name in ("", ".."):
            raise ValueError(f"{path} leads out of the working folder {root}.")
        return posixpath.join(folder, path.name)
