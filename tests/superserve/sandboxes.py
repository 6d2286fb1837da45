"""Helpers for tests of Superserve's backend."""

from __future__ import annotations

from typing import Any

from ..emulators.running import Running
from ..emulators.superserve.state import Settings


def at_the_service(emulator: Running) -> list[dict[str, Any]]:
    """All sandboxes that there are, as the service knows them."""
    found: list[dict[str, Any]] = emulator.ask("GET", "/_emulator/sandboxes")
    return found


def settings(emulator: Running, **values: Any) -> None:
    emulator.ask("POST", "/_emulator/settings", values)


def tidy(emulator: Running) -> None:
    """The usual settings, and no sandboxes."""
    settings(emulator, **vars(Settings()))
    for sandbox in at_the_service(emulator):
        emulator.ask("POST", f"/_emulator/sandboxes/{sandbox['id']}/status", "deleted")
