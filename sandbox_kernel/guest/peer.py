"""Peer: one side of a running connection. It drives session and multiplexer over the present link.

The streams' handlers (``Stream.owner``) have four methods, called on the loop:
``on_data(payload)``, ``on_finished()``, ``on_reset(reason)`` and ``on_room()``.
"""

from collections import deque
from typing import Callable, Deque, Optional, Protocol, Sequence, cast

from .loop import LoopLike
from .wire import WireError
from .wire.codec import Base64Codec, RawCodec
from .wire.frames import Buffer, Frame, FrameDecoder
from .wire.mux import Data, Event, Finished, Mux, Opened, Stream
from .wire.session import Session

_TURN = 256 * 1024
"""Bytes that are scheduled at once; what becomes urgent meanwhile waits for no more than this."""

_FRAMES_A_TURN, _BYTES_A_TURN = 256, 1024 * 1024
"""So much of what a link has brought is handled at once; others on the loop have a turn between."""
_FRAMES_A_SECOND, _BURST = 10_000.0, 4096.0
"""A link that brings more than this is read more slowly. Whoever has much to say then says it in
fewer, longer frames."""


class Link(Protocol):
    """What carries the bytes: an FdLink, or a provider's stream on the host."""

    on_data: Callable[[bytes], object]
    on_room: Callable[[], object]
    on_lost: Callable[[str], object]
    closed: bool

    @property
    def room(self) -> int: ...
    def write(self, buffers: Sequence[Buffer]) -> None: ...
    def close(self) -> None: ...

    def hold(self) -> None:
        """Read nothing until ``release``."""

    def release(self) -> None: ...


class StreamHandler(Protocol):
    def on_data(self, payload: Buffer) -> None: ...
    def on_finished(self) -> None: ...
    def on_reset(self, reason: str) -> None: ...
    def on_room(self) -> None: ...


class Peer:
    """``on_opened(stream, target)`` must set ``stream.owner``. ``on_link_lost(why)`` and
    ``on_broken(why)`` say that this link, or the whole session, is over. ``clock`` tells how long
    the far side has been silent; the loop's, unless said otherwise."""

    def __init__(
        self, loop: LoopLike, *, host: bool, clock: Optional[Callable[[], float]] = None
    ) -> None:
        self.session = Session()
        self.mux = Mux(self.session, host=host)
        self.link: Optional[Link] = None
        self.on_opened: Callable[[Stream, str], object] = lambda stream, target: stream.reset(
            "nothing can be opened here"
        )
        self.on_link_lost: Callable[[str], object] = lambda why: None
        self.on_broken: Callable[[str], object] = lambda why: None
        self._loop = loop
        self._clock = clock or loop.time
        self._decoder = FrameDecoder()
        self._incoming: "RawCodec | Base64Codec" = RawCodec()
        self._outgoing: "RawCodec | Base64Codec" = RawCodec()
        self._flush_due = False
        self._frames_left = _BURST
        self._counted_at = self._clock()
        self._waiting: Deque[Frame] = deque()  # decoded, and not handled yet

    def attach(
        self,
        link: Link,
        *,
        peer_received: int,
        decoder: FrameDecoder,
        incoming: "RawCodec | Base64Codec",
        outgoing: "RawCodec | Base64Codec",
        checked: bool,
        early: Sequence[Frame] = (),
    ) -> None:
        """Go on over ``link``, whose handshake is done. The decoder and the codecs are those of
        the handshake; ``early`` are frames that came right behind it."""
        self.detach()
        self.session.attach(peer_received, self._clock(), checked=checked)
        self._decoder, self._incoming, self._outgoing = decoder, incoming, outgoing
        self.link = link
        link.on_data = self._link_data
        link.on_room = self.flush
        link.on_lost = self._drop
        self._waiting.extend(early)
        self._work(link)
        self.flush()
        if link.closed and self.link is link:
            self._drop("it ended right after the handshake")

    def detach(self) -> None:
        """Close the present link, if any, and keep the session for the next."""
        if self.link is not None:
            self.link.close()
            self.link = None
        self._waiting.clear()  # the far side sends it again
        self.session.detach()

    def check_alive(self) -> None:
        """To be called every few seconds: finds a link that neither works nor errs."""
        if self.link is None:
            return
        if self.session.check_alive(self._clock()):
            self.flush()
        else:
            self._drop("the far end has been silent for too long")

    def flush_soon(self) -> None:
        """Send what is queued at the end of this turn of the loop, in one piece."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._flush_due = False
        session, mux = self.session, self.mux
        while self.link is not None and self.link.room > 0:
            resumed = mux.pump(min(self.link.room, _TURN))
            buffers = session.take() if session.pending else []
            if buffers:
                self.link.write(self._outgoing.encode(buffers))
            for stream in resumed:
                if stream.owner is not None and not stream.closed:
                    cast(StreamHandler, stream.owner).on_room()
            if not buffers:
                return

    def _link_data(self, data: bytes) -> None:
        link = self.link
        assert link is not None
        try:
            plain = self._incoming.decode(data)
            if plain:
                self._waiting.extend(self._decoder.feed(plain, _FRAMES_A_TURN))
        except WireError as error:
            return self._wire_error(error)
        self._work(link)

    def _work(self, link: Link) -> None:
        """Handle some of what the link has brought, and the rest in later turns."""
        try:
            if not self._waiting and self._decoder.more:
                self._waiting.extend(self._decoder.feed(b"", _FRAMES_A_TURN))
            self._handle(link)
        except WireError as error:
            return self._wire_error(error)
        if self.link is not link:
            return  # a handler has ended it
        self.flush_soon()
        if self._waiting or self._decoder.more:
            link.hold()
            pause = max(0.0, -self._frames_left / _FRAMES_A_SECOND)
            self._loop.call_later(pause, self._go_on, link)
        else:
            link.release()

    def _go_on(self, link: Link) -> None:
        if self.link is link:
            self._work(link)

    def _handle(self, link: Link) -> None:
        waiting = self._waiting
        now = self._clock()
        passed = max(0.0, now - self._counted_at)
        self._counted_at = now
        self._frames_left = min(_BURST, self._frames_left + passed * _FRAMES_A_SECOND)
        frames = size = 0
        while waiting and frames < _FRAMES_A_TURN and size < _BYTES_A_TURN:
            frame = waiting.popleft()
            frames += 1
            size += len(frame.payload)
            if self.session.receive(frame, now):
                event = self.mux.receive(frame)
                if event is not None:
                    self._dispatch(event)
            if self.link is not link:
                return
        self._frames_left -= frames

    def _wire_error(self, error: WireError) -> None:
        if error.fatal:
            self.detach()
            self.on_broken(str(error))
        else:
            self._drop(str(error))

    def _drop(self, why: str) -> None:
        self.detach()
        self.on_link_lost(why)

    def _dispatch(self, event: Event) -> None:
        stream = event.stream
        if isinstance(event, Opened):
            self.on_opened(stream, event.target)
            return
        handler = cast(Optional[StreamHandler], stream.owner)
        if handler is None:
            return
        if isinstance(event, Data):
            handler.on_data(event.payload)
        elif isinstance(event, Finished):
            handler.on_finished()
        else:
            handler.on_reset(event.reason)
