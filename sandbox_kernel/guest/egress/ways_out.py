"""Ways out: sockets in the sandbox whose connections become streams to the host.

A proxy, for programs that know of one; and for the others a DNS server, which gives each name that
the host's rules may permit an address of its own, and listeners at those addresses. What passes is
decided on the host: here it is only carried. The targets of the streams:

    egress:proxy           a connection to the proxy
    egress:tcp:PORT:NAME   a connection to the address that stands for a name
    egress:ports:NAME      a question: on which ports may that name be reached?
"""

import json
import resource
import socket
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ...wire.frames import Buffer
from ...wire.half_close import HalfClosePump
from ...wire.mux import BULK, Stream
from ...wire.peer import Peer
from ...wire.pump import Pump
from ..loop import Loop
from . import dns
from .address_book import MOST_NAMES, AddressBook
from .allowance import Allowance

PRIORITY = BULK + 1
MOST_CONNECTIONS = 256
_MOST_QUESTIONS = 64
_MOST_LISTENERS = 2 * MOST_NAMES
_BACKLOG = 128
_QUESTION_TIMEOUT = 10.0
_PAUSE = 0.1
_LOOPBACK = "127.0.0.1"
_DNS_PORT = 53


class WaysOut:
    """Belongs to the agent. ``peer`` gives the present session's, or None if there is none."""

    def __init__(self, loop: Loop, peer: "Callable[[], Optional[Peer]]") -> None:
        self._loop = loop
        self._peer = peer
        self._book = AddressBook()
        self._listeners: Dict[Tuple[str, int], socket.socket] = {}
        self._pumps: Set[Pump] = set()
        self._questions: Set[_Question] = set()
        self._names: Optional[socket.socket] = None
        self._known: Dict[str, float] = {}  # names that may be reached, and until when that holds
        self._allowance = Allowance(loop.time)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_listeners = min(_MOST_LISTENERS, files // 2)  # the agent needs some, too

    def open(self, proxy: int) -> Dict[str, Any]:
        """Open the proxy's port and, where this process may, the DNS server. OSError if the proxy's
        port is taken. What is open stays open; a provider may have put another resolver into a
        sandbox that it has copied."""
        if (_LOOPBACK, proxy) not in self._listeners:
            self._listen(_LOOPBACK, proxy)
            self._open_names()
        if self._names is not None:
            _use_resolver()
        return {"proxy": proxy, "names": self._names is not None and _uses_resolver()}

    def end_session(self) -> None:
        """The host has gone: nobody decides any more, so nothing passes."""
        for pump in list(self._pumps):
            pump.close("the session is over")
        for question in list(self._questions):
            question.settle(None)

    # --- connections

    def _listen(self, address: str, port: int) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        self._listeners[address, port] = sock
        self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        if not self._allowance.take():  # those who wait are in the listener's queue
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(
                _PAUSE, self._loop.add_reader, listener.fileno(), self._accept, listener
            )
            return
        try:
            sock, _ = listener.accept()
            # What the host sends is meant to arrive now, in whatever pieces it comes.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            return  # it has gone again
        target, peer = self._target(sock), self._peer()
        if not target or peer is None or len(self._pumps) >= MOST_CONNECTIONS:
            return sock.close()
        stream = peer.mux.open(target, PRIORITY)
        pump = _Connection(self._loop, peer, stream, sock, self._pumps.discard)
        pump.on_first_data = self._allowance.give_back
        self._pumps.add(pump)
        peer.flush_soon()

    def _target(self, sock: socket.socket) -> str:
        """What a connection is meant for, by the address that was dialled."""
        try:
            address, port = sock.getsockname()
        except OSError:
            return ""
        name = self._book.name_at(address)
        if name is not None:
            return "egress:tcp:%d:%s" % (port, name)
        return "egress:proxy" if (address, port) in self._listeners else ""

    # --- names

    def _open_names(self) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sock.bind((_LOOPBACK, _DNS_PORT))
        except OSError:  # not allowed, or the sandbox has one: programs can use the proxy
            return sock.close()
        sock.setblocking(False)
        self._names = sock
        self._loop.add_reader(sock.fileno(), self._asked, sock)

    def _asked(self, sock: socket.socket) -> None:
        try:
            message, sender = sock.recvfrom(dns.MAX_MESSAGE)
        except OSError:
            return
        query = dns.parse(message)
        if query is None:
            return
        reply = partial(self._reply, sock, sender, query)
        peer = self._peer()
        if not dns.is_name(query.name):
            reply(dns.NO_SUCH_NAME)
        elif query.kind not in (dns.A, dns.AAAA):
            reply(dns.NO_ERROR)  # "no such name" would be said of its addresses, too
        elif self._known.get(query.name, 0.0) > self._loop.time():
            self._found(query, reply)
        elif peer is None or len(self._questions) >= _MOST_QUESTIONS or not self._allowance.take():
            reply(dns.SERVER_FAILED)
        else:
            stream = peer.mux.open("egress:ports:" + query.name, PRIORITY)
            question = _Question(stream, partial(self._told, query, reply))
            self._questions.add(question)
            question.on_settled = self._questions.discard
            self._loop.call_later(_QUESTION_TIMEOUT, question.settle, None)
            stream.finish()
            peer.flush_soon()

    def _told(
        self, query: dns.Query, reply: "Callable[..., None]", ports: "Optional[List[int]]"
    ) -> None:
        """The host has answered: None if it could not."""
        if not ports:
            return reply(dns.SERVER_FAILED if ports is None else dns.NO_SUCH_NAME)
        address = self._book.address_of(query.name)
        if address is None:
            return reply(dns.SERVER_FAILED)
        if not all(self._listen_for(address, port) for port in ports):
            return reply(dns.SERVER_FAILED)
        self._known[query.name] = self._loop.time() + dns.LIFE
        self._found(query, reply)

    def _found(self, query: dns.Query, reply: "Callable[..., None]") -> None:
        address = self._book.address_of(query.name)
        assert address is not None
        reply(dns.NO_ERROR, socket.inet_aton(address) if query.kind == dns.A else None)

    def _listen_for(self, address: str, port: int) -> bool:
        """Listen at a name's address. False if there are too many listeners already."""
        if (address, port) in self._listeners:
            return True
        if len(self._listeners) >= self._most_listeners:
            return False
        try:
            self._listen(address, port)
        except OSError as error:  # a low port, where that is not allowed
            print("agent: no way out at port %d: %s" % (port, error), flush=True)
        return True

    @staticmethod
    def _reply(
        sock: socket.socket,
        sender: Any,
        query: dns.Query,
        code: int,
        address: Optional[bytes] = None,
    ) -> None:
        try:
            sock.sendto(dns.answer(query, code, address), sender)
        except OSError:
            pass  # who asked has gone


def _use_resolver() -> None:
    """In a sandbox with files of its own. A jail's file cannot be written, and says so already."""
    try:
        with open("/etc/resolv.conf", "w") as file:
            file.write("nameserver 127.0.0.1\noptions timeout:15 attempts:1\n")
    except OSError:
        pass


class _Connection(HalfClosePump):
    """A program's connection; ``on_first_data`` is called when it has sent something."""

    on_first_data: "Optional[Callable[[], object]]" = None

    def _received(self, data: Buffer) -> Buffer:
        if self.on_first_data is not None:
            self.on_first_data()
            self.on_first_data = None
        return data


def _uses_resolver() -> bool:
    """Whether programs that look up names come here first."""
    try:
        with open("/etc/resolv.conf") as file:
            words = [line.split() for line in file.read(4096).splitlines()]
    except (OSError, ValueError):
        return False
    servers = [line[1] for line in words if line[:1] == ["nameserver"] and len(line) > 1]
    return servers[:1] == [_LOOPBACK]


class _Question:
    """A stream on which the host answers with a list of ports."""

    def __init__(
        self, stream: Stream, on_answer: "Callable[[Optional[List[int]]], object]"
    ) -> None:
        self.on_settled: "Callable[[_Question], object]" = lambda question: None
        self._stream = stream
        self._on_answer: "Optional[Callable[[Optional[List[int]]], object]]" = on_answer
        self._data = b""
        stream.owner = self

    def settle(self, ports: "Optional[List[int]]") -> None:
        answer, self._on_answer = self._on_answer, None
        if answer is not None:
            self.on_settled(self)
            answer(ports)
            self._stream.reset("answered")

    def on_data(self, payload: Buffer) -> None:
        self._data += bytes(payload)
        self._stream.consumed(len(payload))

    def on_finished(self) -> None:
        self.settle([int(port) for port in json.loads(self._data)])

    def on_reset(self, reason: str) -> None:
        self.settle(None)

    def on_room(self) -> None:
        """Nothing is written to the stream."""
