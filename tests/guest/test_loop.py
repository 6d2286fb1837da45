"""The small loop does what asyncio's does, as far as the shells need it."""

from __future__ import annotations

import socket

import pytest

from sandbox_kernel.guest.loop import Loop
from tests.wire.loops import Driver


def test_readers_are_called_while_there_is_something_to_read(driver: Driver) -> None:
    """Level-triggered, with their arguments, until they are removed."""
    read, write = socket.socketpair()
    got: list[bytes] = []

    def readable(sock: socket.socket) -> None:
        got.append(sock.recv(1))

    with read, write:
        driver.loop.add_reader(read.fileno(), readable, read)
        write.send(b"abc")
        driver.until(lambda: got == [b"a", b"b", b"c"])
        assert driver.loop.remove_reader(read.fileno())
        assert not driver.loop.remove_reader(read.fileno())
        write.send(b"d")
        driver.settle(3)
        assert len(got) == 3


def test_one_descriptor_can_have_a_reader_and_a_writer(driver: Driver) -> None:
    """Each is added, replaced and removed by itself."""
    ours, theirs = socket.socketpair()
    calls: list[str] = []
    fd = ours.fileno()
    with ours, theirs:
        driver.loop.add_reader(fd, calls.append, "read")
        driver.loop.add_writer(fd, calls.append, "write")
        driver.until(lambda: "write" in calls)
        assert "read" not in calls
        driver.loop.add_writer(fd, calls.append, "other")
        driver.until(lambda: "other" in calls)
        assert driver.loop.remove_writer(fd)
        theirs.send(b"x")
        driver.until(lambda: "read" in calls)
        assert driver.loop.remove_reader(fd)
        assert not driver.loop.remove_writer(fd)


def test_a_callback_may_remove_another_that_is_ready_too(driver: Driver) -> None:
    """It is not called after that, although it was ready in the same turn."""
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[int] = []

    def readable(me: int) -> None:
        called.append(me)
        for read, _ in pairs:
            driver.loop.remove_reader(read.fileno())

    for index, (read, write) in enumerate(pairs):
        write.send(b"x")
        driver.loop.add_reader(read.fileno(), readable, index)
    driver.until(lambda: called)
    driver.settle(3)
    assert len(called) == 1
    for both in pairs:
        for sock in both:
            sock.close()


def test_timers_run_in_the_order_of_their_time(driver: Driver) -> None:
    """And not at all when cancelled."""
    ran: list[str] = []
    driver.loop.call_later(0.03, ran.append, "third")
    driver.loop.call_later(0.01, ran.append, "first")
    driver.loop.call_later(0.02, ran.append, "never").cancel()
    driver.loop.call_later(0.02, ran.append, "second")
    driver.until(lambda: len(ran) == 3)
    assert ran == ["first", "second", "third"]


def test_soon_means_in_this_turn_or_the_next_and_in_order(driver: Driver) -> None:
    """What a callback adds waits for another turn: descriptors are not starved."""
    ran: list[int] = []
    read, write = socket.socketpair()
    turns = 0

    def again() -> None:
        nonlocal turns
        turns += 1
        driver.loop.call_soon(again)

    with read, write:
        driver.loop.add_reader(read.fileno(), lambda: ran.append(len(read.recv(9))))
        driver.loop.call_soon(ran.append, -1)
        driver.loop.call_soon(ran.append, -2)
        driver.loop.call_soon(again)
        write.send(b"x")
        driver.until(lambda: 1 in ran)
        assert [n for n in ran if n < 0] == [-1, -2]
        assert turns > 0
        driver.loop.remove_reader(read.fileno())


def test_one_failing_callback_does_not_end_the_loop(driver: Driver) -> None:
    """It is reported, and the others go on."""
    ran: list[str] = []
    driver.loop.call_soon(lambda: 1 / 0)
    driver.loop.call_soon(ran.append, "after")
    while not ran:
        driver.turn()
    assert [type(error) for error in driver.errors] == [ZeroDivisionError]


def test_run_until_stop() -> None:
    """A stop before the run counts, too: a signal may come early."""
    loop = Loop()
    ran: list[str] = []
    loop.call_later(0.01, loop.stop)
    loop.call_soon(ran.append, "ran")
    loop.run()
    assert ran == ["ran"]
    loop.run()  # has been stopped: returns at once


def test_errors_are_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon's stderr is its log."""
    loop = Loop()
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(loop.stop)
    loop.run()
    assert "ZeroDivisionError" in capsys.readouterr().err
