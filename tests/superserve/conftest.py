"""Superserve's backend against the emulator, with faults of the test's choice."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.superserve import SuperserveClient

from ..conformance.conftest import finish, pytest_pyfunc_call
from ..emulators.running import Running, started

__all__ = ["pytest_pyfunc_call"]  # tests that are coroutines run on the background loop


@pytest.fixture(scope="package")
def service() -> Iterator[Running]:
    with started("superserve") as running:
        yield running


@pytest.fixture
def emulator(
    service: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Running]:
    """The emulator without faults, and without sandboxes when the test is done."""
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SANDBOX_KERNEL_LABEL", f"test-{secrets.token_hex(4)}")
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    service.clear()
    yield service
    service.clear()
    service.ask("POST", "/_emulator/settings", {"chunk": 32767, "rate": 0, "resume_seconds": 0.02})
    left = service.ask("GET", "/_emulator/sandboxes")
    for sandbox in left:
        service.ask("POST", f"/_emulator/sandboxes/{sandbox['id']}/status", "deleted")


@pytest.fixture
def client(emulator: Running) -> Iterator[SuperserveClient]:
    made = SuperserveClient()
    yield made
    finish(made.close())
