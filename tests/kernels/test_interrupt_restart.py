"""Interrupting and restarting, as the buttons in a notebook do."""

from __future__ import annotations

import logging

import pytest
import zmq

from sandbox_kernel.tunnel.background import submit
from sandbox_kernel.wire.mux import INITIAL_WINDOW, Stream
from tests.helpers.waiting import wait_until

from .conftest import StartKernel
from .live import PATIENCE, Live, until_message, until_reply

ENDLESS = "print('begun')\nwhile True: pass"
ENDLESS_PRINTS = "n = 0\nwhile True:\n    print('x' * 1000, n)\n    n += 1"


def test_interrupt_ends_a_busy_cell(live: Live) -> None:
    """An interrupt is a KeyboardInterrupt in the cell; the kernel and its variables go on."""
    live.ok("x = 41")
    cell = live.begin(ENDLESS)
    live.manager.interrupt_kernel()
    reply = until_reply(live.client, cell)
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    until_message(live.client, cell, "status", execution_state="idle")
    assert live.ok("x + 1").value == "42"


def test_interrupt_gets_through_while_a_cell_prints_without_end(live: Live) -> None:
    """Output is pushed back, the interrupt overtakes it, and then all of the output arrives."""
    cell = live.begin(ENDLESS_PRINTS)
    live.manager.interrupt_kernel()
    reply = until_reply(live.client, cell)
    assert reply["ename"] == "KeyboardInterrupt"
    until_message(live.client, cell, "error")
    until_message(live.client, cell, "status", execution_state="idle")
    assert live.ok("'on with it'").value == "'on with it'"


@pytest.mark.usefixtures("over_the_wire")
def test_little_output_is_under_way_when_a_cell_is_interrupted(live: Live) -> None:
    """In the browser an interrupt of a cell that prints for ever took half a minute, because all
    that the tunnel held was shown first. On one machine it holds no more than a socket does, also
    after much output to a client that keeps up, and for one that reads nothing."""
    live.ok("for _ in range(100): print('x' * 200_000)")
    (endpoint,) = [e for e in live.kernel.tunnel._endpoints if e.target == "kernel:iopub"]
    with zmq.Context() as context, context.socket(zmq.SUB) as idler:
        idler.rcvhwm = 1
        idler.subscribe(b"")
        idler.connect(live.client._make_url("iopub"))
        wait_until(lambda: len(endpoint.pumps) == 3, "its stream, beside the client's and our own")
        cell = live.begin(ENDLESS_PRINTS)
        streams = [s for s in (p._stream for p in endpoint.pumps) if isinstance(s, Stream)]
        assert len(streams) == 3
        wait_until(lambda: any(stream._unread for stream in streams), "output that nobody reads")
        under_way = [stream._granted + stream._unread for stream in streams]
        live.manager.interrupt_kernel()
        assert until_reply(live.client, cell)["ename"] == "KeyboardInterrupt"
    assert max(under_way) <= INITIAL_WINDOW


def test_interrupt_reaches_processes_that_the_kernel_started(live: Live) -> None:
    """The whole process group is interrupted, as with a local kernel."""
    cell = live.begin("import subprocess; print('begun'); subprocess.run(['sleep', '1000'])")
    live.manager.interrupt_kernel()
    assert until_reply(live.client, cell)["ename"] == "KeyboardInterrupt"
    left = (
        live.ok(
            "print(subprocess.run('pgrep sleep || true', shell=True, text=True,"
            " capture_output=True).stdout)"
        )
        .text()
        .strip()
    )
    assert left == ""


@pytest.mark.parametrize("now", [True, False], ids=["now", "graceful"])
def test_restart_keeps_the_sandbox(live: Live, now: bool) -> None:
    """A restart changes the kernel process only: files stay, variables go."""
    before = live.ok("x = 1; import os; open('kept.txt', 'w').write('kept'); os.getpid()").value
    sandbox = live.sandbox
    live.manager.restart_kernel(now=now)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.sandbox == sandbox
    assert live.manager.is_alive()
    assert live.run("x").reply["ename"] == "NameError"
    assert live.ok("open('/workspace/kept.txt').read()").value == "'kept'"
    assert live.ok("import os; os.getpid()").value != before


@pytest.mark.parametrize("now", [True, False], ids=["now", "graceful"])
def test_the_first_cell_after_a_restart_is_heard(live: Live, now: bool) -> None:
    """ZeroMQ sockets reconnect one by one. A listener that needs longer than the kernel, and than
    the socket with the next request, misses nothing: the request waits for it."""
    live.ok("x = 1")
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.reconnect_ivl = 500
        listener.subscribe(b"")
        listener.connect(live.manager._make_url("iopub"))
        wait_until(lambda: live.ok("x") and listener.poll(0), "the listener listens")
        live.manager.restart_kernel(now=now)
        cell = live.client.execute("print('first words')")
        assert until_reply(live.client, cell)["status"] == "ok"
        heard = b""
        while b"first words\\n" not in heard:
            assert listener.poll(int(PATIENCE * 1000)), "the output is lost"
            heard = b"".join(listener.recv_multipart())
        until_message(live.client, cell, "stream", text="first words\n")


@pytest.mark.usefixtures("over_the_wire")
def test_a_cell_that_is_sent_to_a_dead_kernel_is_run_by_the_next(live: Live) -> None:
    """As with a local kernel. The client has come back to where no kernel is, and stays."""
    live.client.execute("import os; os._exit(1)")
    wait_until(lambda: not live.manager.is_alive(), "the kernel is dead")
    endpoints = live.kernel.tunnel._endpoints
    wait_until(lambda: all(e.pumps for e in endpoints), "the client is back")
    cell = live.client.execute("print('late, but here')")
    live.manager.restart_kernel()
    assert until_reply(live.client, cell)["status"] == "ok"
    until_message(live.client, cell, "stream", text="late, but here\n")


def test_restart_of_a_kernel_that_is_busy(live: Live) -> None:
    """A cell that never ends does not keep a kernel from being restarted."""
    live.begin(ENDLESS_PRINTS)
    live.manager.restart_kernel(now=True)
    live.reconnect()
    assert live.ok("1 + 1").value == "2"


def test_restart_with_new_ports(live: Live) -> None:
    """``newports`` gives new endpoints; the sandbox stays."""
    sandbox = live.sandbox
    live.ok("open('kept.txt', 'w').write('kept')")
    live.manager.restart_kernel(now=True, newports=True)
    live.reconnect()
    assert live.sandbox == sandbox
    assert live.ok("open('kept.txt').read()").value == "'kept'"


def test_many_restarts_pile_nothing_up(live: Live) -> None:
    """Restart after restart: no more processes and files in the sandbox than after the first."""

    def counted() -> int:
        count = (
            "import glob, os; len(glob.glob('/proc/[0-9]*'))"
            " + sum(len(f) for _, _, f in os.walk('/tmp'))"
        )
        return int(live.ok(count).value)

    found = []
    for _ in range(5):
        live.manager.restart_kernel(now=True)
        live.client.wait_for_ready(timeout=PATIENCE)
        found.append(counted())
    wait_until(lambda: counted() <= found[0], f"no growth over {found}", limit=30)


def test_restart_after_the_sandbox_was_killed(
    start_kernel: StartKernel, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sandbox gone, a kernel is restarted in a new one, and the log says so."""
    caplog.set_level(logging.WARNING)
    live = start_kernel()
    lost = live.kernel.handle
    submit(lost.kill()).result(PATIENCE)
    wait_until(lambda: not live.manager.is_alive(), "the end of the kernel is seen")
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.sandbox != lost.name
    assert live.ok("1 + 1").value == "2"
    warning = f"Sandbox {lost.name} is gone"
    assert [r for r in caplog.records if r.levelname == "WARNING" and warning in r.message]
    submit(live.kernel.client.remove(lost.name)).result(PATIENCE)
