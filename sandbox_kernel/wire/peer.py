"""Peer: moves bytes between the present link and its connection, and events to their handlers."""

from typing import Callable, Optional, Protocol, Sequence, Union

from . import WireError
from .connection import Connection, HandshakeEvent
from .event_loop import LoopLike
from .frames import Buffer
from .mux import Data, Event, Finished, Mux, Opened, Reset, Stream
from .session import Session


class Link(Protocol):
    """Carries the bytes: an FdLink, or a provider's stream on the host."""

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


class Peer:
    """One side of a session, over links that come and go.

    ``on_opened(stream, target)`` must set ``stream.owner``. ``on_link_lost(why)`` and
    ``on_broken(why)`` report the end of this link and of the whole session. ``clock`` measures how
    long the far side has been silent; it is the loop's by default.
    """

    def __init__(
        self, loop: LoopLike, *, host: bool, clock: Optional[Callable[[], float]] = None
    ) -> None:
        self.session = Session()
        self.mux = Mux(self.session, host=host)
        self.link: Optional[Link] = None
        self.clock = clock or loop.time
        self.on_opened: Callable[[Stream, str], object] = lambda stream, target: stream.reset(
            "nothing can be opened here"
        )
        self.on_link_lost: Callable[[str], object] = lambda why: None
        self.on_broken: Callable[[str], object] = lambda why: None
        self._loop = loop
        self._connection: Optional[Connection] = None
        self._flush_due = False

    def attach(self, link: Link, connection: Connection) -> None:
        """Continue over ``link``, whose handshake is done. Any earlier link is closed."""
        if self.link is not None:
            self.link.close()
        self.link, self._connection = link, connection
        link.on_data = self._link_data
        link.on_room = self.flush
        link.on_lost = self._drop
        self._handle_events(link)
        self.flush()
        if link.closed and self.link is link:
            self._drop("the link ended right after the handshake")

    def detach(self) -> None:
        """Close the present link, if any, and keep the session for the next."""
        if self.link is not None:
            self.link.close()
        self.link = self._connection = None
        self.session.detach()

    def check_alive(self) -> None:
        """Give up a link that has been silent for too long. Call it every few seconds."""
        if self.link is None:
            return
        if self.session.check_alive(self.clock()):
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
        while True:
            link, connection = self.link, self._connection
            room = 0 if link is None else link.room
            if link is None or connection is None or not room:
                return
            buffers = connection.data_to_send(room)
            if buffers:
                link.write(buffers)
            for stream in connection.resumed:
                if stream.owner is not None and not stream.closed:
                    stream.owner.on_room()
            if not buffers:
                return

    def _link_data(self, data: bytes) -> None:
        assert self.link is not None
        assert self._connection is not None
        try:
            self._connection.receive_data(data)
        except WireError as error:
            return self._wire_error(error)
        self._handle_events(self.link)

    def _handle_events(self, link: Link) -> None:
        """Handle some of what the link has brought, and the rest in later turns of the loop."""
        connection = self._connection
        if self.link is not link or connection is None:
            return  # this turn was asked for before the link was lost
        try:
            for event in connection.events(self.clock()):
                self._dispatch(event)
                if self.link is not link:
                    return  # a handler has closed it
        except WireError as error:
            return self._wire_error(error)
        self.flush_soon()
        if connection.more:
            link.hold()
            self._loop.call_later(connection.pause, self._handle_events, link)
        else:
            link.release()

    def _wire_error(self, error: WireError) -> None:
        if error.fatal:
            self.detach()
            self.on_broken(str(error))
        else:
            self._drop(str(error))

    def _drop(self, why: str) -> None:
        self.detach()
        self.on_link_lost(why)

    def _dispatch(self, event: Union[Event, HandshakeEvent]) -> None:
        if isinstance(event, Data):
            if event.stream.owner is not None:
                event.stream.owner.on_data(event.payload)
        elif isinstance(event, Opened):
            self.on_opened(event.stream, event.target)
        elif isinstance(event, Finished) and event.stream.owner is not None:
            event.stream.owner.on_finished()
        elif isinstance(event, Reset) and event.stream.owner is not None:
            event.stream.owner.on_reset(event.reason)
