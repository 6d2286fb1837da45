"""After a restart, requests wait for those who listened to the last kernel."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from sandbox_kernel.guest.listeners import RETURN_LIMIT, Handshake, Listeners


class Wire:
    """Real ZeroMQ sockets, and what the one that connects says to the one that is bound."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self.publisher = self._context.socket(zmq.XPUB)
        self._bound = str(folder / "bound")
        self._between = socket.socket(socket.AF_UNIX)
        self._between.bind(str(folder / "between"))
        self._between.listen(1)
        self._target = f"ipc://{folder / 'between'}"

    def pieces(self, kind: int = zmq.SUB, subscribe: bool = True, **options: Any) -> list[bytes]:
        """All that a client says until it has subscribed, or only shaken hands."""
        self.publisher.bind(f"ipc://{self._bound}")
        client = self._context.socket(kind)
        for name, value in options.items():
            setattr(client, name, value)
        if subscribe:
            client.subscribe(b"")
        client.connect(self._target)
        said = list(self._carry())
        client.close(0)
        return said

    def _carry(self) -> Iterator[bytes]:
        from_client, _ = self._between.accept()
        with from_client, socket.socket(socket.AF_UNIX) as to_publisher:
            to_publisher.connect(self._bound)
            poller = zmq.Poller()
            for readable in (from_client, to_publisher, self.publisher):
                poller.register(readable, zmq.POLLIN)
            while ready := dict(poller.poll(500)):
                if from_client.fileno() in ready:
                    data = from_client.recv(4096)
                    to_publisher.sendall(data)
                    yield data
                if to_publisher.fileno() in ready:
                    from_client.sendall(to_publisher.recv(4096))
                if self.publisher in ready:
                    assert self.publisher.recv() == b"\x01"

    def close(self) -> None:
        self._between.close()
        self._context.destroy(0)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path)
    yield wire
    wire.close()


def test_a_client_that_has_not_looked_yet_can_be_subscribed(wire: Wire) -> None:
    """As ZeroMQ does when it reconnects: the handshake is done, and the program is elsewhere."""
    pieces = wire.pieces(subscribe=False)
    handshake = Handshake()
    states = [handshake.feed(piece) for piece in pieces]
    assert states == [False] * (len(pieces) - 1) + [True]
    assert handshake.subscribable


def test_a_client_that_has_subscribed_needs_nobody_else(wire: Wire) -> None:
    said = b"".join(wire.pieces())
    handshake = Handshake()
    assert handshake.feed(said)
    assert not handshake.subscribable


def test_pieces_of_any_size(wire: Wire) -> None:
    """Where the bytes are cut does not matter; the handshake ends with its last byte."""
    said = b"".join(wire.pieces(subscribe=False))
    for first in range(1, len(said)):
        handshake = Handshake()
        assert not handshake.feed(said[:first])
        assert handshake.feed(said[first:])
        assert handshake.subscribable


def test_a_socket_that_would_not_filter_is_left_alone(wire: Wire) -> None:
    handshake = Handshake()
    assert handshake.feed(b"".join(wire.pieces(zmq.XSUB, subscribe=False)))
    assert not handshake.subscribable


def test_an_encrypted_client_subscribes_itself(wire: Wire) -> None:
    """Nobody can speak for it, but when its part of the handshake is over can be seen."""
    public, secret = zmq.curve_keypair()
    wire.publisher.curve_server = True
    wire.publisher.curve_secretkey = secret
    ours = zmq.curve_keypair()
    pieces = wire.pieces(
        subscribe=False, curve_publickey=ours[0], curve_secretkey=ours[1], curve_serverkey=public
    )
    handshake = Handshake()
    assert [handshake.feed(piece) for piece in pieces][-2:] == [False, True]
    assert not handshake.subscribable


@pytest.mark.parametrize(
    "nonsense", [bytes(100), b"\xff" * 200, b"\x06" * 4096, b"GET / HTTP/1.1\r\n" * 10]
)
def test_nonsense_is_not_waited_for(nonsense: bytes) -> None:
    handshake = Handshake()
    assert handshake.feed(nonsense)
    assert not handshake.subscribable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def stream() -> Any:
    return object()


def awaited(listeners: Listeners) -> bool:
    return listeners.awaited


def test_requests_wait_for_who_was_lost() -> None:
    clock = Clock()
    listeners = Listeners(clock)
    listeners.launched()
    assert not awaited(listeners)  # nobody has listened so far
    listeners.lost()
    listeners.launched()
    assert awaited(listeners)
    back, other = stream(), stream()
    listeners.opened(back)
    listeners.opened(other)  # one more than there were
    assert awaited(listeners)
    assert listeners.settled(back)
    assert not awaited(listeners)
    assert not listeners.settled(other)


def test_who_does_not_come_back_is_not_waited_for_long() -> None:
    clock = Clock()
    listeners = Listeners(clock)
    listeners.lost()
    listeners.launched()
    clock.now += RETURN_LIMIT / 2
    assert awaited(listeners)
    clock.now += RETURN_LIMIT
    assert not awaited(listeners)
    listeners.launched()  # and at the next restart not at all
    assert not awaited(listeners)


def test_a_kernel_that_hangs_up_again_and_again_does_not_keep_requests_waiting() -> None:
    """As it does with a client that has the wrong key."""
    clock = Clock()
    listeners = Listeners(clock)
    listeners.launched()
    clock.now += RETURN_LIMIT + 1
    for _ in range(10):
        listeners.lost()
        assert not listeners.awaited
        listeners.opened(stream())
        assert not listeners.awaited


def test_a_client_that_leaves_while_it_waits_for_the_kernel() -> None:
    listeners = Listeners(Clock())
    listeners.lost()
    listeners.launched()
    left = stream()
    listeners.opened(left)
    assert listeners.settled(left)
    assert not listeners.awaited
