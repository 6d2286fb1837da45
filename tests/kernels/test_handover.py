"""On one machine the host hands its clients' connections to the agent."""

from __future__ import annotations

import socket
import threading

import pytest

from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.tunnel.background import background_loop
from sandbox_kernel.tunnel.handover import Handover
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until

from .conftest import KernelStarter, StartKernel
from .live import PATIENCE, Live, until_reply


def carried(live: Live) -> int:
    """How many connections the host's process carries."""
    return sum(len(endpoint.pumps) for endpoint in live.kernel.tunnel._endpoints)


def test_a_busy_host_delays_nobody(live: Live) -> None:
    """The thread of the tunnel hangs, and cells run, print, ask and fail as ever."""
    held = threading.Event()
    background_loop().call_soon_threadsafe(held.wait, 2 * PATIENCE)
    try:
        assert live.ok("print('x' * 10**6); 6 * 7").value == "42"
        assert live.ok("input()", answers=["yes"]).value == "'yes'"
        assert live.run("1 / 0").reply["ename"] == "ZeroDivisionError"
    finally:
        held.set()
    assert carried(live) == 0


def test_clients_stay_over_a_restart(live: Live) -> None:
    """And over a link that breaks, and hear each kernel's first output."""
    for number in range(3):
        live.manager.restart_kernel(now=True)
        live.cut()
        assert live.ok(f"print({number})").text() == f"{number}\n"
    assert carried(live) == 0


def test_a_cell_that_is_sent_to_a_dead_kernel(live: Live) -> None:
    """The next kernel runs it."""
    live.client.execute("import os; os._exit(1)")
    wait_until(lambda: not live.manager.is_alive(), "the kernel is dead")
    cell = live.client.execute("6 * 7")
    live.manager.restart_kernel()
    assert until_reply(live.client, cell)["status"] == "ok"


def test_a_later_client(live: Live) -> None:
    """Comes and goes as it likes."""
    for _ in range(3):
        live.reconnect()
        assert live.ok("6 * 7").value == "42"
    assert carried(live) == 0


def test_tcp_is_never_handed_over(start_kernel: StartKernel) -> None:
    """A TCP socket in the sandbox could be connected to any address."""
    live = start_kernel(manager={"shell_port": free_port()})
    assert live.manager.transport == "tcp"
    assert live.ok("6 * 7").value == "42"
    assert carried(live) >= 4


@pytest.mark.parametrize("how", ["it ends", "it speaks"])
def test_an_agent_that_takes_no_more(live: Live, how: str) -> None:
    """The wire carries what comes later."""
    handover = live.kernel.tunnel._handover
    assert handover is not None
    if how == "it ends":
        background_loop().call_soon_threadsafe(handover._carrier.shutdown, socket.SHUT_RDWR)
    else:
        background_loop().call_soon_threadsafe(handover._ended)
    wait_until(lambda: handover._carrier.fileno() < 0, "the host gives it up")
    live.reconnect()
    assert live.ok("6 * 7").value == "42"
    assert carried(live) >= 4


def test_an_agent_that_refuses(
    start_kernel: KernelStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the beginning."""
    usual = Handover.open.__func__  # type: ignore[attr-defined]

    async def wrong(handle: LocalHandle, folder: str, token: str, session: str) -> Handover:
        opened: Handover = await usual(Handover, handle, folder, token, session + "?")
        return opened

    monkeypatch.setattr(Handover, "open", wrong)
    live = start_kernel()
    assert live.ok("6 * 7").value == "42"
    assert carried(live) >= 4
