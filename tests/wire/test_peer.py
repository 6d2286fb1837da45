"""Peers: session and multiplexer over real links, with handlers."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest

from sandbox_kernel.guest.control_server import CallError, ControlServer, Later
from sandbox_kernel.wire.fdlink import FdLink
from sandbox_kernel.wire.frames import DATA, PING, REFUSE, Frame, FrameDecoder, encode
from sandbox_kernel.wire.mux import BULK, CONTROL, DEFAULT_WINDOW, Stream
from sandbox_kernel.wire.peer import Peer
from sandbox_kernel.wire.session import DEAD_AFTER, PING_AFTER
from tests.wire.loops import Driver, Pair
from tests.wire.sides import welcomed

MIB = 2**20


class Handler:
    """Keeps what its stream says, and consumes at once."""

    def __init__(self, stream: Stream, peer: Peer) -> None:
        self.stream = stream
        self.peer = peer
        self.got = bytearray()
        self.finished = False
        self.resets: list[str] = []
        self.rooms = 0
        self.then: Callable[[], object] = lambda: None
        stream.owner = self

    def on_data(self, payload: Any) -> None:
        self.got += payload
        self.stream.consumed(len(payload))
        self.peer.flush_soon()
        self.then()

    def on_finished(self) -> None:
        self.finished = True

    def on_reset(self, reason: str) -> None:
        self.resets.append(reason)

    def on_room(self) -> None:
        self.rooms += 1


def opened(pair: Pair, priority: int = BULK) -> tuple[Handler, Handler]:
    """A stream from host to guest, with a handler at each end."""
    theirs: list[Handler] = []
    pair.guest.on_opened = lambda stream, _: theirs.append(Handler(stream, pair.guest))
    ours = Handler(pair.host.mux.open("x", priority), pair.host)
    pair.host.flush_soon()
    pair.driver.until(lambda: theirs)
    return ours, theirs[0]


def test_streams_carry_bytes_and_ends(pair: Pair) -> None:
    """From open to closed."""
    ours, theirs = opened(pair)
    ours.stream.write(b"question")
    ours.stream.finish()
    pair.host.flush_soon()
    pair.driver.until(lambda: theirs.finished)
    theirs.stream.write(b"answer")
    theirs.stream.finish()
    pair.guest.flush_soon()
    pair.driver.until(lambda: ours.finished)
    assert theirs.got == b"question"
    assert ours.got == b"answer"
    assert pair.host.mux.streams == pair.guest.mux.streams == {}


def test_a_peer_opens_nothing_unless_it_was_told_how(pair: Pair) -> None:
    """The host's side refuses whatever the sandbox wants to open."""
    handler = Handler(pair.guest.mux.open("host's files", CONTROL), pair.guest)
    pair.guest.flush_soon()
    pair.driver.until(lambda: handler.resets)
    assert handler.resets == ["nothing can be opened here"]


def test_events_of_a_stream_without_a_handler_are_dropped(pair: Pair) -> None:
    """They must not end the link."""
    ours, theirs = opened(pair)
    theirs.stream.owner = None
    ours.stream.write(b"x")
    ours.stream.reset("no")
    pair.host.flush_soon()
    pair.driver.until(lambda: theirs.stream.closed)
    assert (pair.lost, pair.broken) == ([], [])


def test_a_cut_in_the_middle_of_a_transfer_costs_nothing(pair: Pair) -> None:
    """What was in the buffers of the old link comes again on the new one, once."""
    ours, theirs = opened(pair)
    payload = random.Random(0).randbytes(4 * MIB)
    ours.stream.write(payload)
    pair.host.flush()
    pair.driver.until(lambda: len(theirs.got) > 100_000)
    pair.cut()
    assert len(theirs.got) < len(payload)
    pair.connect()
    pair.driver.until(lambda: len(theirs.got) >= len(payload))
    assert theirs.got == payload


def test_a_second_link_replaces_the_first(pair: Pair) -> None:
    """Without the first having been noticed as lost."""
    ours, theirs = opened(pair)
    first = pair.host.link
    pair.connect()
    ours.stream.write(b"over the new one")
    pair.host.flush_soon()
    pair.driver.until(lambda: theirs.got)
    assert first is not None
    assert first.closed
    assert pair.lost == []


def test_producers_are_told_when_there_is_room(pair: Pair) -> None:
    """Through their handler."""
    ours, theirs = opened(pair)
    ours.stream.write(bytes(3 * DEFAULT_WINDOW))
    ours.stream.waiting = True
    pair.host.flush_soon()
    pair.driver.until(lambda: ours.rooms == 1)
    pair.driver.until(lambda: len(theirs.got) == 3 * DEFAULT_WINDOW)
    assert ours.rooms == 1


def test_the_loss_of_a_link_is_told_once_to_each_side(pair: Pair) -> None:
    """The session stays."""
    assert pair.host.link is not None
    pair.host.link.close()
    pair.driver.until(lambda: pair.lost)
    assert pair.lost == ["the far end closed the stream"]
    assert pair.guest.link is None
    assert not pair.guest.session.attached
    pair.guest.check_alive()


def test_a_link_that_is_lost_before_it_is_attached_is_noticed(driver: Driver) -> None:
    """It has nobody else to tell that to."""
    ours, theirs = socket.socketpair()
    theirs.close()
    fd = ours.detach()
    link = FdLink(driver.loop, fd, os.dup(fd))
    link.start()
    driver.until(lambda: link.closed)
    peer = Peer(driver.loop, host=True)
    lost: list[str] = []
    peer.on_link_lost = lost.append
    peer.attach(link, welcomed(peer.mux))
    assert len(lost) == 1
    assert peer.link is None


class Victim:
    """A peer whose far end is a plain socket in the hands of the test."""

    def __init__(self, driver: Driver, early: bytes = b"") -> None:
        ours, self.far = socket.socketpair()
        fd = ours.detach()
        self.link = FdLink(driver.loop, fd, os.dup(fd))
        self.link.start()
        self.peer = Peer(driver.loop, host=True)
        self.lost: list[str] = []
        self.broken: list[str] = []
        self.peer.on_link_lost = self.lost.append
        self.peer.on_broken = self.broken.append
        self.stream = Handler(self.peer.mux.open("x", CONTROL), self.peer)
        self.peer.attach(self.link, welcomed(self.peer.mux, 0, early, driver.loop.time()))

    def close(self) -> None:
        self.peer.detach()
        self.far.close()


@pytest.fixture
def victim(driver: Driver) -> Any:
    victim = Victim(driver)
    yield victim
    victim.close()


def test_frames_that_came_right_behind_the_handshake_are_not_lost(driver: Driver) -> None:
    """They are handled before anything else of the link."""
    victim = Victim(driver, encode(Frame(DATA, 1, 1, 0, b"early")))
    victim.far.send(encode(Frame(DATA, 1, 2, 0, b" bird")))
    driver.until(lambda: len(victim.stream.got) == 10)
    assert victim.stream.got == b"early bird"
    victim.close()


def test_damage_ends_the_link_only(driver: Driver, victim: Victim) -> None:
    """The next one goes on."""
    victim.far.send(b"\0" * 64)
    driver.until(lambda: victim.lost)
    assert victim.lost == ["frame is damaged"]
    assert victim.broken == []


def test_a_peer_that_breaks_the_rules_ends_the_session(driver: Driver, victim: Victim) -> None:
    """There is nothing to go on with."""
    victim.far.send(encode(Frame(REFUSE, 0, 0, 0, b"{}")))
    driver.until(lambda: victim.broken)
    assert victim.broken == ["REFUSE after the handshake"]
    assert victim.lost == []
    assert victim.peer.link is None


def test_a_handler_may_end_the_link(driver: Driver, victim: Victim) -> None:
    """The frames behind it are left for the replay."""
    victim.stream.then = victim.peer.detach
    victim.far.send(encode(Frame(DATA, 1, 1, 0, b"a")) + encode(Frame(DATA, 1, 2, 0, b"b")))
    driver.until(lambda: victim.stream.got)
    driver.settle(3)
    assert victim.stream.got == b"a"
    assert victim.peer.session.received == 1


def test_a_half_open_link_is_found_by_the_clock(
    driver: Driver, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is answered by a PING, more silence by giving the link up."""
    start = driver.loop.time()
    now = [start]
    monkeypatch.setattr(victim.peer, "clock", lambda: now[0])
    victim.far.settimeout(10)
    decoder = FrameDecoder()
    first = decoder.feed(victim.far.recv(65536))

    victim.peer.check_alive()
    now[0] = start + PING_AFTER + 1
    victim.peer.check_alive()
    (ping,) = decoder.feed(victim.far.recv(65536))
    assert ping.type == PING
    assert ping not in first

    victim.far.send(encode(Frame(PING, 0, 0, 0, b"")))  # a sign of life
    driver.until(lambda: victim.peer.session.last_heard == now[0])
    now[0] += DEAD_AFTER - 1
    victim.peer.check_alive()
    assert victim.lost == []
    now[0] += 1
    victim.peer.check_alive()
    assert victim.lost == ["the far end has been silent for too long"]
    assert victim.peer.link is None


# --- control calls


def control(pair: Pair, calls: dict[str, Callable[..., Any]]) -> tuple[Handler, list[Any]]:
    """A control stream, and the servers at its far end that have closed."""
    closed: list[Any] = []
    servers: list[ControlServer] = []

    def serve(stream: Stream, _: str) -> None:
        servers.append(ControlServer(pair.guest, stream, calls, closed.append))

    pair.guest.on_opened = serve
    handler = Handler(pair.host.mux.open("control", CONTROL), pair.host)
    pair.host.flush_soon()
    pair.driver.until(lambda: servers)
    servers[0].on_room()
    return handler, closed


def ask(pair: Pair, handler: Handler, line: bytes) -> bytes:
    handler.got.clear()
    handler.stream.write(line + b"\n")
    pair.host.flush_soon()
    pair.driver.until(lambda: b"\n" in handler.got or handler.resets)
    return bytes(handler.got).rstrip()


def test_control_calls_are_answered_with_a_result_or_an_error(pair: Pair) -> None:
    """A call that fails is an answer, whatever it fails with."""

    def fail() -> None:
        raise CallError("busy", "come back later")

    handler, _ = control(pair, {"add": lambda a, b: a + b, "fail": fail})
    assert (
        ask(pair, handler, b'{"id": 1, "call": "add", "args": {"a": 1, "b": 2}}')
        == b'{"id": 1, "result": 3}'
    )
    assert (
        ask(pair, handler, b'{"id": 2, "call": "fail", "args": {}}')
        == b'{"id": 2, "error": {"kind": "busy", "message": "come back later"}}'
    )
    assert b'"unknown-call"' in ask(pair, handler, b'{"id": 3, "call": "x", "args": {}}')
    assert b'"TypeError"' in ask(pair, handler, b'{"id": 4, "call": "add", "args": {"c": 1}}')
    assert b'"TypeError"' in ask(pair, handler, b'{"id": 5, "call": "add", "args": 7}')


def test_an_answer_may_come_later(pair: Pair) -> None:
    """Other calls are answered meanwhile; a result that is there already goes out at once."""
    later, failing, known = Later(), Later(), Later()
    known.finish("known")
    calls = {"later": lambda: later, "failing": lambda: failing, "known": lambda: known}
    handler, _ = control(pair, calls)
    handler.stream.write(b'{"id": 1, "call": "later", "args": {}}\n')
    handler.stream.write(b'{"id": 2, "call": "failing", "args": {}}\n')
    answer = ask(pair, handler, b'{"id": 3, "call": "known", "args": {}}')
    assert answer == b'{"id": 3, "result": "known"}'
    later.finish("done")
    failing.fail(CallError("busy", "no"))
    pair.driver.until(lambda: handler.got.count(b"\n") == 3)
    assert bytes(handler.got).splitlines()[1:] == [
        b'{"id": 1, "result": "done"}',
        b'{"id": 2, "error": {"kind": "busy", "message": "no"}}',
    ]


@pytest.mark.parametrize(
    "line", [b"nonsense", b"{}", b"7", b'{"id": 1, "call": [], "args": {}}', b"[" * 100_000]
)
def test_what_is_no_call_ends_the_control_stream(pair: Pair, line: bytes) -> None:
    """The session goes on."""
    handler, closed = control(pair, {})
    ask(pair, handler, line)
    assert handler.resets[0].startswith("control: ")
    assert len(closed) == 1
    assert pair.broken == []


def test_a_control_stream_ends_with_its_client(pair: Pair) -> None:
    """By an end or by a reset."""
    handler, closed = control(pair, {})
    handler.stream.finish()
    pair.host.flush_soon()
    pair.driver.until(lambda: handler.finished)
    assert len(closed) == 1
    handler, closed = control(pair, {})
    handler.stream.reset("bye")
    pair.host.flush_soon()
    pair.driver.until(lambda: closed)
