"""How tests run coroutines.

A test that is a coroutine function is run by the hook in ``tests/conftest.py``: on a loop of its
own, or on the background loop where a folder's ``conftest.py`` has ``run_coroutine`` from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from sandbox_kernel.tunnel import background

from .waiting import LIMIT

T = TypeVar("T")
RunCoroutine = Callable[[Coroutine[Any, Any, None], float], None]


def finish(coroutine: Coroutine[Any, Any, T], timeout: float = LIMIT) -> T:
    """Run a coroutine on the background loop to its end; for tests that are no coroutines."""
    return background.submit(asyncio.wait_for(coroutine, timeout)).result(timeout + 5)


def on_own_loop(test: Coroutine[Any, Any, None], timeout: float) -> None:
    """Run a test on a new loop, which ends with it."""
    asyncio.run(asyncio.wait_for(test, timeout))


@pytest.fixture(scope="session")
def run_coroutine() -> RunCoroutine:
    """Tests run on the background loop, where the handles of their fixtures live."""
    return finish
