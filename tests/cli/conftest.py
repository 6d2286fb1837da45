"""Fixtures for the tests of the command."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.local import bubblewrap

from .running import Cli


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """The command, with folders of its own, which have short names: they hold sockets."""
    with tempfile.TemporaryDirectory(prefix="cli-") as name:
        folder = Path(name)
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(folder / "data"))
        monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", str(folder / "run"))
        monkeypatch.delenv("JPY_PARENT_PID", raising=False)
        made = Cli(folder)
        yield made
        for path in made.records.glob("broken*.json"):
            path.unlink()
        made.remove_all()


@pytest.fixture
def jail(cli: Cli) -> str:
    """Name of a jail that runs."""
    problem = bubblewrap.why_not()
    if problem:
        pytest.skip(problem)
    cli.create("jail", memory_mib=512)
    return "jail"
