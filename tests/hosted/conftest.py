"""Tests that are the same for each hosted backend run once for each."""

from __future__ import annotations

import pytest

from .fixtures import cli, client, emulator, run_coroutine, service
from .services import ISLO, SUPERSERVE, Hosted

__all__ = ["cli", "client", "emulator", "run_coroutine", "service"]


@pytest.fixture(scope="package", params=[SUPERSERVE, ISLO], ids=lambda hosted: hosted.name)
def hosted(request: pytest.FixtureRequest) -> Hosted:
    found: Hosted = request.param
    return found
