"""Listeners: clients of the kernel's output, which must hear a new kernel from its first message.

After a restart, clients' ZeroMQ sockets reconnect one by one, a tenth of a second or two later, and
subscribe when their program next polls them. A kernel that starts sooner publishes to nobody; a
plain local kernel often loses its first output that way. Here, requests to a new kernel wait for
those who listened to the last one, and the agent subscribes them as soon as they are back.
"""

from collections import deque
from typing import Callable, Deque, Set

from ..wire.frames import Buffer
from ..wire.pump import ByteStream
from ..wire.zmtp import COMMAND, HELLO, READY, SUB_SOCKET, ZmtpReader

RETURN_LIMIT = 3.0
"""Seconds after its launch that a kernel's requests wait for its listeners."""
_MAX_STEP = 64 * 1024


class Handshake:
    """Watches a client's side of the ZMTP handshake."""

    def __init__(self) -> None:
        self.done = False
        self.subscribable = False
        """It is a plain SUB socket that has sent READY and nothing else: it is safe to inject a
        SUBSCRIBE. Such a socket drops messages that its program has not subscribed to."""
        self._reader = ZmtpReader()

    def feed(self, data: Buffer) -> bool:
        """True when the handshake is done."""
        reader = self._reader
        reader.feed(data)
        while not self.done and reader.next_flags is not None:
            if not reader.next_flags & COMMAND:
                self.done = True  # no handshake that we know
                break
            frame = reader.next_frame(_MAX_STEP)
            if frame is None:
                break
            # HELLO is followed by INITIATE (encrypted), and READY by nothing.
            self.done = not frame.body.startswith(HELLO)
            plain_sub = frame.body.startswith(READY) and SUB_SOCKET in frame.body
            self.subscribable = plain_sub and reader.next_flags is None
        return self.done


class Listeners:
    """The output streams that requests wait for."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._away: Deque[float] = deque()  # when each of them was lost
        self._back: Set[ByteStream] = set()  # connected, handshake not done
        self._until = 0.0

    @property
    def awaited(self) -> bool:
        """Must requests to the kernel wait?"""
        return bool(self._away or self._back) and self._clock() < self._until

    def launched(self) -> None:
        """A kernel was launched."""
        now = self._clock()
        while self._away and self._away[0] < now - RETURN_LIMIT:
            self._away.popleft()  # it is not coming back
        self._until = now + RETURN_LIMIT

    def lost(self) -> None:
        """The kernel has closed the connection of one."""
        self._away.append(self._clock())

    def opened(self, stream: ByteStream) -> None:
        """A client has opened an output stream: one that is awaited, if any is."""
        if self._away:
            self._away.popleft()
            self._back.add(stream)

    def kept(self, stream: ByteStream) -> None:
        """The kernel has closed the connection of one, which waits here for the next kernel."""
        self._back.add(stream)

    def settled(self, stream: ByteStream) -> bool:
        """Its handshake is done, or it has left. True if it was awaited."""
        awaited = stream in self._back
        self._back.discard(stream)
        return awaited

    def forget(self) -> None:
        """The session is over, and its clients are gone."""
        self._away.clear()
        self._back.clear()
