"""Helpers for tests of Islo's backend."""

from __future__ import annotations

from typing import Any

from ..emulators.islo.state import Settings
from ..emulators.running import Running


def account(emulator: Running) -> dict[str, Any]:
    """All that there is in the account: ``sandboxes``, ``profiles`` and the ``order`` in which
    things were made and deleted."""
    found: dict[str, Any] = emulator.ask("GET", "/_emulator/state")
    return found


def settings(emulator: Running, **values: Any) -> None:
    emulator.ask("POST", "/_emulator/settings", values)


def tidy(emulator: Running) -> None:
    """The usual settings. Nothing may be left in the account."""
    settings(emulator, **vars(Settings()))
    left = emulator.ask("POST", "/_emulator/reset")
    assert left == [], "the test left something in the account"
