"""The guest program as jails see it: compiled, and in a folder that may vanish."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.local import LocalClient

from .sandboxes import client_that_leaves_nothing, sandbox

IMPORT = "import sys; sys.path.insert(0, '/opt/sandbox-kernel'); import sandbox_guest.guest.agent"


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    with client_that_leaves_nothing(own_dirs) as client:
        yield client


async def test_nothing_is_compiled_in_the_jail(client: LocalClient) -> None:
    """Every module of the guest program comes from its bytecode."""
    async with sandbox(client) as handle:
        python = handle.guest_argv()[0]
        result = await handle.exec(python, ["-I", "-S", "-v", "-c", IMPORT])
        loaded = re.findall(r"# code object from '?([^'\n]*/sandbox_guest/[^'\n]*)", result.stderr)
        assert len(loaded) > 10
        assert [path for path in loaded if not path.endswith(".pyc")] == []
        assert "could not create" not in result.stderr


async def test_the_cache_may_be_emptied(client: LocalClient, own_dirs: Path) -> None:
    """The next sandbox makes it again."""
    async with sandbox(client) as handle:
        assert (await handle.exec("true")).ok
    (cache,) = own_dirs.rglob("cache")
    shutil.rmtree(cache)
    async with sandbox(client) as handle:
        assert (await handle.exec("true")).ok
    assert list(cache.glob("guest-*"))
