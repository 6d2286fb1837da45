"""Islo's backend against the emulator, with faults of the test's choice."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.islo import IsloClient

from ..conformance.conftest import finish, pytest_pyfunc_call
from ..emulators.islo.state import Settings
from ..emulators.running import Running, started

__all__ = ["pytest_pyfunc_call"]  # tests that are coroutines run on the background loop


@pytest.fixture(scope="package")
def service() -> Iterator[Running]:
    with started("islo") as running:
        yield running


@pytest.fixture
def emulator(
    service: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Running]:
    """The emulator without faults and with its usual settings. Nothing may be left in it."""
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SANDBOX_KERNEL_LABEL", f"test-{secrets.token_hex(4)}")
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    service.clear()
    yield service
    service.clear()
    service.ask("POST", "/_emulator/settings", vars(Settings()))
    left = service.ask("POST", "/_emulator/reset")
    assert left == [], "the test left something in the account"


@pytest.fixture
def client(emulator: Running) -> Iterator[IsloClient]:
    made = IsloClient()
    yield made
    finish(made.close())
