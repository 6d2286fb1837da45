"""A hosted backend against the emulator of its service, with faults of the test's choice.

For the conftest.py of a package of tests, which adds the fixture ``hosted``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.coroutines import finish, run_coroutine

from ..cli.running import Cli
from ..emulators.running import Running, started
from .services import Hosted

# Tests that are coroutines run on the background loop.
__all__ = ["cli", "client", "emulator", "run_coroutine", "service"]


@pytest.fixture(scope="package")
def service(hosted: Hosted) -> Iterator[Running]:
    with started(hosted.name) as running:
        yield running


@pytest.fixture
def emulator(
    hosted: Hosted, service: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Running]:
    """The emulator without faults, and with its usual settings."""
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SANDBOX_KERNEL_LABEL", f"test-{secrets.token_hex(4)}")
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    service.clear()
    yield service
    service.clear()
    hosted.tidy(service)


@pytest.fixture
def client(hosted: Hosted, emulator: Running) -> Iterator[Any]:
    """The backend's own client."""
    made = hosted.client()
    yield made
    finish(made.close())


@pytest.fixture
def cli(emulator: Running, tmp_path: Path) -> Cli:
    return Cli(tmp_path, dict(os.environ))
