"""The recorder in the sandbox keeps what a kernel publishes, as a real ZMQ socket publishes it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from sandbox_kernel.errors import ProtocolError
from sandbox_kernel.guest.loop import Loop
from sandbox_kernel.guest.recorder import Recorder
from sandbox_kernel.recordings import Recording, parse_recording
from sandbox_kernel.wire.peer import Peer

PATIENCE = 30.0


class Publisher:
    """A kernel's output socket, and a recorder that listens to it."""

    def __init__(self, folder: Path, kind: int = zmq.XPUB, **options: Any) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.path = str(folder / "s")
        self.running = True
        self.loop = Loop()
        self.recorder = Recorder(self.loop, self._connect, lambda: self.running)

    def bind(self) -> None:
        self.socket.bind(f"ipc://{self.path}")

    def subscribed(self) -> None:
        """Turn the loop until the recorder has subscribed."""
        assert self._until(lambda: self.socket.poll(0)), self.recorder.status()
        assert self.socket.recv() == b"\x01"

    def publish(self, *messages: list[bytes]) -> None:
        """Publish, and turn the loop until the recorder has numbered all that."""
        goal = self.recorder.status()["next"] + len(messages)
        for message in messages:
            self.socket.send_multipart(message)
        assert self._until(lambda: self.recorder.status()["next"] >= goal), self.recorder.status()

    def recorded(self, since: int = 0) -> Recording:
        """As a host gets it."""
        written: list[bytes] = []
        stream = type(
            "Stream", (), {"write": written.append, "finish": lambda: None, "owner": None}
        )
        self.recorder.send(Peer(self.loop, host=False), stream, since)  # type: ignore[arg-type]
        return parse_recording(b"".join(written), "test")

    def close(self) -> None:
        self.recorder.start(0)
        self.context.destroy(linger=0)

    def _connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self.path)
        except OSError:
            sock.close()
            return None
        return sock

    def _until(self, condition: Any) -> bool:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.loop.call_later(0.01, lambda: None)
            self.loop._turn()
            if condition():
                return True
        return False


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path)
    made.recorder.start(1000)
    yield made
    made.close()


def test_messages_are_kept_whole_and_in_order(publisher: Publisher) -> None:
    """Also empty parts, and parts that need ZMTP's long frames; the kernel may come later."""
    publisher.bind()
    publisher.subscribed()
    messages = [[b"topic", b"", b"x" * 300], [b"one"], [os.urandom(200), b"end"]]
    publisher.publish(*messages)
    assert publisher.recorded() == Recording(0, messages)
    assert publisher.recorded(since=2) == Recording(2, messages[2:])
    assert publisher.recorded(since=99) == Recording(3, [])


def test_the_oldest_make_room(publisher: Publisher) -> None:
    """What is lost is known by the numbers of what is left."""
    publisher.bind()
    publisher.subscribed()
    publisher.publish(*[[b"%d" % i * 150] for i in range(10)])
    kept = publisher.recorded()
    assert kept.next == 10
    assert 0 < kept.first < 10
    assert kept.messages[-1] == [b"9" * 150]


def test_a_message_that_is_too_big(publisher: Publisher) -> None:
    """It is not kept, nor what came before; what follows is."""
    publisher.bind()
    publisher.subscribed()
    publisher.publish([b"before"], [b"a", b"x" * 5000, b"b" * 300], [b"after"])
    assert publisher.recorded() == Recording(2, [[b"after"]])


def test_a_kernel_that_starts_anew(publisher: Publisher) -> None:
    """The numbers go on."""
    publisher.bind()
    publisher.subscribed()
    publisher.publish([b"old"])
    publisher.socket.close(linger=0)
    publisher.socket = publisher.context.socket(zmq.XPUB)
    Path(publisher.path).unlink(missing_ok=True)
    publisher.bind()
    publisher.recorder.launched()
    publisher.subscribed()
    publisher.publish([b"new"])
    assert publisher.recorded() == Recording(0, [[b"old"], [b"new"]])


def test_a_kernel_that_encrypts(tmp_path: Path) -> None:
    """It cannot be recorded, and that is said."""
    public, secret = zmq.curve_keypair()
    publisher = Publisher(
        tmp_path, curve_server=True, curve_publickey=public, curve_secretkey=secret
    )
    publisher.bind()
    publisher.recorder.start(1000)
    assert publisher._until(lambda: publisher.recorder.status()["problem"])
    assert (
        publisher.recorded().problem
        == "the kernel's output socket does not speak plain ZMTP 3; is it encrypted?"
    )
    publisher.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]\n",
        b"{}\n",
        b'{"first": -1, "problem": ""}\n',
        b'{"first": 0, "problem": ""}',
        b'{"first": 0, "problem": ""}\n\0\0\0',
        b'{"first": 0, "problem": ""}\n\xff\xff\xff\xff',
        b'{"first": 0, "problem": ""}\n\0\0\0\1\xff\xff\xff\xffx',
        b"[" * 100000,
    ],
)
def test_a_recording_that_lies(data: bytes) -> None:
    """The host refuses what no recorder sends."""
    with pytest.raises(ProtocolError, match="cannot be read"):
        parse_recording(data, "test")
