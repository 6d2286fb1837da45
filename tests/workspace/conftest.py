from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_kernel.workspace.store import Store
from tests.workspace.guests import Guest

NewGuest = Callable[[str], Guest]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of the test's own."""
    return Store.open(str(tmp_path / "store"))


@pytest.fixture
def new_guest(tmp_path: Path) -> Iterator[NewGuest]:
    """Makes guests, each with an empty workspace of its own."""
    guests: list[Guest] = []

    def make(name: str) -> Guest:
        guests.append(Guest(tmp_path / "guests" / name, name))
        return guests[-1]

    yield make
    for guest in guests:
        guest.close()


@pytest.fixture
def guest(new_guest: NewGuest) -> Guest:
    return new_guest("guest")
