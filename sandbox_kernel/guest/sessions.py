"""Sessions: which host this agent talks to.

The first host to say HELLO sets the token; later ones must know it. A new session replaces the
present one. ``rekey`` replaces the token, if this agent is a copy.
"""

import hmac
import socket
from collections import deque
from typing import Any, Callable, Deque, List, Optional

from ..wire import VERSION, WireError
from ..wire.connection import AgentConnection
from ..wire.fdlink import FdLink
from ..wire.handshake import Hello
from ..wire.peer import Peer
from .direct_clients import Carrier
from .loop import Loop
from .rekey import is_request, reseed
from .targets import Targets

MAX_STRANGERS = 4


class Sessions:
    """At most one session is in use; ``targets`` serves its streams."""

    def __init__(self, loop: Loop, targets: Targets) -> None:
        self.name = ""
        """Name of the sandbox, if ``rekey`` has set one."""
        self.on_copied: Callable[[], object] = lambda: None
        """Called when this sandbox has become a copy of another one."""
        self.on_ended: Callable[[], object] = lambda: None
        """Called when a session is over, before its streams are forgotten."""
        self._loop = loop
        self._targets = targets
        self._attached_at = loop.time()
        self._token: Optional[str] = None
        self._id = ""
        self._superseded: Deque[str] = deque(maxlen=64)
        self._peer: Optional[Peer] = None
        self._carrier: Optional[Carrier] = None
        self._strangers: List[Carrier] = []  # carriers that have not said whose they are

    @property
    def peer(self) -> Optional[Peer]:
        """The present session's; None if there is none. Its link may be down."""
        return self._peer

    def check_alive(self) -> float:
        """Give up a dead link; return for how many seconds no host has been attached."""
        if self._peer is not None and self._peer.link is not None:
            self._attached_at = self._loop.time()
            self._peer.check_alive()
        return self._loop.time() - self._attached_at

    def hello(self, hello: Hello, link: FdLink, connection: AgentConnection) -> None:
        """Answer the HELLO of a link, and go on over it."""
        refusal = self._refusal(hello)
        if refusal:
            connection.refuse(refusal)
            link.write(connection.data_to_send(link.room))
            link.close()
            return
        peer = self._peer
        if peer is None or hello.session != self._id:
            peer = self._begin(hello.session)
        self._attached_at = self._loop.time()
        try:
            connection.accept(peer.mux, hello, self._loop.time())
        except WireError as error:
            link.write(connection.data_to_send(link.room))
            link.close()
            return self._broken(str(error))
        peer.attach(link, connection)

    def rekey(self, request: Any) -> str:
        """Make this copy of an agent another one: it leaves the original's session to the original
        and takes a token, a name and random numbers of its own. Return "ok", or why not."""
        if not is_request(request):
            return "malformed"
        known = self._token
        if known is None or not hmac.compare_digest(known.encode(), request["token"].encode()):
            return "token"
        reseed(bytes.fromhex(request["entropy"]))
        self.on_copied()
        self._token = request["new_token"]
        self.name = request["name"]
        if self._peer is not None:
            self._broken("this is the sandbox %r now" % self.name)
        self._superseded.clear()
        self._attached_at = self._loop.time()
        return "ok"

    def _refusal(self, hello: Hello) -> str:
        if hello.version != VERSION:
            return "version"
        if self._token is None:
            self._token = hello.token
        if not hmac.compare_digest(self._token.encode(), hello.token.encode()):
            return "token"
        if hello.session in self._superseded:
            return "superseded"
        if hello.resume and hello.session != self._id:
            return "unknown-session"
        return ""

    def carry(self, fd: int) -> None:
        """A host wants to hand over its clients' connections through this socket."""
        while len(self._strangers) >= MAX_STRANGERS:
            self._strangers[0].close()
        own = (self._loop, socket.socket(fileno=fd), self._targets)
        self._strangers.append(Carrier(*own, self._admits, self._strangers.remove))

    def _admits(self, carrier: Carrier, request: Any) -> bool:
        """Whether a carrier is that of the present session's host, which has one at most."""
        known = self._token or ""
        if not isinstance(request, dict) or not known or request.get("session") != self._id:
            return False
        if not hmac.compare_digest(known.encode(), str(request.get("token")).encode()):
            return False
        if self._carrier is not None:
            self._carrier.close()
        self._carrier = carrier
        return True

    def _begin(self, session_id: str) -> Peer:
        self._end()
        if self._id:
            self._superseded.append(self._id)
        self._id = session_id
        self._peer = peer = Peer(self._loop, host=False)
        peer.on_opened = lambda stream, target: self._targets.open(peer, stream, target)
        peer.on_broken = self._broken
        return peer

    def _broken(self, why: str) -> None:
        print("agent: the session is over:", why, flush=True)
        self._end()
        self._peer = None
        self._id = ""

    def _end(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None
        if self._peer is not None:
            self._peer.detach()
            self._targets.close()
            self.on_ended()
            self._peer.mux.close()
