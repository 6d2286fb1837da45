"""The pool: sandboxes that wait ready, each for one kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox_kernel.jupyter import pool
from sandbox_kernel.records import Records
from sandbox_kernel.tunnel.background import submit
from tests.helpers.named_hosts import NamedHosts, listening, port_of, serve_with_threads
from tests.helpers.waiting import wait_until

from .conftest import KernelStarter
from .live import PATIENCE


@pytest.fixture(autouse=True)
def _empty_pools(folder: object) -> Iterator[None]:
    yield
    submit(pool.drain_all()).result(PATIENCE)


def waiting() -> int:
    """How many sandboxes wait in all pools."""
    return sum(len(one) for one in pool._pools.values())


def recorded() -> list[str]:
    return [record.name for record in Records().list("local")]


def test_kernels_come_from_the_pool_and_it_is_refilled(start_kernel: KernelStarter) -> None:
    """The first kernel fills it; each later one takes a sandbox that nobody had before."""
    kernels = [start_kernel(pool_size=1)]
    ready: set[str] = set()
    for _ in range(2):
        wait_until(lambda: waiting() == 1, "a full pool")
        (one,) = pool._pools.values()
        name = one._ready[0].kernel.handle.name
        kernels.append(start_kernel(pool_size=1))
        assert kernels[-1].sandbox == name
        ready.add(name)
    assert len(ready) == 2
    assert len({live.sandbox for live in kernels}) == 3
    assert [live.ok("6 * 7").value for live in kernels] == ["42"] * 3


def test_another_spec_gets_another_sandbox(start_kernel: KernelStarter) -> None:
    """What waits was made for one spec, and is handed to no other."""
    start_kernel(pool_size=1, memory_mib=512)
    wait_until(lambda: waiting() == 1, "a full pool")
    (one,) = pool._pools.values()
    name = one._ready[0].kernel.handle.name
    other = start_kernel(pool_size=1, memory_mib=600)
    assert other.sandbox != name
    assert name in [spare.kernel.handle.name for spare in one._ready]


def test_a_sandbox_that_died_while_waiting_is_not_handed_out(start_kernel: KernelStarter) -> None:
    """It is removed, and the kernel gets a fresh one."""
    start_kernel(pool_size=1)
    wait_until(lambda: waiting() == 1, "a full pool")
    (one,) = pool._pools.values()
    dead = one._ready[0].kernel
    submit(dead.handle.kill()).result(PATIENCE)
    wait_until(lambda: dead.tunnel.failure is not None, "its end")
    assert start_kernel(pool_size=1).sandbox != dead.handle.name
    wait_until(lambda: dead.handle.name not in recorded(), "its removal")


def test_a_pool_that_nobody_uses_is_emptied(start_kernel: KernelStarter) -> None:
    """After the idle time only the kernels' own sandboxes are left."""
    live = start_kernel(pool_size=2, pool_idle_seconds=10)
    wait_until(lambda: waiting() == 2, "a full pool")
    wait_until(lambda: recorded() == [live.sandbox], "an empty pool")


def test_no_pool_unless_asked_for(start_kernel: KernelStarter) -> None:
    """Neither by default nor for a sandbox whose name the user has chosen."""
    start_kernel()
    assert start_kernel(pool_size=1, name="mine").sandbox == "mine"
    assert pool._pools == {}


def test_a_sandbox_of_the_pool_has_ways_out(
    start_kernel: KernelStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = NamedHosts(monkeypatch)
    with listening() as sock:
        serve_with_threads(lambda connection: connection.sendall(b"hello"), sock)
        hosts.add("db.example", 5432, port_of(sock))
        start_kernel(pool_size=1, egress=["db.example:5432"])
        wait_until(lambda: waiting() == 1, "a full pool")
        (one,) = pool._pools.values()
        spare = one._ready[0].kernel.handle.name
        live = start_kernel(pool_size=1, egress=["db.example:5432"])
        assert live.sandbox == spare
        dial = "__import__('socket').create_connection(('db.example', 5432), timeout=60).recv(9)"
        assert live.ok(dial).value == "b'hello'"
