"""Helpers for tests of Superserve's backend."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sandbox_kernel.sandboxes.superserve import SuperserveClient
from sandbox_kernel.sandboxes.superserve.handle import SuperserveHandle
from sandbox_kernel.spec import SandboxSpec

from ..emulators.running import Running

LIMIT = 120.0


@contextlib.asynccontextmanager
async def sandbox(client: SuperserveClient, **fields: Any) -> AsyncIterator[SuperserveHandle]:
    """A sandbox of the test's own."""
    handle = await client.create(SandboxSpec.from_mapping(fields))
    try:
        yield handle
    finally:
        await client.remove(handle.name)


def at_the_service(emulator: Running) -> list[dict[str, Any]]:
    """All sandboxes that there are, as the service knows them."""
    found: list[dict[str, Any]] = emulator.ask("GET", "/_emulator/sandboxes")
    return found


def set_status(emulator: Running, handle: SuperserveHandle, status: str) -> None:
    emulator.ask("POST", f"/_emulator/sandboxes/{handle.id}/status", status)


def creations(emulator: Running) -> int:
    return emulator.requests().count("POST /sandboxes")
