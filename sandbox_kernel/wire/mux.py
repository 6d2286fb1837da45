"""Multiplexer: many byte streams in one session, fair and bounded.

Each direction of a stream has a credit window: the bytes that may be sent before the reader has
consumed some. Of the streams with data and credit, the lowest priority number goes first,
round-robin within one number, in frames of at most CHUNK bytes: an interrupt overtakes output.

The host opens streams with odd ids, the guest with even ones; an id is used once in a session.
"""

import struct
from collections import deque
from typing import Deque, Dict, List, NamedTuple, Optional, Protocol, Union

from . import WireError
from .frames import BLOCKED, CREDIT, DATA, FIN, MAX_PAYLOAD, OPEN, RESET, Buffer, Frame
from .session import Session

CHUNK = MAX_PAYLOAD
INITIAL_WINDOW = 256 * 1024
"""Credit of each direction of a new stream; CREDIT adds to it."""
DEFAULT_WINDOW = 1024 * 1024
WIDEST_WINDOW = 8 * 2**20
"""A window grows up to this while its reader keeps up and its writer is BLOCKED."""
MAX_WINDOW = 2**31 - 1
MAX_STREAMS = 1024
"""Most streams that the peer may have open at once."""
SMALL_CREDIT = 4096
"""A smaller CREDIT counts as a frame that moves nothing."""
HIGH_WATER = 256 * 1024
"""A stream with more bytes waiting to be sent is full: its producer must stop."""
MAX_TARGET = 4096
MAX_REASON = 1024
PRIORITIES = 8

# Priorities; the lowest number goes first.
CONTROL = 0
URGENT = 1
INTERACTIVE = 2
OUTPUT = 3
BULK = 4

_CREDIT = struct.Struct(">I")


class Opened(NamedTuple):
    stream: "Stream"
    target: str


class Data(NamedTuple):
    """The reader must call ``stream.consumed`` when it is done with the bytes."""

    stream: "Stream"
    payload: Buffer


class Finished(NamedTuple):
    """The peer sends no more on this stream."""

    stream: "Stream"


class Reset(NamedTuple):
    """The peer closed the stream at once."""

    stream: "Stream"
    reason: str


Event = Union[Opened, Data, Finished, Reset]


class StreamHandler(Protocol):
    """Owns one stream. A shell (``peer``) calls it on its loop."""

    def on_data(self, payload: Buffer) -> None: ...
    def on_finished(self) -> None: ...
    def on_reset(self, reason: str) -> None: ...
    def on_room(self) -> None: ...


class Stream:
    """One stream, made by ``Mux.open`` or announced by an Opened event."""

    def __init__(self, mux: "Mux", id_: int, priority: int) -> None:
        self.id = id_
        self.priority = priority
        self.owner: Optional[StreamHandler] = None
        self.buffered = 0
        self.waiting = False
        """``Mux.pump`` is to name this stream when it has room again."""
        self.closed = False
        self.widest = WIDEST_WINDOW
        """How far the window may grow; set by a reader that knows how fast it is."""
        self._mux = mux
        self._chunks: Deque[Buffer] = deque()
        self._credit = INITIAL_WINDOW
        self._granted = INITIAL_WINDOW  # credit that the peer has left
        self._unread = 0  # bytes that the reader has not consumed
        self._window = INITIAL_WINDOW
        self._fin_wanted = self._fin_sent = self._fin_received = False
        self._queued = False

    @property
    def full(self) -> bool:
        return self.buffered >= HIGH_WATER

    def write(self, data: Buffer) -> None:
        """Queue bytes. A finished or closed stream drops them: the peer has gone."""
        if self.closed or self._fin_wanted or not data:
            return
        self._chunks.append(data)
        self.buffered += len(data)
        self._mux._schedule(self)

    def finish(self) -> None:
        """Send FIN after the bytes written so far."""
        if not self.closed and not self._fin_wanted:
            self._fin_wanted = True
            self._mux._schedule(self)

    def reset(self, reason: str) -> None:
        """Close the stream at once, with a reason for the peer's log."""
        if not self.closed:
            self._mux.session.send(RESET, self.id, reason.encode(errors="replace")[:MAX_REASON])
            self._mux._forget(self)

    def consumed(self, size: int) -> None:
        """The reader is done with ``size`` bytes; the peer may send as many again."""
        self._unread -= size
        if self._due * 4 >= self._window and not self.closed and not self._fin_received:
            self._grant()

    def widen(self, window: int) -> None:
        """Let the peer have up to ``window`` bytes under way on this stream."""
        self._window = window
        if self._due > 0:
            self._grant()

    def narrow(self, window: int) -> None:
        """Let a slow reader's peer have at most ``window`` bytes under way, after those of now."""
        self._window = min(self._window, max(window, INITIAL_WINDOW))

    @property
    def _due(self) -> int:
        """Credit that the peer may get now."""
        return self._window - self._granted - self._unread

    def _grant(self) -> None:
        due = self._due
        self._mux.session.send(CREDIT, self.id, _CREDIT.pack(due))
        self._granted += due

    def _peer_blocked(self) -> None:
        """The peer had more data than credit: unless the reader is behind, widen the window."""
        widest = min(self.widest, WIDEST_WINDOW)
        if self._unread <= 0 and self._window < widest and not self._fin_received:
            self.widen(min(2 * self._window, widest))

    @property
    def _ready(self) -> bool:
        if self._chunks:
            return self._credit > 0
        return self._fin_wanted and not self._fin_sent

    def _next_piece(self) -> Buffer:
        limit = min(CHUNK, self._credit)
        first = self._chunks[0]
        if len(first) > limit:
            view = memoryview(first)
            self._chunks[0] = view[limit:]
            piece: Buffer = view[:limit]
        else:
            pieces = [self._chunks.popleft()]
            size = len(first)
            while self._chunks and size + len(self._chunks[0]) <= limit:
                pieces.append(self._chunks.popleft())
                size += len(pieces[-1])
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.buffered -= len(piece)
        self._credit -= len(piece)
        return piece


class Mux:
    """One side's streams over one session."""

    def __init__(self, session: Session, *, host: bool, window: int = DEFAULT_WINDOW) -> None:
        self.streams: Dict[int, Stream] = {}
        self.session = session
        self._host = host
        self._window = window
        # The sandbox may open many and send without being read: little credit until one is.
        self._window_for_peer = INITIAL_WINDOW if host else window
        self._next_id = 1 if host else 2
        self._last_peer_id = 0
        self._opened_by_peer = 0
        self._late = 0  # bytes that the peer may still send on streams closed here
        self._queues: List[Deque[Stream]] = [deque() for _ in range(PRIORITIES)]

    def open(self, target: str, priority: int, window: int = 0) -> Stream:
        """Open a stream to ``target`` on the other side. ``window`` replaces the usual one."""
        stream = self.streams[self._next_id] = Stream(self, self._next_id, priority)
        self._next_id += 2
        self.session.send(OPEN, stream.id, bytes([priority]) + target.encode()[:MAX_TARGET])
        stream.widen(window or self._window)
        return stream

    def pump(self, budget: int) -> List[Stream]:
        """Give the session up to about ``budget`` bytes of data, most urgent first.

        Return the streams that were full and have room again. Call it only when the link can take
        more: what is chosen here cannot be overtaken any more.
        """
        resumed: List[Stream] = []
        session = self.session
        for queue in self._queues:
            while queue:
                if budget <= 0 or not session.room:
                    return resumed
                stream = queue.popleft()
                stream._queued = False
                if not stream._ready:
                    continue
                if stream._chunks:
                    piece = stream._next_piece()
                    session.send(DATA, stream.id, piece)
                    budget -= len(piece)
                    if stream._chunks and not stream._credit:
                        session.send(BLOCKED, stream.id)
                    if stream.waiting and not stream.full:
                        stream.waiting = False
                        resumed.append(stream)
                else:
                    stream._fin_sent = True
                    session.send(FIN, stream.id)
                    self._close_if_done(stream)
                self._schedule(stream)
        return resumed

    def undelivered(self) -> List[Stream]:
        """Open streams with data from this side that the peer has not acknowledged."""
        unacked = self.session.unacked_streams()
        return [s for s in self.streams.values() if s.buffered or s.id in unacked]

    def receive(self, frame: Frame) -> Optional[Event]:
        """Handle a frame that is new to the session; at most one event."""
        if frame.type == OPEN:
            return self._opened(frame)
        stream = self.streams.get(frame.stream)
        if stream is None:
            self._too_late(frame)
            return None
        if frame.type == DATA:
            return self._data(stream, frame.payload)
        if frame.type == CREDIT:
            self._credited(stream, frame.payload)
            return None
        if frame.type == BLOCKED:
            self.session.wasted()  # allowed for by the DATA before it
            stream._peer_blocked()
            return None
        if frame.type == FIN:
            if stream._fin_received:
                raise WireError("second FIN on stream %d" % stream.id)
            stream._fin_received = True
            self._close_if_done(stream)
            return Finished(stream)
        self._forget(stream)
        return Reset(stream, bytes(frame.payload[:MAX_REASON]).decode(errors="replace"))

    def close(self) -> List[Stream]:
        """Forget every stream; the session is over, so the peer gets no RESET."""
        streams = list(self.streams.values())
        for stream in streams:
            self._forget(stream)
        return streams

    def _opened(self, frame: Frame) -> Optional[Event]:
        id_, payload = frame.stream, bytes(frame.payload)
        if self._ours(id_) or id_ <= self._last_peer_id:
            raise WireError("OPEN with invalid stream id %d" % id_)
        if not payload or payload[0] >= PRIORITIES or len(payload) > MAX_TARGET + 1:
            raise WireError("OPEN with invalid priority or target")
        self._last_peer_id = id_
        self.session.wasted()  # allowed for by the DATA that follows
        if self._opened_by_peer >= MAX_STREAMS:
            self.session.send(RESET, id_, b"too many streams")
            self._late += INITIAL_WINDOW
            return None
        stream = self.streams[id_] = Stream(self, id_, payload[0])
        self._opened_by_peer += 1
        stream.widen(self._window_for_peer)
        return Opened(stream, payload[1:].decode(errors="replace"))

    @staticmethod
    def _data(stream: Stream, payload: Buffer) -> Event:
        if not payload:  # costs no credit, so a reader might hold any number
            raise WireError("empty DATA on stream %d" % stream.id)
        stream._granted -= len(payload)
        stream._unread += len(payload)
        if stream._granted < 0 or stream._fin_received:
            raise WireError("DATA on stream %d after FIN or beyond its credit" % stream.id)
        return Data(stream, payload)

    def _credited(self, stream: Stream, payload: Buffer) -> None:
        if len(payload) != _CREDIT.size:
            sizes = (_CREDIT.size, len(payload))
            raise WireError("CREDIT payload must be %d bytes, got %d" % sizes)
        credit = _CREDIT.unpack(payload)[0]
        if credit < SMALL_CREDIT:
            self.session.wasted()
        stream._credit += credit
        if stream._credit > MAX_WINDOW:
            raise WireError("CREDIT on stream %d exceeds %d bytes" % (stream.id, MAX_WINDOW))
        self._schedule(stream)

    def _too_late(self, frame: Frame) -> None:
        """Frames for a stream that was closed here are late, not wrong."""
        id_ = frame.stream
        if not 0 < id_ < (self._next_id if self._ours(id_) else self._last_peer_id + 1):
            raise WireError("frame for stream %d, which was never opened" % id_)
        if frame.type != DATA:
            return self.session.wasted()
        self._late -= len(frame.payload)
        if self._late < 0 or not frame.payload:
            raise WireError("DATA on closed streams exceeds their credit")

    def _ours(self, id_: int) -> bool:
        return id_ % 2 == (1 if self._host else 0)

    def _schedule(self, stream: Stream) -> None:
        if stream._ready and not stream._queued and not stream.closed:
            stream._queued = True
            self._queues[stream.priority].append(stream)

    def _close_if_done(self, stream: Stream) -> None:
        if stream._fin_sent and stream._fin_received:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        stream.closed = True
        self._late += 0 if stream._fin_received else stream._granted
        stream._chunks.clear()
        stream.buffered = 0
        stream._fin_wanted = stream._fin_sent = True
        del self.streams[stream.id]
        self._opened_by_peer -= not self._ours(stream.id)
