"""Superserve's backend against the emulator, with faults of the test's choice."""

from __future__ import annotations

import pytest

from ..hosted.fixtures import cli, client, emulator, run_coroutine, service
from ..hosted.services import SUPERSERVE, Hosted

__all__ = ["cli", "client", "emulator", "run_coroutine", "service"]


@pytest.fixture(scope="package")
def hosted() -> Hosted:
    return SUPERSERVE
