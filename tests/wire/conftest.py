"""Two peers on each event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .loops import LOOPS, Driver, Pair


@pytest.fixture(params=LOOPS)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Each of the two loops."""
    driver = Driver(request.param)
    yield driver
    driver.close()


@pytest.fixture(params=["raw", "base64"])
def pair(request: pytest.FixtureRequest, driver: Driver) -> Iterator[Pair]:
    """Two peers with a link between them, on each loop and with each codec."""
    pair = Pair(driver, request.param)
    yield pair
    pair.close()
    driver.settle(2)
