"""Fixtures for the tests that try to break out of the local jail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .hosts import Host, Jail, host, users, why_not


@pytest.fixture(scope="session", params=users().items(), ids=lambda item: item[0])
def victim(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A host, once of each kind of user."""
    problem = why_not()
    if problem:
        pytest.skip(problem)
    with host(request.param[1]) as made:
        yield made


@pytest.fixture(scope="session")
def jail(victim: Host) -> Iterator[Jail]:
    """A sandbox for attempts that leave it as it was."""
    with victim.jail() as made:
        yield made
