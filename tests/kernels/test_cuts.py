"""The stream to the sandbox breaks, again and again: no client notices, nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from sandbox_kernel.tunnel import tunnel
from sandbox_kernel.tunnel.clock import since_boot
from tests.helpers.waiting import wait_until

from .live import PATIENCE, Live, next_comm, run_cell, send_comm, until_message, until_reply

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("over_the_wire")]

CHANNELS = ("shell", "iopub", "stdin", "control")


@contextmanager
def no_reconnects(live: Live) -> Iterator[None]:
    """Fails if a socket of the client loses its connection meanwhile."""
    monitors = {}
    for name in CHANNELS:
        channel: zmq.Socket[bytes] = zmq.Socket.shadow(
            getattr(live.client, f"{name}_channel").socket
        )
        monitors[name] = (channel, channel.get_monitor_socket(zmq.EVENT_DISCONNECTED))
    try:
        yield
        for name, (_, monitor) in monitors.items():
            seen = []
            while monitor.poll(0):
                seen.append(recv_monitor_message(monitor)["event"])
            assert not seen, f"the {name} socket was disconnected"
    finally:
        for channel, _ in monitors.values():
            channel.disable_monitor()


class Cutter(threading.Thread):
    """Cuts the stream as often as the tunnel has mended it, until it is stopped."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live
        self._stop_now = threading.Event()
        self.cuts = 0

    def run(self) -> None:
        tunnel = self._live.kernel.tunnel
        while not self._stop_now.wait(0.02):
            if tunnel.connected:
                self._live.cut()
                self.cuts += 1

    def __enter__(self) -> Cutter:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop_now.set()
        self.join()


def test_output_is_complete_and_in_order(live: Live) -> None:
    """Cut many times in the middle of a cell's output: every line once, in order."""
    live.ok("get_ipython().kernel.iopub_thread.socket.sndhwm = 0")
    live.client.iopub_channel.socket.rcvhwm = 0
    with no_reconnects(live), Cutter(live) as cutter:
        ran = live.ok(
            "import time\n"
            "for n in range(30_000):\n"
            "    print('line', n, 'x' * (n % 977))\n"
            "    if n % 500 == 0: time.sleep(0.02)"
        )
    assert ran.text() == "".join(f"line {n} {'x' * (n % 977)}\n" for n in range(30_000))
    assert cutter.cuts > 3
    assert live.kernel.tunnel.reconnects > 3


def test_binary_buffers(live: Live) -> None:
    """Large messages both ways, broken in the middle."""
    live.ok(
        "def opened(comm, message):\n"
        "    comm.on_msg(lambda m: comm.send(m['content']['data'], buffers=m['buffers']))\n"
        "get_ipython().kernel.comm_manager.register_target('echo', opened)"
    )
    send_comm(live, "comm_open", {"comm_id": "c", "target_name": "echo", "data": {}}, [])
    with no_reconnects(live), Cutter(live):
        for n in range(8):
            buffers = [bytes([n]) * 3_000_000, bytes(range(256)) * 4096]
            send_comm(live, "comm_msg", {"comm_id": "c", "data": {"n": n}}, buffers)
            answer = next_comm(live)
            assert answer["content"]["data"] == {"n": n}
            assert [bytes(b) for b in answer["buffers"]] == buffers


def test_input_request(live: Live) -> None:
    """Cut while a cell waits for its answer."""
    with no_reconnects(live):
        cell = live.client.execute("print('got', input('?'))", allow_stdin=True)
        live.client.get_stdin_msg(timeout=PATIENCE)
        live.cut()
        live.client.input("this")
        live.cut()
        assert until_reply(live.client, cell)["status"] == "ok"
        text = until_message(live.client, cell, "stream")["content"]["text"]
    assert text.startswith("got")


def test_interrupt_and_signals(live: Live) -> None:
    """A control call is carried out once, also if the stream breaks under it."""
    for _ in range(3):
        cell = live.begin("print('begun')\nwhile True: pass")
        live.cut()
        live.manager.interrupt_kernel()
        live.cut()
        assert until_reply(live.client, cell)["ename"] == "KeyboardInterrupt"
    assert live.ok("1 + 1").value == "2"


def test_many_cells_under_many_cuts(live: Live) -> None:
    """Short cells, one after the other: each is executed exactly once."""
    live.ok("n = 0")
    with no_reconnects(live), Cutter(live):
        for turn in count(1):
            assert live.ok("n += 1; n").value == str(turn)
            if turn >= 100:
                break


def test_heartbeat_goes_on(live: Live) -> None:
    """A client's heart does not stop for a cut."""
    heart = live.client.hb_channel
    with Cutter(live):
        for _ in range(20):
            run_cell(live.client, "pass")
            assert heart.is_alive()
            wait_until(heart.is_beating, "the heart beats")


def test_restart_during_cuts(live: Live) -> None:
    """A restart is several control calls; none of them is lost or done twice."""
    sandbox = live.sandbox
    with Cutter(live):
        live.manager.restart_kernel(now=True)
        live.client.wait_for_ready(timeout=PATIENCE)
    assert live.sandbox == sandbox
    assert live.ok("1 + 1").value == "2"


def test_the_sleep_of_a_laptop_is_seen(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that has died while the machine slept is replaced soon after, not when another
    half minute has passed: by the clock that goes on meanwhile."""
    monkeypatch.setattr(tunnel, "ALIVE_INTERVAL", 0.1)
    live.ok("n = 1")
    live.client.hb_channel.pause()  # and so nothing is heard
    assert abs(since_boot() - float(Path("/proc/uptime").read_text().split()[0])) < 5
    peer = live.kernel.tunnel._peer
    monkeypatch.setattr(peer, "clock", lambda: since_boot() + 8 * 3600)
    wait_until(lambda: live.kernel.tunnel.reconnects, "the link is replaced", 20)
    assert live.ok("print(n)").text() == "1\n"
