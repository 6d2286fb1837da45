"""Connection: one link of a session without I/O. Bytes of the link in, events and bytes out.

``HostConnection`` and ``AgentConnection`` are the two ends. Their first event belongs to the
handshake; after it they carry the streams of a ``Mux``, which outlives its links. A shell
(``peer``) moves the bytes: ``receive_data``, then ``events``; ``data_to_send`` when the link has
room. A WireError from any of them ends the link, and the session too if it is fatal.
"""

from collections import deque
from typing import Deque, Iterator, List, Optional, Union

from . import VERSION, WireError, handshake
from .codec import CODECS, PreambleFilter
from .frames import Buffer, Frame, FrameDecoder
from .handshake import Hello, Refuse, Welcome
from .mux import Event, Mux, Stream

SEND_TURN = 256 * 1024
"""Most bytes that ``data_to_send`` schedules: urgent data waits for no more than this."""
FRAMES_A_TURN, BYTES_A_TURN = 256, 1024 * 1024
"""Most that ``events`` handles, so that others on the loop have a turn."""

HandshakeEvent = Union[Hello, Welcome, Refuse]


class Connection:
    """What both ends share. ``mux`` is set when the handshake is done."""

    def __init__(self, codec: str) -> None:
        self.mux: Optional[Mux] = None
        self.pause = 0.0
        """Seconds to wait before the next ``events``, because the peer sends too many frames."""
        self.resumed: List[Stream] = []
        """Streams that have room again since the last ``data_to_send``."""
        self._preamble: Optional[PreambleFilter] = None
        self._shaken = False
        self._handshake_out: List[Buffer] = []
        self._incoming, self._outgoing = CODECS[codec](), CODECS[codec]()
        self._decoder = FrameDecoder()
        self._frames: Deque[Frame] = deque()  # decoded, not handled

    @classmethod
    def without_handshake(
        cls, mux: Mux, codec: str, now: float, *, preamble: bool = False
    ) -> "Connection":
        """For a session that has one link, whose two ends need no proof of each other."""
        connection = cls(codec)
        connection._preamble = PreambleFilter() if preamble else None
        connection._shaken = True
        mux.session.attach(0, now)
        connection.mux = mux
        return connection

    def receive_data(self, data: bytes) -> None:
        """Take bytes from the link; ``events`` has what they mean."""
        if self._preamble is not None:
            data = self._preamble.feed(data)
        plain = self._incoming.decode(data)
        if plain:
            self._frames.extend(self._decoder.feed(plain, FRAMES_A_TURN))

    @property
    def more(self) -> bool:
        """Is there something left for another call of ``events``?"""
        return bool(self._frames) or self._decoder.more

    def events(self, now: float) -> "Iterator[Union[Event, HandshakeEvent]]":
        """Handle some of the received frames. A frame counts as received when its event is given,
        so a caller that stops early gets the rest again on the next link."""
        frames = self._frames
        if not frames and self._decoder.more:
            frames.extend(self._decoder.feed(b"", FRAMES_A_TURN))
        if not self._shaken:
            if not frames:
                return
            self._shaken = True
            yield self._handshake(frames.popleft(), now)
        mux = self.mux
        if mux is None:
            return  # refused, or not accepted yet
        session = mux.session
        count = size = 0
        while frames and count < FRAMES_A_TURN and size < BYTES_A_TURN:
            frame = frames.popleft()
            count += 1
            size += len(frame.payload)
            if session.receive(frame, now):
                event = mux.receive(frame)
                if event is not None:
                    yield event
        self.pause = session.pause_after(count, now)

    def data_to_send(self, room: int) -> List[Buffer]:
        """Buffers for the link, in order, with about ``room`` bytes of data. Call it only when the
        link can take them: what is chosen here cannot be overtaken any more."""
        out: List[Buffer] = []
        if self._handshake_out:
            out, self._handshake_out = self._handshake_out, out
        mux = self.mux
        if mux is not None:
            self.resumed = mux.pump(min(room, SEND_TURN))
            if mux.session.pending:
                out += mux.session.take()
        return self._outgoing.encode(out) if out else out

    def _handshake(self, frame: Frame, now: float) -> HandshakeEvent:
        raise NotImplementedError


class HostConnection(Connection):
    """The host's end. It sends HELLO; its first event is a Welcome or a Refuse."""

    def __init__(self, mux: Mux, hello: Hello, codec: str) -> None:
        super().__init__(codec)
        self._hello = hello._replace(received=mux.session.received)
        self._handshake_out.append(handshake.encode_message(self._hello))
        self._preamble = PreambleFilter()
        self._waiting_mux = mux

    @property
    def banner(self) -> bytes:
        """What came instead of the preamble; it often says why a connector failed."""
        return self._preamble.seen if self._preamble is not None else b""

    def _handshake(self, frame: Frame, now: float) -> HandshakeEvent:
        self._preamble = None
        answer = handshake.decode_answer(frame)
        if isinstance(answer, Welcome):
            if answer.version != VERSION or answer.session != self._hello.session:
                raise WireError(
                    "WELCOME is for another session or protocol version (%d)" % answer.version
                )
            self.mux = self._waiting_mux
            self.mux.session.attach(answer.received, now, checked=self._hello.checked)
        return answer


class AgentConnection(Connection):
    """The agent's end. Its first event is a Hello, to be answered by ``accept`` or ``refuse``."""

    def accept(self, mux: Mux, hello: Hello, now: float) -> None:
        """Answer WELCOME and continue the session. WireError if ``hello`` does not fit it."""
        welcome = Welcome(VERSION, hello.session, mux.session.received)
        self._handshake_out.append(handshake.encode_message(welcome))
        mux.session.attach(hello.received, now, checked=hello.checked)
        self.mux = mux

    def refuse(self, code: str) -> None:
        """Answer REFUSE; the caller closes the link after that."""
        self._handshake_out.append(handshake.encode_message(Refuse(code, handshake.REFUSALS[code])))

    def _handshake(self, frame: Frame, now: float) -> HandshakeEvent:
        hello = handshake.decode_hello(frame)
        # A stream may deliver HELLO twice.
        if any(other != frame for other in self._frames):
            raise WireError("host sent frames before WELCOME")
        return hello
