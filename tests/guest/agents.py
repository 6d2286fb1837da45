"""Real agents and connectors as processes, and a host that talks to them."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from sandbox_kernel.wire import VERSION
from sandbox_kernel.wire.codec import RAW
from sandbox_kernel.wire.connection import HostConnection
from sandbox_kernel.wire.fdlink import FdLink
from sandbox_kernel.wire.handshake import Hello, Refuse, Welcome
from sandbox_kernel.wire.mux import CONTROL, INTERACTIVE
from sandbox_kernel.wire.peer import Peer
from tests.wire.loops import Driver

LIMIT = 60.0
FROM_PACKAGE = [
    sys.executable,
    "-c",
    "import sys; from sandbox_kernel.guest.__main__ import main; sys.exit(main())",
]

# A "kernel": echoes on its five sockets what it is told, and ends when it is told so.
KERNEL = """
import json, os, socket, sys, threading
info = json.load(open(sys.argv[1]))
def serve(connection, channel):
    connection.sendall(channel.encode() + b"\\n")
    while True:
        data = connection.recv(65536)
        if data.startswith(b"exit "):
            os._exit(int(data[5:]))
        if not data:
            return
        connection.sendall(data)
def listen(channel):
    port = info[channel + "_port"]
    if info["transport"] == "ipc":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("%s-%d" % (info["ip"], port))
    else:
        listener = socket.socket()
        listener.bind((info["ip"], port))
    listener.listen(8)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, channel), daemon=True).start()
for channel in ("shell", "iopub", "stdin", "control", "hb"):
    threading.Thread(target=listen, args=(channel,), daemon=True).start()
print("kernel", info["key"], os.environ.get("GREETING"), os.getcwd(), flush=True)
threading.Event().wait()
"""


class AgentProcess:
    """An agent in a folder of its own; ``program`` is the command that runs the guest program."""

    def __init__(self, program: list[str] | None = None, lease: float = 600.0) -> None:
        self.program = program or FROM_PACKAGE
        # Not in pytest's folder: the path of a Unix socket is short.
        self.folder = tempfile.mkdtemp(prefix="sk-")
        self.log = Path(self.folder, "agent.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.program, "agent", self.folder, str(lease)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.connectors: list[subprocess.Popen[bytes]] = []

    def connect(self, kind: str = "socket", codec: str = RAW) -> tuple[int, int]:
        """Run a connector; the descriptors to read from and to write to."""
        command = [*self.program, "connect", self.folder, codec]
        if kind == "socket":
            ours, theirs = socket.socketpair()
            self.connectors.append(
                subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
            )
            theirs.close()
            fd = ours.detach()
            return fd, os.dup(fd)
        connector = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.connectors.append(connector)
        assert connector.stdout is not None
        assert connector.stdin is not None
        fds = os.dup(connector.stdout.fileno()), os.dup(connector.stdin.fileno())
        connector.stdout.close()
        connector.stdin.close()
        return fds

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(LIMIT)
        for connector in self.connectors:
            connector.wait(LIMIT)
        shutil.rmtree(self.folder)


class Host:
    """One host process's session with an agent, on a loop that runs while it is asked something."""

    def __init__(self, driver: Driver, agent: AgentProcess, session: str = "one") -> None:
        self.driver = driver
        self.agent = agent
        self.hello = Hello(VERSION, session, "token", 0, False, False)
        self.peer = Peer(driver.loop, host=True)
        self.lost: list[str] = []
        self.broken: list[str] = []
        self.peer.on_link_lost = self.lost.append
        self.peer.on_broken = self.broken.append
        self.events: list[dict[str, Any]] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._calls = 0
        self._control: Channel | None = None

    def connect(self, kind: str = "socket", codec: str = RAW, **changes: Any) -> Welcome | Refuse:
        """Make a link. If the agent refuses, it must also close the link."""
        link = FdLink(self.driver.loop, *self.agent.connect(kind, codec))
        connection = HostConnection(self.peer.mux, self.hello._replace(**changes), codec)
        answers: list[Any] = []
        lost: list[str] = []

        def received(data: bytes) -> None:
            connection.receive_data(data)
            if not answers:
                answers.extend(islice(connection.events(self.driver.loop.time()), 1))

        link.on_data = received
        link.on_lost = lost.append
        link.start()
        link.write(connection.data_to_send(link.room))
        self.driver.until(lambda: answers or lost, "no answer to HELLO")
        assert answers, f"link lost: {lost} {connection.banner!r}"
        (answer,) = answers
        if isinstance(answer, Refuse):
            self.driver.until(lambda: lost, "a refused link stays open")
            return answer
        assert isinstance(answer, Welcome)
        self.hello = self.hello._replace(resume=True)
        self.peer.attach(link, connection)
        return answer

    def call(self, name: str, **args: Any) -> Any:
        """A control call: its result, or a CallFailed."""
        if self._control is None:
            self._control = Channel(self, "control", CONTROL)
        self._calls += 1
        id_ = self._calls
        self._control.send(json.dumps({"id": id_, "call": name, "args": args}).encode() + b"\n")
        self.driver.until(lambda: self._read_control(id_), f"no answer to {name}")
        answer = self._answers.pop(id_)
        if "error" in answer:
            raise CallFailed(answer["error"]["kind"], answer["error"]["message"])
        return answer["result"]

    def event(self, limit: float = LIMIT) -> dict[str, Any]:
        """The next event of the agent's."""
        self.driver.until(lambda: self._read_control(0) or self.events, "no event", limit)
        return self.events.pop(0)

    def launch(self, *argv: str, transport: str = "ipc", **changes: Any) -> dict[str, Any]:
        """Launch the echo kernel, or another command."""
        request = {
            "argv": list(argv) or [sys.executable, "-c", KERNEL, "{connection_file}"],
            "env": {"GREETING": "hello"},
            "cwd": "/",
            "connection": {"key": "secret"},
            "transport": transport,
            **changes,
        }
        answer: dict[str, Any] = self.call("launch", **request)
        return answer

    def open(self, target: str) -> Channel:
        return Channel(self, target, INTERACTIVE)

    def _read_control(self, id_: int) -> bool:
        assert self._control is not None
        *lines, rest = bytes(self._control.got).split(b"\n")
        self._control.got[:] = rest
        for message in map(json.loads, lines):
            if "event" in message:
                self.events.append(message)
            else:
                self._answers[message["id"]] = message
        return id_ in self._answers

    def close(self) -> None:
        self.peer.detach()
        self.peer.mux.close()


class CallFailed(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Channel:
    """A stream that the host has opened, as its client sees it."""

    def __init__(self, host: Host, target: str, priority: int) -> None:
        self.got = bytearray()
        self.finished = False
        self.reset: str | None = None
        self._host = host
        self._stream = host.peer.mux.open(target, priority)
        self._stream.owner = self
        host.peer.flush_soon()

    def send(self, data: bytes) -> None:
        self._stream.write(data)
        self._host.peer.flush_soon()

    def finish(self) -> None:
        self._stream.finish()
        self._host.peer.flush_soon()

    def expect(self, data: bytes) -> None:
        """Wait for exactly these bytes."""
        self._host.driver.until(
            lambda: len(self.got) >= len(data) or self.ended, f"got {bytes(self.got[:100])!r}"
        )
        assert bytes(self.got[: len(data)]) == data
        del self.got[: len(data)]

    @property
    def ended(self) -> bool:
        return self.finished or self.reset is not None

    def wait_ended(self) -> None:
        self._host.driver.until(lambda: self.ended, "the stream does not end")

    def on_data(self, payload: Any) -> None:
        self.got += payload
        self._stream.consumed(len(payload))
        self._host.peer.flush_soon()

    def on_finished(self) -> None:
        self.finished = True
        self.finish()

    def on_reset(self, reason: str) -> None:
        self.reset = reason

    def on_room(self) -> None:
        pass


def read_to_end(fd: int) -> bytes:
    """Everything until the far end closes; it must within LIMIT."""
    data = b""
    while select.select([fd], [], [], LIMIT)[0]:
        try:
            piece = os.read(fd, 65536)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece
    raise AssertionError("the stream does not end")


NewHost = Callable[..., Host]
"""Makes a host with a session of its own, of a given name, that is not connected yet."""
