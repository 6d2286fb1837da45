"""The agent's Unix socket: where connectors hand over their stdin and stdout.

Anything in the sandbox may connect to it. A connection counts only when its host has said HELLO
over the descriptors; the token decides the rest (``sessions``). ``rekey`` requests come here, too.
"""

import json
import os
import socket
from typing import Any, List, Optional

from ..wire import WireError
from ..wire.codec import CODECS
from ..wire.connection import AgentConnection
from ..wire.descriptors import close_all, receive_with_descriptors
from ..wire.fdlink import FdLink
from ..wire.handshake import Hello
from .connector import CLIENTS, SOCKET
from .loop import Loop
from .rekey import MAX_REQUEST
from .sessions import Sessions

HELLO_TIMEOUT = 30.0
MAX_GREETERS = 16
"""Connections without a HELLO that are kept; the oldest is closed for another."""
_ACCEPT_PAUSE = 1.0


class AgentSocket:
    """Listens from its creation on."""

    def __init__(self, loop: Loop, folder: str, sessions: Sessions) -> None:
        self.sessions = sessions
        self._loop = loop
        self._greeters: List[_Greeter] = []
        self._path = os.path.join(folder, SOCKET)
        os.makedirs(folder, 0o700, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path + ".new")
        os.chmod(self._path + ".new", 0o600)
        self._listener.listen(16)
        self._listener.setblocking(False)
        # A connector that finds the socket must find it listening.
        os.rename(self._path + ".new", self._path)
        self._watch()

    def close(self) -> None:
        os.unlink(self._path)
        self._listener.close()

    def _watch(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # No descriptor is left for it, and trying again at once would not help.
            print("agent: a connector must wait:", error, flush=True)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_ACCEPT_PAUSE, self._watch)
            return
        if len(self._greeters) >= MAX_GREETERS:
            self._greeters[0].close()
        self._greeters.append(_Greeter(self, self._loop, connection))

    def done(self, greeter: "_Greeter") -> None:
        self._greeters.remove(greeter)

    def rekey(self, request: Any) -> str:
        answer = self.sessions.rekey(request)
        if answer == "ok":
            for greeter in list(self._greeters):
                greeter.close()
        return answer


class _Greeter:
    """A connection that waits for its descriptors, then for its host's HELLO."""

    def __init__(self, owner: AgentSocket, loop: Loop, sock: socket.socket) -> None:
        self._owner = owner
        self._loop = loop
        self._sock = sock
        self._link: Optional[FdLink] = None
        self._done = False
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._request)
        self._timer = loop.call_later(HELLO_TIMEOUT, self.close)

    def close(self) -> None:
        if not self._done:
            self._finish()
            if self._link is not None:
                self._link.close()
            else:
                self._close_socket()

    def _finish(self) -> None:
        self._done = True
        self._timer.cancel()
        self._owner.done(self)

    def _request(self) -> None:
        try:
            message, fds = receive_with_descriptors(self._sock, MAX_REQUEST + 64, 2)
        except BlockingIOError:
            return
        except OSError:
            return self.close()
        try:
            request = json.loads(message)
            if not fds and "rekey" in request:
                return self._rekey(request["rekey"])
            codec = request["codec"]
            if len(fds) != 2 or codec not in (*CODECS, CLIENTS):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            close_all(fds)
            return self.close()
        if codec == CLIENTS:
            os.close(fds[1])
            self._owner.sessions.carry(fds[0])
            return self.close()
        self._connection = AgentConnection(codec)
        self._loop.remove_reader(self._sock.fileno())
        # From here on the socket only shows that the connector lives.
        self._loop.add_reader(self._sock.fileno(), self._connector_gone)
        self._link = link = FdLink(self._loop, fds[0], fds[1])
        link.on_data = self._received
        link.on_lost = lambda why: self.close()
        link.on_closed = self._close_socket
        link.start()

    def _rekey(self, request: Any) -> None:
        self._finish()  # first, so that re-keying does not close it with the other greeters
        answer = self._owner.rekey(request)
        if answer != "ok":
            print("agent: re-keying was refused:", answer, flush=True)
        try:
            self._sock.send(answer.encode() + b"\n")
        except OSError as error:
            print("agent: nobody read the answer to re-keying:", error, flush=True)
        self._close_socket()

    def _received(self, data: bytes) -> None:
        link = self._link
        assert link is not None
        try:
            self._connection.receive_data(data)
            for event in self._connection.events(self._loop.time()):
                assert isinstance(event, Hello)
                self._finish()
                return self._owner.sessions.hello(event, link, self._connection)
        except WireError as error:
            print("agent: a link was refused:", error, flush=True)
            self.close()

    def _connector_gone(self) -> None:
        if self._link is not None and not self._link.closed:
            lost = self._link.on_lost
            self._link.close()
            lost("the connector has ended")

    def _close_socket(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
