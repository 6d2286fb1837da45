"""Helpers for tests that use whole local sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.sandboxes import processes
from sandbox_kernel.sandboxes.local import LocalClient, limits
from sandbox_kernel.sandboxes.local.client import LocalHandle
from sandbox_kernel.spec import SandboxSpec

TIMEOUT = 60.0

made_ids: set[str] = set()
"""Ids of the sandboxes that this process made; there may be others on this host."""


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT))

    return run


@contextlib.contextmanager
def client_that_leaves_nothing(root: Path) -> Iterator[LocalClient]:
    """A client; afterwards no process, folder, record, cgroup or descriptor may be left."""
    before = traces(root)
    create = limits.Cgroup.create

    def recording(sandbox_id: str, asked: limits.Limits) -> limits.Cgroup | None:
        made_ids.add(sandbox_id)
        return create(sandbox_id, asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits.Cgroup, "create", recording)
        yield LocalClient()
    processes.reap()
    gc.collect()
    assert more_than(before, traces(root)) == {}


def more_than(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was not there before. That something of an earlier test goes meanwhile is no harm."""
    descriptors = after["descriptors"] - before["descriptors"]
    found = {
        key: sorted(set(after[key]) - set(before[key])) for key in after if key != "descriptors"
    }
    return {key: value for key, value in found.items() if value} | (
        {"descriptors": descriptors} if descriptors > 0 else {}
    )


def traces(root: Path) -> dict[str, Any]:
    """All that a sandbox leaves in the world as long as it exists."""
    places = ("data/sandboxes", "data/records/local", "run")
    return {
        "files": sorted(str(path) for place in places for path in (root / place).glob("*")),
        "cgroups": sorted(path for path in cgroups() if path.rpartition("-")[2] in made_ids),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": children(os.getpid()),
    }


def cgroups() -> list[str]:
    parents = {*limits._v2_parents(), *(folder for _, folder in limits._v1_parents())}
    return [str(path) for parent in parents for path in parent.glob("sandbox-kernel-*")]


def children(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return sorted(int(number) for number in found)


@contextlib.asynccontextmanager
async def sandbox(client: LocalClient, **spec: Any) -> AsyncIterator[LocalHandle]:
    """A sandbox for the length of a block."""
    handle = await client.create(SandboxSpec(**spec))
    try:
        yield handle
    finally:
        await client.remove(handle.name)


async def eventually(check: Callable[[], Any] | Callable[[], Awaitable[Any]]) -> Any:
    """Wait until ``check`` gives something true, and return that."""
    deadline = time.monotonic() + 30
    while True:
        found = check()
        if asyncio.iscoroutine(found):
            found = await found
        if found or time.monotonic() > deadline:
            assert found, "it did not happen within 30 s"
            return found
        await asyncio.sleep(0.02)


def running(marker: str) -> list[int]:
    """Host processes that have ``marker`` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
