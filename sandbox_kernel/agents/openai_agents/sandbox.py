"""The one sandbox of a session: found or made when it is first needed, and put to rest.

All of it runs on the background loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sandbox_kernel.errors import (
    SandboxExists,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
)
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.spec import SandboxSpec

_IDLE = 30.0
"""Seconds without a use after which it may have been paused."""


class SessionSandbox:
    """By its name. ``spec`` gives the request for a new one, or raises."""

    def __init__(self, client: SandboxClient, name: str, spec: Callable[[], SandboxSpec]) -> None:
        self._client = client
        self._name = name
        self._spec = spec
        self._handle: SandboxHandle | None = None
        self._used = 0.0
        self._attaching: asyncio.Lock | None = None
        self.is_new = False
        """Whether ``attach`` has made it, so that nothing of an earlier one is there."""
        self.made = 0
        """How often this object has found or made one."""

    async def attach(self) -> SandboxHandle:
        """The sandbox, running. Only if the backend knows that there is none that could go on is
        one made; every other failure is raised, so there is never a second one."""
        if self._attaching is None:
            self._attaching = asyncio.Lock()
        async with self._attaching:
            if self._handle is not None and time.monotonic() - self._used > _IDLE:
                await self._wake(self._handle)
            self._used = time.monotonic()
            if self._handle is None:
                found = await self._found()
                self.is_new = found is None
                self._handle = found if found is not None else await self._make()
                self.made += 1
            return self._handle

    async def _wake(self, handle: SandboxHandle) -> None:
        """A hosted sandbox may have been paused while the model was thinking, or a person."""
        if (await handle.info()).status == "paused":
            await handle.resume()

    async def _found(self) -> SandboxHandle | None:
        try:
            handle = await self._client.get(self._name)
            status = (await handle.info()).status
        except (SandboxNotFound, SandboxGone):
            return None
        if status == "running":
            return handle
        if status == "paused" or (status == "stopped" and self._client.capabilities.restart):
            await handle.resume()
            return handle
        if status in ("stopped", "gone"):
            await self._client.remove(self._name)
            return None
        raise SandboxTimeout(
            f"Sandbox {self._name!r} is {status!r}, so it can neither be used nor replaced. Try "
            f"again in a moment, or remove it: `sandbox-kernel rm {self._name}`."
        )

    async def _make(self) -> SandboxHandle:
        try:
            return await self._client.create(self._spec())
        except SandboxExists:
            # Another process resumes the same session, and was first.
            return await self._client.get(self._name)

    async def running(self) -> bool:
        """Whether it runs now. Raises if that cannot be told."""
        try:
            handle = self._handle or await self._client.get(self._name)
            return (await handle.info()).status == "running"
        except (SandboxNotFound, SandboxGone):
            return False

    async def rest(self, *, pause: bool) -> None:
        """Nobody needs it for now. It costs as little as the backend can make it cost, and goes on
        at the next ``attach``; where it could not go on, it is removed."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        abilities = self._client.capabilities
        try:
            if pause and abilities.pause:
                await handle.pause()
            elif abilities.restart:
                await handle.stop()
            else:
                await self._client.remove(self._name)
        except SandboxGone:
            return

    async def remove(self) -> None:
        """Delete it with its files. Idempotent."""
        self._handle = None
        try:
            await self._client.remove(self._name)
        except SandboxNotFound:
            return
