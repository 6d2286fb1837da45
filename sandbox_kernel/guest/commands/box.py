"""Process 1 of a BoxLite box. ``process_one.py`` says what it serves.

BoxLite runs it as the box's main command, so the VM powers off when it ends; the exit code says
why. The host reaches it through connectors: commands that BoxLite runs in the box, which hand
their stdin and stdout to this process and then only wait. Each connector is a link of its own with
a session of the wire of its own, in base64 because BoxLite decodes output as text. When a link
breaks, the commands that its host opened are ended.

A request is a stream with the target ``request``. An ``exec`` has more streams, ``stdio:N`` and
``stderr:N``, where N is the id of the request's stream. Requests of the box:

    {"kind": "configure", "lease": 3600.0, "env": {...}, "workdir": "/workspace"}
    {"kind": "logs"}                                                         {"log": text}
    {"kind": "stop"}    answered when all has ended                          {"log": text}
    (after an exec)  {"resize": [rows, columns]}
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from functools import partial

from ...wire.codec import BASE64
from ...wire.connection import Connection
from ...wire.descriptors import close_all, receive_with_descriptors
from ...wire.fdlink import LINK_BUFFER, FdLink
from ...wire.peer import Peer
from .box_connector import ADDRESS
from .process_one import STOP_GRACE, Child, ProcessOne, RequestConnection, RequestError
from .start import close_inherited, process_stat, running_pids, signal_process
from .stdio import CommandInput, CommandOutput, Ends

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ...wire.frames import Buffer
    from ...wire.mux import Stream
    from ..loop import Loop

EXIT_CODES = {"stop": 80, "lease": 81, "main": 82}
"""Why the box has ended, for the host."""
REQUEST, STDIO, STDERR = "request", "stdio", "stderr"
MAX_COMMANDS = 512
_LOG_TAIL = 256 * 1024
_UNCONFIGURED_LEASE = 600.0
_CONNECT_TIMEOUT = 5.0
_LAST_WORDS = 0.1
"""Seconds for BoxLite's own agent to take the last bytes out of a pipe."""


class CommandStream:
    """A stream of the wire that carries a command's stdin and stdout, or its stderr."""

    def __init__(self, peer: Peer, stream: Stream) -> None:
        self._peer = peer
        self._stream = stream
        self._output: CommandOutput | None = None
        self.input: CommandInput | None = None
        stream.owner = self

    def carry_input(self, loop: Loop, fd: int, *, terminal: bool) -> None:
        self.input = CommandInput(loop, fd, self._taken, terminal=terminal)

    def carry_output(self, loop: Loop, fd: int, on_end: Callable[[], object]) -> None:
        def ended() -> None:
            self._stream.finish()
            self._peer.flush_soon()
            on_end()

        self._output = CommandOutput(loop, fd, self._read, ended)

    @property
    def over(self) -> bool:
        """Whether the output has ended."""
        return self._output is None or self._output.closed

    def close(self) -> None:
        for end in (self.input, self._output):
            if end is not None:
                end.close()
        self._stream.reset("the command is over")
        self._peer.flush_soon()

    def _read(self, data: bytes) -> None:
        assert self._output is not None
        self._stream.write(data)
        self._peer.flush_soon()
        if self._stream.full:
            self._stream.waiting = True
            self._output.pause()

    def _taken(self, size: int) -> None:
        self._stream.consumed(size)
        self._peer.flush_soon()

    def on_room(self) -> None:
        if self._output is not None:
            self._output.resume()

    def on_data(self, payload: Buffer) -> None:
        if self.input is None:
            self._taken(len(payload))
        else:
            self.input.write(bytes(payload))

    def on_finished(self) -> None:
        if self.input is not None:
            self.input.end()

    def on_reset(self, reason: str) -> None:
        self.close()


class StreamConnection(RequestConnection):
    """A request on a stream of the wire, with the streams of its command."""

    def __init__(
        self, box: BoxInit, peer: Peer, stream: Stream, on_closed: Callable[[], object]
    ) -> None:
        super().__init__()
        self._box = box
        self._peer = peer
        self._stream = stream
        self._on_closed = on_closed
        self._ends: Ends | None = None
        self._terminal = self._exited = False
        self.streams: dict[str, CommandStream] = {}
        stream.owner = self

    def answer(self, **message: Any) -> None:
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._peer.flush_soon()

    def open_streams(self, request: dict[str, Any], log: int) -> Sequence[int]:
        if STDIO not in self.streams:
            raise RequestError("EINVAL", "an exec needs its stream 'stdio'")
        self._terminal = bool(request.get("tty"))
        stderr = -1 if STDERR in self.streams else log
        self._ends = Ends(request.get("tty"), stderr=stderr)
        return self._ends.theirs

    def started(self, pid: int) -> None:
        ends, self._ends = self._ends, None
        assert ends is not None
        ends.close_theirs()
        loop = self._box.loop
        self.streams[STDIO].carry_input(loop, ends.stdin, terminal=self._terminal)
        for name, fd in zip((STDIO, STDERR), ends.outputs):
            self.streams[name].carry_output(loop, fd, self._finish_if_over)
        self.answer(pid=pid)

    def release(self) -> None:
        if self._ends is not None:
            self._ends.close()
            self._ends = None

    def ended(self, code: int) -> None:
        super().ended(code)
        self._exited = True
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        """Tell the host that nothing more comes, and that nobody reads stdin any more."""
        if self._exited and all(stream.over for stream in self.streams.values()):
            self._stream.finish()
            self._peer.flush_soon()

    def resize(self, rows: int, columns: int) -> None:
        stdin = self.streams[STDIO].input
        if stdin is not None:
            stdin.resize(rows, columns)

    def close(self) -> None:
        self.close_streams()
        self._stream.finish()
        self._peer.flush_soon()
        self._on_closed()

    def close_streams(self) -> None:
        for stream in self.streams.values():
            stream.close()

    def on_data(self, payload: Buffer) -> None:
        self._stream.consumed(len(payload))
        if not self._box.take(self, bytes(payload)):
            self._stream.reset("a request that is too long")
            self._box.hang_up(self)

    def on_finished(self) -> None:
        self._box.hang_up(self)

    def on_reset(self, reason: str) -> None:
        self._box.hang_up(self)

    def on_room(self) -> None:
        """Answers are short; nothing waits for room."""


class HostLink:
    """One link to a host, with its requests. In the list of the box until it is lost."""

    def __init__(self, box: BoxInit, sock: socket.socket, pid: int, fds: Sequence[int]) -> None:
        self.connector = pid
        box.links.append(self)
        self._box = box
        self._sock = sock
        self._link = FdLink(box.loop, fds[0], fds[1])
        self._peer = peer = Peer(box.loop, host=False)
        self._connections: dict[int, StreamConnection] = {}
        peer.on_opened = self._opened
        peer.on_link_lost = peer.on_broken = self._lost
        connection = Connection.without_handshake(peer.mux, BASE64, peer.clock())
        peer.attach(self._link, connection)
        self._link.start()

    @property
    def silent(self) -> bool:
        """Whether nothing waits to be sent."""
        waiting = any(stream.buffered for stream in self._peer.mux.streams.values())
        return not waiting and self._link.room == LINK_BUFFER

    def _opened(self, stream: Stream, target: str) -> None:
        kind, _, number = target.partition(":")
        if kind == REQUEST:
            forget = partial(self._connections.pop, stream.id, None)
            connection = StreamConnection(self._box, self._peer, stream, forget)
            self._connections[stream.id] = connection
        elif kind in (STDIO, STDERR) and int(number) in self._connections:
            self._connections[int(number)].streams[kind] = CommandStream(self._peer, stream)
        else:
            stream.reset(f"there is no {target!r} here")

    def _lost(self, why: str) -> None:
        """The host is gone, and with it the commands that it watched."""
        self._box.links.remove(self)
        self._sock.close()
        for connection in list(self._connections.values()):
            self._box.hang_up(connection)
        self._peer.mux.close()


class BoxInit(ProcessOne):
    """Process 1 of a box."""

    name = "box"
    log_limit = 2**20

    def __init__(self) -> None:
        log = os.memfd_create("log")
        fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
        super().__init__(log=log, lease=_UNCONFIGURED_LEASE, environ=dict(os.environ))
        self._log = log
        self._workdir = "/"
        self._ending = False
        self._stop_requests: list[RequestConnection] = []
        self.links: list[HostLink] = []
        self.kinds.update(configure=self._configure, logs=self._logs)
        stop = partial(self.loop.call_soon, self.stop, "stop", "it was stopped")
        signal.signal(signal.SIGTERM, lambda *_: stop())
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(ADDRESS)
        self._listener.listen(16)
        self._listener.setblocking(False)
        self.loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(_CONNECT_TIMEOUT)
        fds: list[int] = []
        try:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid = struct.unpack("3i", credentials)[0]
            # Only BoxLite's own commands have a parent outside of this PID namespace.
            if process_stat(pid)[1:2] != ["0"]:
                raise OSError(errno.EPERM, "not a command of the host's")
            _, fds = receive_with_descriptors(sock, 64, 2)
            if len(fds) != 2:
                raise OSError(errno.EINVAL, "no streams")
        except OSError:
            close_all(fds)
            sock.close()
        else:
            HostLink(self, sock, pid, fds)

    # --- requests

    def _configure(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        self.environ.update(request["env"])
        self._workdir = request["workdir"]
        os.makedirs(self._workdir, exist_ok=True)
        self.set_lease(float(request["lease"]))
        connection.answer(python=sys.version.split()[0])

    def _logs(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        connection.answer(log=self._log_tail(self.log_limit))

    def _log_tail(self, size: int) -> str:
        found = os.pread(self._log, 2 * self.log_limit, 0)
        return found[-size:].decode(errors="replace")

    def follow_up(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        if "resize" in request:
            assert isinstance(connection, StreamConnection)
            connection.resize(*request["resize"])
        else:
            super().follow_up(connection, request)

    def start(self, child: Child, request: dict[str, Any], streams: Sequence[int]) -> int:
        if self.stopping[0]:
            raise OSError(errno.ESHUTDOWN, "the box is being stopped")
        if len(self.children) >= MAX_COMMANDS:
            raise OSError(errno.EAGAIN, f"more than {MAX_COMMANDS} commands at once")
        cwd = request.get("cwd") or self._workdir
        return super().start(child, {**request, "cwd": cwd}, streams)

    def hang_up(self, connection: RequestConnection) -> None:
        assert isinstance(connection, StreamConnection)
        connection.close_streams()
        if connection.pid and connection.pid not in self.children and not connection.hung_up:
            # The command has ended; what it left running goes on.
            connection.hung_up = True
            return self.close_connection(connection)
        super().hang_up(connection)

    # --- the end

    def _stop_request(self, connection: RequestConnection, request: dict[str, Any]) -> None:
        self._stop_requests.append(connection)
        self.stop("stop", "it was stopped")

    def over(self, kind: str, reason: str) -> None:
        self.stop(kind, reason)

    def signal_all(self, number: int) -> None:
        connectors = {link.connector for link in self.links}
        for pid in running_pids():
            if pid not in connectors:
                signal_process(pid, number)

    def end(self, kind: str, reason: str) -> None:
        if self._ending:
            return
        self._ending = True
        self.signal_all(signal.SIGKILL)
        self.take_log()
        self.log(f"the sandbox ends: {reason}")
        for connection in self._stop_requests:
            connection.answer(log=self._log_tail(_LOG_TAIL))
        os.sync()
        self._leave(EXIT_CODES[kind], self.loop.time() + STOP_GRACE)

    def _leave(self, code: int, limit: float) -> None:
        """Exit when the host has the last answers."""
        if self.loop.time() < limit and not all(link.silent for link in self.links):
            self.loop.call_later(0.02, self._leave, code, limit)
        else:
            self.loop.call_later(_LAST_WORDS, partial(os._exit, code))


def main() -> None:
    if os.getpid() != 1:
        sys.exit("This ends all processes that it sees, so it runs as process 1 of a box only.")
    close_inherited()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    BoxInit().loop.run()
