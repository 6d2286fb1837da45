"""Pumps: a program's socket on each side, and the wire between them."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from sandbox_kernel.wire.fdlink import LINK_BUFFER
from sandbox_kernel.wire.mux import DEFAULT_WINDOW, HIGH_WATER, INITIAL_WINDOW, OUTPUT, Data, Stream
from sandbox_kernel.wire.pump import Pump
from sandbox_kernel.wire.session import REPLAY_LIMIT
from tests.wire.loops import LIMIT, Driver, Pair

MIB = 2**20
NOISE = random.Random(0).randbytes(6 * MIB)


class Program:
    """A program with a socket: writes what it is given, and reads unless told to stop."""

    def __init__(self, driver: Driver, sock: socket.socket) -> None:
        self.sock = sock
        self.got = bytearray()
        self.reading = True
        self.ended = False
        self.sent = 0
        self._driver = driver
        self._to_send = memoryview(b"")
        sock.setblocking(False)

    def send(self, data: bytes) -> None:
        self._to_send = memoryview(bytes(self._to_send) + data)

    def run(self) -> None:
        """Do what can be done without waiting."""
        try:
            while self._to_send:
                size = self.sock.send(self._to_send)
                self.sent += size
                self._to_send = self._to_send[size:]
        except BlockingIOError:
            pass
        try:
            while self.reading and not self.ended:
                data = self.sock.recv(MIB)
                self.got += data
                self.ended = not data
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.ended = True


class Channel:
    """Client and kernel, joined by a stream with a pump at each end."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.driver = pair.driver
        self.closed: list[Pump] = []
        client, host_end = socket.socketpair()
        kernel, guest_end = socket.socketpair()
        self.client = Program(self.driver, client)
        self.kernel = Program(self.driver, kernel)
        self.guest_stream: Stream | None = None

        def opened(stream: Stream, target: str) -> None:
            assert target == "kernel:iopub"
            self.guest_stream = stream
            self.guest_pump = self._pump(pair.guest, stream, guest_end)

        pair.guest.on_opened = opened
        self.host_stream = pair.host.mux.open("kernel:iopub", OUTPUT)
        self.host_pump = self._pump(pair.host, self.host_stream, host_end)
        pair.host.flush_soon()
        self.driver.until(lambda: self.guest_stream)

    def _pump(self, peer, stream: Stream, sock: socket.socket) -> Pump:  # type: ignore[no-untyped-def]
        return Pump(self.driver.loop, peer, stream, sock, self.closed.append)

    def until(self, condition) -> None:  # type: ignore[no-untyped-def]
        def step() -> object:
            self.client.run()
            self.kernel.run()
            return condition()

        self.driver.until(step)

    def close(self) -> None:
        self.client.sock.close()
        self.kernel.sock.close()
        for pump in (self.host_pump, self.guest_pump):
            pump.close("the test is over")
            pump.close("twice does not matter")


@pytest.fixture
def channel(pair: Pair) -> Iterator[Channel]:
    channel = Channel(pair)
    yield channel
    channel.close()
    assert len(channel.closed) == 2


def test_megabytes_both_ways_at_once(channel: Channel) -> None:
    """Every byte, in order."""
    channel.client.send(NOISE)
    channel.kernel.send(NOISE[::-1])
    channel.until(
        lambda: len(channel.kernel.got) >= len(NOISE) and len(channel.client.got) >= len(NOISE)
    )
    assert channel.kernel.got == NOISE
    assert channel.client.got == NOISE[::-1]


def test_a_reader_that_stops_stops_its_writer(channel: Channel) -> None:
    """What is under way is bounded by windows and buffers, and all of it arrives in the end."""
    channel.client.reading = False
    total = 8 * MIB
    channel.kernel.send(bytes(total))
    before = -1
    while channel.kernel.sent != before:
        before = channel.kernel.sent
        for _ in range(10):
            channel.kernel.run()
            channel.driver.turn()
    sockets = 2 * 512 * 1024
    assert channel.kernel.sent < DEFAULT_WINDOW + 2 * HIGH_WATER + LINK_BUFFER + sockets
    assert channel.kernel.sent < total
    stream = channel.guest_stream
    assert stream is not None
    assert stream.buffered < 2 * HIGH_WATER
    assert sum(map(len, channel.host_pump._out)) <= DEFAULT_WINDOW
    assert channel.pair.guest.session.unacked_bytes <= REPLAY_LIMIT
    channel.client.reading = True
    channel.until(lambda: len(channel.client.got) == total)


def test_small_pieces_that_wait_hold_only_themselves(channel: Channel) -> None:
    """Not the whole reads of the link that they came in."""
    channel.client.reading = False
    pump = channel.host_pump
    pump.on_data(bytes(DEFAULT_WINDOW // 2))
    read_of_the_link = bytes(100_000)
    pump.on_data(memoryview(read_of_the_link)[:10])
    pump.on_data(memoryview(read_of_the_link)[:64_000])
    *_, small, big = pump._out
    assert isinstance(small, bytes)
    assert isinstance(big, memoryview)


def test_the_end_of_one_program_is_the_end_for_the_other(channel: Channel) -> None:
    """After everything that was written before."""
    channel.kernel.send(NOISE[:MIB])
    channel.kernel.run()
    channel.until(lambda: channel.kernel.sent == MIB)
    channel.kernel.sock.close()
    channel.kernel.run = lambda: None  # type: ignore[method-assign]
    channel.until(lambda: channel.client.ended)
    assert channel.client.got == NOISE[:MIB]
    channel.until(lambda: len(channel.closed) == 2)
    assert channel.host_stream.closed
    assert channel.pair.guest.mux.streams == {}


def test_an_end_waits_for_a_slow_reader(channel: Channel) -> None:
    """The socket is closed only when it has taken the last byte."""
    channel.client.reading = False
    channel.kernel.send(NOISE[: 2 * MIB])
    for _ in range(30):
        channel.kernel.run()
        channel.driver.turn()
    channel.client.reading = True
    channel.until(lambda: channel.kernel.sent == 2 * MIB)
    channel.client.reading = False
    channel.kernel.sock.close()
    channel.kernel.run = lambda: None  # type: ignore[method-assign]
    channel.driver.settle()
    channel.client.reading = True
    channel.until(lambda: channel.client.ended)
    assert channel.client.got == NOISE[: 2 * MIB]


def test_a_program_that_closes_with_unread_data_resets_nothing_else(channel: Channel) -> None:
    """Its stream ends; the session and the other streams go on."""
    other = Channel(channel.pair)
    channel.client.reading = False
    channel.kernel.send(NOISE)
    channel.kernel.run()
    channel.driver.settle()
    channel.client.sock.close()
    channel.client.run = lambda: None  # type: ignore[method-assign]
    channel.driver.until(lambda: len(channel.closed) == 2)
    other.client.send(b"still here")
    other.until(lambda: other.kernel.got == b"still here")
    other.close()
    assert channel.pair.broken == []


def test_a_pump_that_is_closed_resets_the_stream(channel: Channel) -> None:
    """The far side's socket is closed, too."""
    channel.host_pump.close("no longer wanted")
    channel.until(lambda: channel.kernel.ended)
    assert channel.client.sock.recv(1) == b""
    assert channel.host_stream.closed


def test_data_for_a_closed_pump_is_dropped(channel: Channel) -> None:
    """It was under way. The program sees an end and nothing else, and the session goes on."""
    channel.host_pump.close("no longer wanted")
    channel.pair.host._dispatch(Data(channel.host_stream, b"late"))
    channel.host_pump.on_room()
    channel.host_pump.on_reset("late, too")
    channel.until(lambda: channel.client.ended and channel.kernel.ended)
    assert channel.client.got == b""
    assert channel.closed == [channel.host_pump, channel.guest_pump]
    assert channel.pair.broken == channel.pair.lost == []
    assert not channel.host_pump._out


def test_an_error_of_the_socket_ends_the_stream(pair: Pair) -> None:
    """On reading and on writing; the far side is told in words."""
    reasons: list[str] = []

    class Far:
        def on_reset(self, reason: str) -> None:
            reasons.append(reason)

    pair.guest.on_opened = lambda stream, target: setattr(stream, "owner", Far())
    for while_writing in (False, True):
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with listener:
            stream = pair.host.mux.open("x", OUTPUT)
            pump = Pump(pair.driver.loop, pair.host, stream, server)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            if while_writing:
                pump.on_data(b"x")
                pump.on_data(b"y")
            pair.driver.until(lambda: stream.closed)  # noqa: B023
    pair.driver.until(lambda: len(reasons) == 2)
    assert all(reason.startswith("[Errno") for reason in reasons)


def test_a_read_that_finds_nothing_is_no_end(channel: Channel) -> None:
    """A loop may call once too often."""
    channel.host_pump._readable()
    assert not channel.host_stream.closed


def test_the_link_is_cut_again_and_again_during_a_transfer(channel: Channel) -> None:
    """Both programs notice nothing."""
    channel.client.send(NOISE)
    channel.kernel.send(NOISE[::-1])
    cuts = 0
    next_cut = 300_000

    def both_have_all() -> bool:
        nonlocal cuts, next_cut
        got = min(len(channel.kernel.got), len(channel.client.got))
        if got >= next_cut:
            channel.pair.cut()
            channel.driver.settle(2)
            channel.pair.connect()
            cuts += 1
            next_cut += 700_000
        return got >= len(NOISE)

    channel.until(both_have_all)
    assert cuts >= 5
    assert channel.kernel.got == NOISE
    assert channel.client.got == NOISE[::-1]


def test_little_is_under_way_to_a_slow_reader(channel: Channel) -> None:
    """A cell that prints for ever, and a browser that shows it more slowly: what is between them
    when the cell is interrupted must be read first, so it becomes little. Nothing of it is lost."""
    kernel, client, stream = channel.kernel, channel.client, channel.host_stream
    kernel.send(NOISE + NOISE)
    began = channel.driver.loop.time()
    while len(client.got) < MIB or stream._granted + stream._unread > 2 * INITIAL_WINDOW:
        passed = channel.driver.loop.time() - began
        assert passed < LIMIT / 4, "the writer is not held back"
        kernel.run()
        channel.driver.turn()
        if len(client.got) < passed * 400_000:  # bytes a second
            with contextlib.suppress(BlockingIOError):
                client.got += client.sock.recv(16 * 1024)
    sockets, agent = 2 * 512 * 1024, 2 * HIGH_WATER
    assert kernel.sent - len(client.got) < sockets + agent + 2 * INITIAL_WINDOW
    kernel._to_send = memoryview(b"")
    channel.until(lambda: len(client.got) >= kernel.sent)
    assert client.got == (NOISE + NOISE)[: kernel.sent]
