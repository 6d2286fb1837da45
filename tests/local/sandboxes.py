"""Helpers for tests that use whole local sandboxes."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel import host_processes
from sandbox_kernel.sandboxes.local import LocalClient, cgroup, limits
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.spec import SandboxSpec

made_ids: set[str] = set()
"""Ids of the sandboxes that this process made; there may be others on this host."""


@contextlib.contextmanager
def client_that_leaves_nothing(root: Path) -> Iterator[LocalClient]:
    """A client; afterwards no process, folder, record, cgroup or descriptor may be left."""
    before = traces(root)
    create = cgroup.Cgroup.create

    def recording(sandbox_id: str, asked: limits.Limits) -> cgroup.Cgroup | None:
        made_ids.add(sandbox_id)
        return create(sandbox_id, asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroup.Cgroup, "create", recording)
        yield LocalClient()
    host_processes.reap()
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
    parents = {*cgroup._v2_parents(), *(folder for _, folder in cgroup._v1_parents())}
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


def running(marker: str) -> list[int]:
    """Host processes that have ``marker`` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
