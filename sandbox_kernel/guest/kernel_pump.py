"""Pumps of the kernel's channels: a client stays connected when its kernel is restarted.

A client whose connection breaks waits 0.1 to 0.2 s before it connects again, longer than a kernel
takes to start from a spare. So its connection is kept if the kernel has ended between two messages:
the next kernel gets what the client has said to open its connection (greeting, READY, and its
subscriptions), and what that kernel answers is taken off, because the client has had the same
answer from the last one. Clients that encrypt, and kernels that answer otherwise, are not kept:
they connect again.
"""

from typing import Any, Callable

from ..wire.frames import Buffer
from ..wire.pump import ByteStream, Pump
from ..wire.zmtp import COMMAND, READY, SUBSCRIBE_ALL, ZmtpFrame, ZmtpReader, speaks_plainly
from .listeners import Handshake, Listeners

MAX_OPENING = 4096
"""Bytes. A client that says more to open its connection (many subscriptions) is not kept."""


class Direction:
    """Follows one direction of a connection. ``opening`` is its greeting and its READY, and
    ``subscriptions`` is what followed from one that ``subscribes``."""

    def __init__(self, subscribes: bool = False) -> None:
        self.opening = self.subscriptions = b""
        self._subscribes = subscribes
        self._reader = ZmtpReader()
        self._recording = True

    @property
    def repeatable(self) -> bool:
        """The connection is open, is between two messages, and can be opened again."""
        return bool(self.opening) and self._reader.between_messages

    def feed(self, data: Buffer) -> None:
        self._reader.feed(data)
        while True:
            frame = self._reader.next_frame(MAX_OPENING if self._recording else -1)
            if frame is None:
                return
            if self._recording:
                self._record(frame)

    def _record(self, frame: ZmtpFrame) -> None:
        self._recording = self._subscribes
        if self.opening:
            self.subscriptions += frame.encoded()
        else:
            greeting = self._reader.greeting or b""
            if speaks_plainly(greeting) and frame.flags & COMMAND and frame.body.startswith(READY):
                self.opening = greeting + frame.encoded()
        if not self.opening or len(self.subscriptions) > MAX_OPENING or not frame.body:
            self.opening, self._recording = b"", False


class Conversation:
    """What a client and its kernels have said, as far as the next kernel must know it."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.listens = channel == "iopub"
        self.handshake = Handshake()
        self._client = Direction(subscribes=self.listens)
        self._kernel = Direction()
        self._awaited = b""  # what the present kernel has yet to answer to the opening

    @property
    def can_go_on(self) -> bool:
        """Can the next kernel go on with it?"""
        return self._client.repeatable and self._kernel.repeatable

    @property
    def opening(self) -> bool:
        """The present kernel has not answered the opening yet; it refuses all else before."""
        return bool(self._awaited)

    def go_on(self) -> bytes:
        """Another kernel goes on with it. Returns what opens the connection."""
        self._awaited = self._kernel.opening
        return self._client.opening

    @property
    def subscriptions(self) -> bytes:
        """What is said to another kernel when it has answered the opening."""
        return self._client.subscriptions

    def from_client(self, data: Buffer) -> None:
        self._client.feed(data)

    def from_kernel(self, data: Buffer) -> Buffer:
        """Returns what is new to the client. ValueError if the kernel does not answer the opening
        as the last one did."""
        if self._awaited:
            size = min(len(data), len(self._awaited))
            if data[:size] != self._awaited[:size]:
                raise ValueError("the next kernel opens its connections in another way")
            self._awaited, data = self._awaited[size:], data[size:]
        self._kernel.feed(data)
        return data


class KernelPump(Pump):
    """A pump of one of a kernel's channels. ``keep`` takes over the stream, which has no owner any
    more, when the kernel has closed the connection and the next one can go on with it."""

    def __init__(
        self,
        conversation: Conversation,
        listeners: Listeners,
        keep: Callable[[ByteStream, Conversation], object],
        *pump: Any,
    ) -> None:
        super().__init__(*pump)
        self._conversation = conversation
        self._listeners = listeners
        self._keep = keep
        if conversation.can_go_on:
            self._say(conversation.go_on())

    def _say(self, data: bytes) -> None:
        """Send a few bytes, which fit into the buffer of a new connection. If they do not, the
        client connects again."""
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the kernel has closed the connection, which reading finds out
        if sent < len(data):
            self._loop.call_later(0.0, self.close, "the kernel takes nothing")

    def on_data(self, payload: Buffer) -> None:
        conversation, handshake = self._conversation, self._conversation.handshake
        conversation.from_client(payload)
        if conversation.opening:
            self._out.append(bytes(payload))
        else:
            super().on_data(payload)
        if not conversation.listens or handshake.done or not handshake.feed(payload):
            return
        if self._listeners.settled(self._stream) and handshake.subscribable and not self._out:
            self._say(SUBSCRIBE_ALL)

    def on_finished(self) -> None:
        self._listeners.settled(self._stream)
        super().on_finished()

    def on_reset(self, reason: str) -> None:
        self._listeners.settled(self._stream)
        super().on_reset(reason)

    def _received(self, data: Buffer) -> Buffer:
        opening = self._conversation.opening
        try:
            data = self._conversation.from_kernel(data)
        except ValueError as error:
            self.close(str(error))
            return b""
        if opening and not self._conversation.opening:
            self._opened()
        return data

    def _opened(self) -> None:
        """The next kernel has answered."""
        self._say(self._conversation.subscriptions)
        self._listeners.settled(self._stream)
        self._write_some()

    def _write_failed(self, reason: str) -> None:
        """The kernel has closed the connection, which its reader finds out after the last bytes."""
        self._drop()

    def _hung_up(self, reason: str) -> None:
        self._listeners.settled(self._stream)
        conversation = self._conversation
        if conversation.can_go_on and not self._finish_after_out and not self._stream.closed:
            self._drop()
            self._close_socket()
            self._keep(self._stream, conversation)
            return
        if conversation.listens and conversation.handshake.done:
            self._listeners.lost()
        super()._hung_up(reason)

    def _drop(self) -> None:
        """Drop what the kernel has not taken."""
        self._stream.consumed(sum(map(len, self._out)))
        self._out.clear()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
