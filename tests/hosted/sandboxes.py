"""Helpers for tests of the hosted backends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.spec import SandboxSpec

from ..emulators.running import Running

LIMIT = 120.0


@contextlib.asynccontextmanager
async def sandbox(client: SandboxClient, **fields: Any) -> AsyncIterator[Any]:
    """A sandbox of the test's own: the backend's own handle."""
    handle = await client.create(SandboxSpec.from_mapping(fields))
    try:
        yield handle
    finally:
        await client.remove(handle.name)


def set_status(emulator: Running, handle: SandboxHandle, status: str) -> None:
    """Let the service say so of a sandbox from now on."""
    emulator.ask("POST", f"/_emulator/sandboxes/{handle.id}/status", status)


def creations(emulator: Running) -> int:
    """How often the service was asked for a sandbox."""
    return emulator.requests().count("POST /sandboxes")
