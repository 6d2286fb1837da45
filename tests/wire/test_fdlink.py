"""A link over file descriptors: everything in order, bounded, and one word when it ends."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator

import pytest

from sandbox_kernel.wire.fdlink import LINK_BUFFER, FdLink
from tests.wire.loops import Driver

MIB = 2**20


class End:
    """One FdLink and what it has reported."""

    def __init__(self, driver: Driver, in_fd: int, out_fd: int) -> None:
        self.link = FdLink(driver.loop, in_fd, out_fd)
        self.got = bytearray()
        self.lost: list[str] = []
        self.closed = 0
        self.room_calls = 0
        self.link.on_data = self.got.extend
        self.link.on_lost = self.lost.append
        self.link.on_closed = self._on_closed
        self.link.on_room = self._on_room
        self.link.start()

    def _on_closed(self) -> None:
        self.closed += 1

    def _on_room(self) -> None:
        self.room_calls += 1


@pytest.fixture(params=["socket", "one-descriptor", "pipes"])
def ends(request: pytest.FixtureRequest, driver: Driver) -> Iterator[tuple[End, End]]:
    """Two links that face each other."""
    if request.param == "pipes":
        (a_in, b_out), (b_in, a_out) = os.pipe(), os.pipe()
        pair = End(driver, a_in, a_out), End(driver, b_in, b_out)
    else:
        fds = [sock.detach() for sock in socket.socketpair()]
        again = os.dup if request.param == "socket" else int
        pair = End(driver, fds[0], again(fds[0])), End(driver, fds[1], again(fds[1]))
    yield pair
    for end in pair:
        end.link.close()


def test_megabytes_both_ways(driver: Driver, ends: tuple[End, End]) -> None:
    """Buffers of all sizes, whole and in order; the writer waits for room."""
    a, b = ends
    payload = random.Random(0).randbytes(5 * MIB)

    def pump(end: End, at: int) -> None:
        while at < len(payload) and end.link.room:
            size = 1 + (at * 31) % 100_000
            view = memoryview(payload)[at : at + size]
            end.link.write([view[: size // 2], b"", view[size // 2 :]])
            at += size
        if at < len(payload):
            end.link.on_room = lambda: pump(end, at)
        else:
            end.link.on_room = lambda: None

    pump(a, 0)
    pump(b, 0)
    driver.until(lambda: len(a.got) >= len(payload) and len(b.got) >= len(payload))
    assert a.got == b.got == payload


def test_many_small_buffers(driver: Driver, ends: tuple[End, End]) -> None:
    """More than one system call takes."""
    a, b = ends
    a.link.write([b"%06d" % n for n in range(100_000)])
    driver.until(lambda: len(b.got) >= 600_000)
    assert b.got == b"".join(b"%06d" % n for n in range(100_000))


def test_empty_buffers_are_nothing(driver: Driver, ends: tuple[End, End]) -> None:
    """They neither block what follows nor spin."""
    a, b = ends
    a.link.write([b""])
    a.link.write([b"x", b""])
    a.link.write([b"", b"y"])
    driver.until(lambda: b.got == b"xy")


def test_a_reader_that_stops_fills_the_link_and_no_more(driver: Driver) -> None:
    """``room`` is what pushes back; ``on_room`` says that it is over."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = ours.detach()
        end = End(driver, fd, os.dup(fd))
        written = 0
        while end.link.room:
            end.link.write([bytes(65536)])
            written += 65536
        assert end.link._pending_bytes < LINK_BUFFER + 65536
        driver.settle(3)
        assert end.link.room == 0
        assert end.room_calls == 0
        theirs.settimeout(10)
        received = 0
        while received < written:
            received += len(theirs.recv(65536))
            driver.turn()
        driver.until(lambda: end.link.room == LINK_BUFFER)
        assert end.room_calls > 0
        end.link.close()


def test_the_end_of_the_far_side_is_reported_once(driver: Driver, ends: tuple[End, End]) -> None:
    """After everything that it said."""
    a, b = ends
    a.link.write([b"last words"])
    a.link.close()
    driver.until(lambda: b.lost)
    assert b.got == b"last words"
    assert b.lost == ["the far end closed the stream"]
    assert (a.closed, b.closed) == (1, 1)
    assert a.lost == []


def test_writing_to_a_far_side_that_is_gone(driver: Driver, ends: tuple[End, End]) -> None:
    """An error of the descriptor is words, too, and never an exception."""
    a, b = ends
    driver.loop.remove_reader(a.link._in)
    b.link.close()
    a.link.write([b"x"])
    driver.until(lambda: a.lost)
    assert a.link.closed
    assert a.link.room == 0
    a.link.write([b"ignored"])
    assert (a.lost, a.closed) == (["[Errno 32] Broken pipe"], 1)


def test_closing_is_idempotent_and_silent(driver: Driver, ends: tuple[End, End]) -> None:
    """Who closes does not need to be told, and what waits is dropped."""
    a, _ = ends
    a.link.write([bytes(4 * MIB)])
    a.link.close()
    a.link.close()
    driver.settle(3)
    assert (a.lost, a.closed) == ([], 1)


def test_a_read_that_finds_nothing_is_no_end(driver: Driver, ends: tuple[End, End]) -> None:
    """Another process may share the descriptor and have been quicker."""
    a, _ = ends
    a.link._readable()
    assert not a.link.closed


def test_an_error_of_the_descriptor_while_reading_ends_the_link(driver: Driver) -> None:
    """For example a connection that was reset."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    with listener, client:
        fd = server.detach()
        end = End(driver, fd, os.dup(fd))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        driver.until(lambda: end.lost)
        assert "reset" in end.lost[0]
