"""Helpers for tests of Islo's backend."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sandbox_kernel.sandboxes.islo import IsloClient
from sandbox_kernel.sandboxes.islo.handle import IsloHandle
from sandbox_kernel.spec import SandboxSpec

from ..emulators.running import Running

LIMIT = 120.0


@contextlib.asynccontextmanager
async def sandbox(client: IsloClient, **fields: Any) -> AsyncIterator[IsloHandle]:
    """A sandbox of the test's own."""
    handle = await client.create(SandboxSpec.from_mapping(fields))
    try:
        yield handle
    finally:
        await client.remove(handle.name)


def account(emulator: Running) -> dict[str, Any]:
    """All that there is in the account: ``sandboxes``, ``profiles`` and the ``order`` in which
    things were made and deleted."""
    found: dict[str, Any] = emulator.ask("GET", "/_emulator/state")
    return found


def set_status(emulator: Running, handle: IsloHandle, status: str) -> None:
    emulator.ask("POST", f"/_emulator/sandboxes/{handle.id}/status", status)


def settings(emulator: Running, **values: Any) -> None:
    emulator.ask("POST", "/_emulator/settings", values)


def creations(emulator: Running) -> int:
    return emulator.requests().count("POST /sandboxes")
