"""Listeners: clients of the kernel's output, who are to hear a new kernel from its first word.

When a kernel ends, its clients' ZeroMQ sockets reconnect, each by itself, a tenth of a second or
two later, and subscribe again when their program next looks at them. A kernel that starts sooner is
asked through the one socket while nobody listens at the other, and what it publishes is lost; a
plain local kernel often loses it. Here, requests to a new kernel wait for those who listened to the
last one, and whoever comes back is subscribed at once, by the agent.
"""

import contextlib
from collections import deque
from typing import Any, Callable, Deque, Set

from .pump import Pump
from .wire.frames import Buffer
from .wire.mux import Stream
from .zmtp import COMMAND, GREETING_SIZE, LONG, SUBSCRIBE_ALL

RETURN_LIMIT = 3.0
"""Seconds after its launch that a kernel's listeners are waited for."""

_READY, _HELLO = b"\x05READY", b"\x05HELLO"
_SUBSCRIBER = b"\x0bSocket-Type\x00\x00\x00\x03SUB"
_MAX_STEP = 64 * 1024


class Handshake:
    """Watches what a client says, in ZMTP 3, until it has said its part of the handshake."""

    def __init__(self) -> None:
        self.done = False
        self.subscribable = False
        """Done, by a plain SUB socket that has said no more: the next word may be said for it.
        Such a socket drops by itself what it has not subscribed to."""
        self._greeted = False
        self._data = bytearray()

    def feed(self, data: Buffer) -> bool:
        """Whether it is done by now."""
        self._data += data
        if not self._greeted and len(self._data) >= GREETING_SIZE:
            self._greeted = True
            del self._data[:GREETING_SIZE]
        while self._greeted and self._data and not self.done:
            header = 9 if self._data[0] & LONG else 2
            end = header + int.from_bytes(self._data[1:header], "big")
            if not self._data[0] & COMMAND or end > _MAX_STEP:
                self.done = True  # it does not shake hands as we know it
            elif len(self._data) < max(header, end):
                break
            else:
                self._step(self._data[header:end])
                del self._data[:end]
                self.subscribable = self.subscribable and not self._data
        return self.done

    def _step(self, body: bytearray) -> None:
        # HELLO is followed by INITIATE (encrypted), and READY by nothing.
        self.done = not body.startswith(_HELLO)
        self.subscribable = body.startswith(_READY) and _SUBSCRIBER in body


class Listeners:
    """Who is waited for. Streams are those of the output channel."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._away: Deque[float] = deque()  # since when, each of them
        self._back: Set[Stream] = set()  # but not yet through with the handshake
        self._until = 0.0

    @property
    def awaited(self) -> bool:
        """Must requests to the kernel wait?"""
        return bool(self._away or self._back) and self._clock() < self._until

    def launched(self) -> None:
        """There is a kernel, or a new one."""
        now = self._clock()
        while self._away and self._away[0] < now - RETURN_LIMIT:
            self._away.popleft()  # it has left for good
        self._until = now + RETURN_LIMIT

    def lost(self) -> None:
        """The kernel has hung up on one."""
        self._away.append(self._clock())

    def opened(self, stream: Stream) -> None:
        """A client wants to listen: one that is awaited, if any is."""
        if self._away:
            self._away.popleft()
            self._back.add(stream)

    def settled(self, stream: Stream) -> bool:
        """It is through with the handshake, or has left. Whether it was awaited."""
        awaited = stream in self._back
        self._back.discard(stream)
        return awaited

    def forget(self) -> None:
        """There is nobody any more."""
        self._away.clear()
        self._back.clear()


class ListenerPump(Pump):
    """Carries the output to one client, as any pump, and tells ``listeners`` about it."""

    def __init__(self, listeners: Listeners, *pump: Any) -> None:
        super().__init__(*pump)
        self._listeners = listeners
        self._handshake = Handshake()

    def on_data(self, payload: Buffer) -> None:
        super().on_data(payload)
        shaken = not self._handshake.done and self._handshake.feed(payload)
        if shaken and self._listeners.settled(self._stream):
            self._subscribe()

    def _subscribe(self) -> None:
        if self._handshake.subscribable and not self._out:
            # A few bytes on a new connection: they fit into its buffer, or it is broken, which
            # its reader finds out.
            with contextlib.suppress(OSError):
                self._sock.send(SUBSCRIBE_ALL)

    def on_finished(self) -> None:
        self._listeners.settled(self._stream)
        super().on_finished()

    def on_reset(self, reason: str) -> None:
        self._listeners.settled(self._stream)
        super().on_reset(reason)

    def hung_up(self) -> None:
        self._listeners.settled(self._stream)
        if self._handshake.done:
            self._listeners.lost()
