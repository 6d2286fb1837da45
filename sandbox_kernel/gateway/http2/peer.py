"""One side's HTTP/2 connection: what it sends becomes items of streams, and what is written to
streams goes out as its windows allow.

What a stream's reader has not taken keeps the stream's window closed, so at most ``STREAM_WINDOW``
is kept for each. The connection's own window opens as data arrives: a stream that nobody reads does
not stop the others, until the gateway's budget is used up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
from hyperframe.frame import Frame, GoAwayFrame

from sandbox_kernel.gateway.http2.budget import Budget
from sandbox_kernel.gateway.http2.floods import Allowance, Flood
from sandbox_kernel.gateway.http2.heads import Raw
from sandbox_kernel.gateway.refusals import PeerClosed, Refusal
from sandbox_kernel.gateway.relay import Wire

for _name in ("hpack.hpack", "hpack.table"):
    # At DEBUG they would write headers, and the values of secrets in them, to a log.
    logging.getLogger(_name).addFilter(lambda record: record.levelno > logging.DEBUG)

MOST_STREAMS = 100
STREAM_WINDOW = 256 * 1024
CONNECTION_WINDOW = 512 * 1024
MOST_HEADERS = 64 * 1024
_FIRST_WINDOW = 65535
_READ = 32 * 1024
_MOST_FRAME = 64 * 1024
_ACKNOWLEDGE = 32 * 1024
_GATHERED = 8 * 1024
_MOST_BLOCKS = 32
"""Header blocks of one stream: exchange.py takes fewer."""
_Codes = h2.settings.SettingCodes
_SETTINGS = {
    _Codes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
    _Codes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
    _Codes.MAX_HEADER_LIST_SIZE: MOST_HEADERS,
    _Codes.ENABLE_PUSH: 0,
}


class StreamBroken(Refusal):
    """A stream was reset, or its connection has ended."""

    def __init__(self, why: str, code: int = h2.errors.ErrorCodes.INTERNAL_ERROR) -> None:
        super().__init__(502, why)
        self.code = code


@dataclass(frozen=True)
class Block:
    """A header block: a request, a response (interim ones first), or trailers."""

    headers: Raw
    ended: bool
    is_trailers: bool = False


@dataclass(frozen=True)
class Data:
    content: bytes
    size: int
    """What it takes of the window."""
    ended: bool


Item = Block | Data


class Stream:
    """One request and its response, on one side. One reader and one writer at a time."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.number = number
        self.ended = False
        """The other side has said all."""
        self.finished = False
        """We have said all."""
        self.answered = False
        """We have begun to answer."""
        self.on_broken: Callable[[StreamBroken], None] | None = None
        self._peer = peer
        self._items: deque[Item] = deque()
        self._broken: StreamBroken | None = None
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._kept = 0
        self._taken = 0
        self._blocks = 0

    # --- reading

    async def next(self) -> Item | None:
        """What comes next; None at the end. StreamBroken."""
        while not self._items:
            if self.ended:
                return None
            if self._broken is not None:
                raise self._broken
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()

    def took(self, item: Data) -> None:
        """The item is passed on: there is room for more."""
        self._release(item.size)
        self._taken += item.size
        if self._taken >= _ACKNOWLEDGE and not self.ended and self._broken is None:
            self._peer.open_window(self, self._taken)
            self._taken = 0

    # --- writing

    async def send_block(self, headers: Raw, *, end: bool = False) -> None:
        self._check()
        with _as_broken():
            self._peer.connection.send_headers(self.number, list(headers), end_stream=end)
        self.answered = True
        self.finished = self.finished or end
        await self._peer.flush()

    async def send(self, content: bytes, *, end: bool = False) -> None:
        """Waits until all of it has found room. StreamBroken."""
        connection, left = self._peer.connection, memoryview(content)
        while left or end:
            self._check()
            size = self._most_now(len(left))
            if left and not size:
                self._room.clear()
                await self._room.wait()
                continue
            piece, left = left[:size], left[size:]
            last = end and not left
            with _as_broken():
                connection.send_data(self.number, bytes(piece), end_stream=last)
            self._peer.sent_data()
            await self._peer.flush()
            if last:
                self.finished = True
                return

    def _most_now(self, wanted: int) -> int:
        connection = self._peer.connection
        with _as_broken():
            window = connection.local_flow_control_window(self.number)
        return max(0, min(wanted, window, connection.max_outbound_frame_size, _MOST_FRAME))

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def close(self, code: int = h2.errors.ErrorCodes.CANCEL) -> None:
        """Nothing more is read or written. A stream that is not over yet is reset."""
        over = self.finished and self.ended
        if self._broken is None and not over:
            self._peer.reset(self, code)
        self._drop()
        self._peer.forget(self)

    # --- by the peer

    def arrived(self, item: Item) -> None:
        if isinstance(item, Data):
            self._kept += item.size
            self._peer.budget.keep(item.size)
            last = self._items[-1] if self._items else None
            if isinstance(last, Data) and len(last.content) + len(item.content) <= _GATHERED:
                # Many small frames take as little memory as few large ones.
                content, size = last.content + item.content, last.size + item.size
                self._items.pop()
                item = Data(content, size, item.ended)
        else:
            self._blocks += 1
            if self._blocks > _MOST_BLOCKS:
                raise Flood("header blocks")
        self._items.append(item)
        self.ended = self.ended or item.ended
        self._arrived.set()

    def arrived_end(self) -> None:
        self.ended = True
        self._arrived.set()

    def has_room(self) -> None:
        self._room.set()

    def broke(self, why: StreamBroken) -> None:
        if self._broken is None:
            self._broken = why
            if not self.ended:
                self._drop()
            self._arrived.set()
            self._room.set()
            if self.on_broken is not None:
                self.on_broken(why)

    def _drop(self) -> None:
        self._items.clear()
        self._release(self._kept)

    def _release(self, size: int) -> None:
        size = min(size, self._kept)
        self._kept -= size
        self._peer.budget.release(size)


@contextlib.contextmanager
def _as_broken() -> Iterator[None]:
    try:
        yield
    except h2.exceptions.ProtocolError as error:  # the stream or the connection is over
        raise StreamBroken(f"HTTP/2: {error}") from None


class _Connection(h2.connection.H2Connection):
    def _receive_goaway_frame(
        self, frame: GoAwayFrame
    ) -> tuple[list[Frame], list[h2.events.Event]]:
        """Not as in h2, where the connection ends: a server that says that it takes no more
        requests goes on with those that it has."""
        event = h2.events.ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        return [], [event]


class Peer:
    """``on_request`` is called with each new stream of a client, and its request."""

    def __init__(
        self,
        wire: Wire,
        budget: Budget,
        on_request: Callable[[Stream, Block], None] | None = None,
    ) -> None:
        self.budget = budget
        self.accepts = True
        """Whether new streams can be opened."""
        self._wire = wire
        self._on_request = on_request
        self._streams: dict[int, Stream] = {}
        self._owed = 0
        self._slot = asyncio.Event()
        self._cheap = Allowance("frames without content", 1000, 100.0)
        self._resets = Allowance("resets", 200, 20.0)
        config = h2.config.H2Configuration(
            client_side=on_request is None,
            validate_inbound_headers=False,  # heads.py does, and answers
            normalize_inbound_headers=False,
        )
        self.connection = _Connection(config)
        settings = dict(_SETTINGS)
        if on_request is not None:
            del settings[_Codes.ENABLE_PUSH]
        self.connection.local_settings = h2.settings.Settings(
            client=on_request is None, initial_values=settings
        )
        self.connection.max_inbound_frame_size = self.connection.local_settings.max_frame_size
        self.connection.decoder.max_header_list_size = MOST_HEADERS
        self.connection.initiate_connection()
        self.connection.increment_flow_control_window(CONNECTION_WINDOW - _FIRST_WINDOW)

    @property
    def streams(self) -> int:
        return len(self._streams)

    async def run(self) -> None:
        """Serve what comes, to its end. PeerClosed; OSError; Refusal if the peer misbehaves. All
        streams are broken afterwards."""
        try:
            await self.flush()
            while data := await self._wire.source.some(_READ):
                self._receive(data)
                await self.flush()
                await asyncio.sleep(0)  # nobody else waits while much arrives
            raise PeerClosed("the connection was closed")
        except Flood:
            self._say_goodbye(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            raise
        except h2.exceptions.ProtocolError as error:
            self._write()  # h2's own goodbye
            raise Refusal(400, f"bad HTTP/2: {error}") from None
        finally:
            self.accepts = False
            self._slot.set()
            self.budget.forget(self._pay)
            for stream in list(self._streams.values()):
                stream.broke(StreamBroken("the connection has ended"))

    async def open(self, headers: Raw, *, end: bool) -> Stream:
        """A new stream with this request, as soon as the server takes one more. StreamBroken."""
        connection = self.connection
        while self.accepts and (
            connection.open_outbound_streams >= connection.remote_settings.max_concurrent_streams
        ):
            self._slot.clear()
            await self._slot.wait()
        if not self.accepts:
            refused = h2.errors.ErrorCodes.REFUSED_STREAM
            raise StreamBroken("the server takes no more requests", refused)
        stream = Stream(self, connection.get_next_available_stream_id())
        self._streams[stream.number] = stream
        try:
            await stream.send_block(headers, end=end)
        except BaseException:
            stream.close()
            raise
        return stream

    def say_goodbye(self) -> None:
        """The end of the connection, in order."""
        self._say_goodbye(h2.errors.ErrorCodes.NO_ERROR)

    def _say_goodbye(self, code: int) -> None:
        try:
            self.connection.close_connection(code)
            self._write()
        except (h2.exceptions.ProtocolError, OSError):
            pass  # it has ended otherwise

    # --- for streams

    async def flush(self) -> None:
        self._write()
        await self._wire.writer.drain()

    def _write(self) -> None:
        if data := self.connection.data_to_send():
            self._wire.writer.write(data)

    def sent_data(self) -> None:
        """What is sent may be acknowledged, twice at most."""
        self._cheap.earn(2)

    def open_window(self, stream: Stream, size: int) -> None:
        try:
            self.connection.increment_flow_control_window(size, stream.number)
        except (h2.exceptions.ProtocolError, KeyError):
            return  # it is over by now
        self._write()

    def reset(self, stream: Stream, code: int) -> None:
        try:
            self.connection.reset_stream(stream.number, code)
            self._write()
        except (h2.exceptions.ProtocolError, OSError):
            pass  # it is over by now

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)
        self._slot.set()
        self._close_if_done()

    # --- what comes in

    def _receive(self, data: bytes) -> None:
        for event in self.connection.receive_data(data):
            self._handle(event)

    def _handle(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            return self._data(event)
        if isinstance(event, h2.events.StreamEnded):
            stream = self._streams.get(event.stream_id)
            return stream.arrived_end() if stream else None
        if isinstance(event, h2.events.StreamReset):
            return self._was_reset(event)
        if isinstance(event, h2.events.RequestReceived):
            return self._request(event)
        if isinstance(
            event,
            (
                h2.events.ResponseReceived,
                h2.events.InformationalResponseReceived,
                h2.events.TrailersReceived,
            ),
        ):
            return self._block(event)
        self._cheap.spend()
        if isinstance(event, h2.events.ConnectionTerminated):
            self._goodbye(event)
        elif isinstance(event, (h2.events.WindowUpdated, h2.events.RemoteSettingsChanged)):
            number = getattr(event, "stream_id", 0)
            found = self._streams.get(number) if number else None
            for stream in [found] if found else list(self._streams.values()):
                stream.has_room()
            self._slot.set()

    def _request(self, event: h2.events.RequestReceived) -> None:
        assert self._on_request is not None
        stream = Stream(self, event.stream_id)
        self._streams[stream.number] = stream
        stream.ended = event.stream_ended is not None
        self._on_request(stream, Block(event.headers or (), stream.ended))

    def _block(
        self,
        event: h2.events.ResponseReceived
        | h2.events.InformationalResponseReceived
        | h2.events.TrailersReceived,
    ) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            ended = getattr(event, "stream_ended", None) is not None
            is_trailers = isinstance(event, h2.events.TrailersReceived)
            stream.arrived(Block(event.headers or (), ended, is_trailers))

    def _data(self, event: h2.events.DataReceived) -> None:
        size, content = event.flow_controlled_length or 0, event.data or b""
        ended = event.stream_ended is not None
        if not content and not ended:
            self._cheap.spend()
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.arrived(Data(content, size, ended))
        self._owed += size
        self._pay()

    def _pay(self) -> None:
        """Open the connection's window again, unless too much is kept."""
        if self._owed < _ACKNOWLEDGE:
            return
        if self.budget.exceeded:
            return self.budget.when_released(self._pay)
        owed, self._owed = self._owed, 0
        try:
            self.connection.increment_flow_control_window(owed)
        except h2.exceptions.ProtocolError:
            return  # the connection has ended
        self._write()

    def _was_reset(self, event: h2.events.StreamReset) -> None:
        self._resets.spend()
        self._slot.set()
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            code = int(event.error_code or 0)
            stream.broke(StreamBroken(f"the stream was reset (code {code})", code))

    def _goodbye(self, event: h2.events.ConnectionTerminated) -> None:
        if self._on_request is not None:
            return  # a client that will ask for nothing more
        self.accepts = False
        self._slot.set()
        last = event.last_stream_id or 0
        for stream in list(self._streams.values()):
            if stream.number > last:
                refused = h2.errors.ErrorCodes.REFUSED_STREAM
                stream.broke(StreamBroken("the server takes no more requests", refused))
        self._close_if_done()

    def _close_if_done(self) -> None:
        """A server that takes no more requests, and has answered all, is left."""
        if self._on_request is None and not self.accepts and not self._streams:
            self._wire.writer.close()
