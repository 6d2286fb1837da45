"""One side of a connection without any I/O, for the tests of the wire."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_kernel.wire import VERSION
from sandbox_kernel.wire.codec import CODECS, PREAMBLE, RAW
from sandbox_kernel.wire.connection import AgentConnection, HostConnection
from sandbox_kernel.wire.frames import Buffer, Frame, FrameDecoder
from sandbox_kernel.wire.handshake import Hello, Welcome, encode_message
from sandbox_kernel.wire.mux import DEFAULT_WINDOW, Data, Event, Mux
from sandbox_kernel.wire.session import Session

PLENTY = 2**30


class Side:
    """Session and multiplexer, driven as ``Peer`` drives them; no clock: it is always 0."""

    def __init__(self, *, host: bool, window: int = DEFAULT_WINDOW) -> None:
        self.session = Session()
        self.mux = Mux(self.session, host=host, window=window)
        self.attach(0)

    def attach(self, peer_received: int, codec: str = RAW, *, checked: bool = True) -> None:
        self.session.attach(peer_received, 0.0, checked=checked)
        self.decoder = FrameDecoder()
        self.incoming, self.outgoing = CODECS[codec](), CODECS[codec]()

    def out(self, budget: int = PLENTY) -> bytes:
        """The bytes that this side puts on the link now."""
        self.mux.pump(budget)
        return b"".join(self.outgoing.encode(self.session.take()))

    def feed(self, data: bytes) -> list[Event]:
        """Bytes from the link; the events that they make."""
        return self.take_frames(self.decoder.feed(self.incoming.decode(data)))

    def take_frames(self, frames: Sequence[Frame]) -> list[Event]:
        new = [frame for frame in frames if self.session.receive(frame, 0.0)]
        return [event for event in map(self.mux.receive, new) if event is not None]


def pair(window: int = DEFAULT_WINDOW) -> tuple[Side, Side]:
    """A host and a guest whose link is up."""
    return Side(host=True, window=window), Side(host=False, window=window)


HI = Hello(VERSION, "5e55", "70ce", 0, False, True)


def shaken_hands(
    host: Mux, guest: Mux, codec: str = RAW, *, checked: bool = True, now: float = 0.0
) -> tuple[HostConnection, AgentConnection]:
    """The two ends of a new link whose handshake is done."""
    ours, theirs = HostConnection(host, HI._replace(checked=checked), codec), AgentConnection(codec)
    theirs.receive_data(b"".join(ours.data_to_send(0)))
    (hello,) = theirs.events(now)
    assert isinstance(hello, Hello)
    theirs.accept(guest, hello, now)
    ours.receive_data(PREAMBLE + b"".join(theirs.data_to_send(0)))
    assert isinstance(next(ours.events(now)), Welcome)
    return ours, theirs


def welcomed(host: Mux, received: int = 0, behind: bytes = b"", now: float = 0.0) -> HostConnection:
    """The host's end of a link, and a guest that has said WELCOME and some more."""
    ours = HostConnection(host, HI, RAW)
    ours.data_to_send(0)
    welcome = encode_message(Welcome(VERSION, HI.session, received))
    ours.receive_data(PREAMBLE + welcome + behind)
    assert isinstance(next(ours.events(now)), Welcome)
    return ours


def data_of(events: Sequence[Event]) -> bytes:
    return b"".join(bytes(event.payload) for event in events if isinstance(event, Data))


def frames_of(data: Buffer) -> list[Frame]:
    return [f._replace(payload=bytes(f.payload)) for f in FrameDecoder().feed(data)]
