"""Fixtures for the tests of the local jail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.local import bubblewrap

from .jails import NOBODY, Jails, public_bwrap, public_folder


@pytest.fixture(scope="session", params=["this user", "an ordinary user"])
def jails(request: pytest.FixtureRequest) -> Iterator[Jails]:
    """Real jails, made by this user and by one without any rights."""
    problem = bubblewrap.why_not()
    if problem:
        pytest.skip(problem)
    if request.param == "this user":
        yield Jails(bubblewrap.find())
    elif os.getuid() != 0:
        pytest.skip("this user is an ordinary one already")
    else:
        with public_folder() as folder:
            yield Jails(public_bwrap(folder), NOBODY)


@pytest.fixture
def own_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep sandbox-kernel's own files of this test in its temporary folder."""
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path
