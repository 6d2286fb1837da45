"""The frameworks' own packages are in environments of their own: tools/frameworks.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers.coroutines import RunCoroutine, on_own_loop

from ..backends import usable

collect_ignore_glob = [] if os.environ.get("TEST_FRAMEWORKS") else ["test_*.py"]


@pytest.fixture(scope="module")
def local() -> Iterator[str]:
    """The name of a backend whose sandboxes are jails, of which no test leaves one behind."""
    with usable("local") as backend:
        yield backend


@pytest.fixture(scope="session")
def run_coroutine() -> RunCoroutine:
    """Frameworks run on loops of their users."""
    return on_own_loop


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
