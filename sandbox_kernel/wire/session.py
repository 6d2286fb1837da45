"""Session: frames arrive once and in order, whatever happens to the links that carry them.

Every session frame has a sequence number and stays in the sender's replay buffer until the peer
acknowledges it. On a new link each side drops the frames that the other has and sends the rest
again; the receiver ignores those that it has. ACK frames are for one-sided flows only.
"""

from collections import deque
from typing import Deque, List, Optional, Set, Tuple

from . import WireError
from .frames import ACK, DATA, PING, PONG, REFUSE, Buffer, Frame, encode_header

REPLAY_LIMIT = 8 * 2**20
"""Unacknowledged bytes of payload at which no more DATA is taken from the streams."""

MAX_UNACKED_FRAMES = 65536
"""A peer that leaves more frames unacknowledged breaks the protocol."""

ACK_BYTES = 128 * 1024
ACK_FRAMES = 64
"""An ACK is sent when this much was received and nothing was sent that acknowledges it."""

SPARE_FRAMES, SPARE_A_SECOND = 4096, 100.0
"""Frames that move nothing (old acknowledgements, repetitions, tiny credits): how many a peer may
send at once, and how many more with each second. Each new DATA frame allows one more."""

MAX_FLOODS = 3
"""Links that are dropped for that before the session ends."""

FRAMES_A_SECOND, FRAME_BURST = 10_000.0, 4096.0
"""A link is read no faster than this. A sender that is held back sends fewer, longer frames."""

PING_AFTER = 10.0
DEAD_AFTER = 30.0
"""Seconds of silence after which a PING is sent, and the link given up."""

_MEASURE_INTERVAL = 0.02
"""Seconds between two PINGs that measure the link: well within what SPARE_A_SECOND allows."""

_MEASURING = b"measure"
_Entry = Tuple[int, int, int, Buffer]


class Session:
    """One side of a session. The owner moves bytes: ``receive`` in, ``take`` out."""

    def __init__(self) -> None:
        self.received = 0
        """Highest sequence number received; all below it have been received too."""
        self.attached = False
        self.checked = True
        """Payloads on the present link have checksums."""
        self.unacked_bytes = 0
        self._next_seq = 1
        self._replay: Deque[_Entry] = deque()  # sent or to be sent, not acknowledged
        self._unsent: Deque[_Entry] = deque()  # the tail of _replay that this link has not carried
        self._link_frames: List[Tuple[int, Buffer]] = []
        self._unacked_in_bytes = 0
        self._unacked_in_frames = 0
        self.last_heard = 0.0
        """When the last frame came, by the owner's clock."""
        self._last_ping = 0.0
        self._measured_from = 0.0
        self._measuring = False  # a PING is under way
        self._round_trip: Optional[float] = None
        self._acked = 0
        self._spare = float(SPARE_FRAMES)
        self._wasted_at = 0.0
        self._floods = 0
        self._frames_left, self._counted_at = FRAME_BURST, 0.0

    @property
    def room(self) -> bool:
        """May DATA be added? Other frames are small and always may."""
        return self.unacked_bytes < REPLAY_LIMIT and len(self._replay) < MAX_UNACKED_FRAMES // 2

    @property
    def pending(self) -> bool:
        """Is there something for ``take`` on the present link?"""
        return self.attached and bool(self._unsent or self._link_frames or self._ack_due)

    @property
    def _ack_due(self) -> bool:
        return self._unacked_in_bytes >= ACK_BYTES or self._unacked_in_frames >= ACK_FRAMES

    def attach(self, peer_received: int, now: float, *, checked: bool = True) -> None:
        """Continue over a new link, on which the peer has acknowledged up to ``peer_received``."""
        if peer_received < (self._replay[0][0] if self._replay else self._next_seq) - 1:
            raise WireError("peer has lost frames that it acknowledged")
        self._acknowledged(peer_received)
        self.attached = True
        self.checked = checked
        self._unsent = deque(self._replay)
        self._link_frames = []
        self._unacked_in_bytes = self._unacked_in_frames = 0
        self._spare, self._wasted_at = float(SPARE_FRAMES), now
        self.last_heard = self._last_ping = now

    def detach(self) -> None:
        """The link is gone. Frames are kept until the peer acknowledges them on another."""
        self.attached = False
        self._link_frames = []
        self._measuring = False

    def send(self, type_: int, stream: int, payload: Buffer = b"") -> None:
        """Queue a session frame. It goes out with ``take``, on this link or a later one."""
        entry = (self._next_seq, type_, stream, payload)
        self._next_seq += 1
        self.unacked_bytes += len(payload)
        self._replay.append(entry)
        if self.attached:
            self._unsent.append(entry)

    def take(self) -> List[Buffer]:
        """Buffers for the link, in order: all frames that it has not carried yet."""
        out: List[Buffer] = []
        ack, checked = self.received, self.checked
        for type_, payload in self._link_frames:
            out.append(encode_header(type_, 0, 0, ack, payload, checked))
            if payload:
                out.append(payload)
        self._link_frames.clear()
        if self._ack_due and not self._unsent:
            out.append(encode_header(ACK, 0, 0, ack, b"", checked))
        while self._unsent:
            seq, type_, stream, payload = self._unsent.popleft()
            out.append(encode_header(type_, stream, seq, ack, payload, checked))
            if payload:
                out.append(payload)
        if out:
            self._unacked_in_bytes = self._unacked_in_frames = 0
        return out

    def receive(self, frame: Frame, now: float) -> bool:
        """Take a frame from the link. True if it is new and the mux must handle it."""
        self.last_heard = now
        news = self._acknowledged(frame.ack)
        if len(self._replay) > MAX_UNACKED_FRAMES:
            raise WireError("peer has left %d frames unacknowledged" % len(self._replay))
        if frame.seq:
            return self._in_order(frame)
        if not news:
            self.wasted()
        if frame.type == PING:
            if len(self._link_frames) < 8:
                self._link_frames.append((PONG, bytes(frame.payload)))
        elif frame.type == PONG and self._measuring and frame.payload == _MEASURING:
            self._measuring = False
            self._round_trip = now - self._measured_from
        elif frame.type == REFUSE:
            raise WireError("REFUSE after the handshake")
        # ACK and PONG are done. HELLO and WELCOME may come again: a stream may deliver twice.
        return False

    def wasted(self) -> None:
        """Count a frame that moved nothing. Many of them are a peer that keeps this side busy."""
        passed = (self.last_heard - self._wasted_at) * SPARE_A_SECOND
        self._spare = min(float(SPARE_FRAMES), self._spare + passed) - 1
        self._wasted_at = self.last_heard
        if self._spare < 0:
            self._floods += 1
            raise WireError("too many frames that move nothing", fatal=self._floods > MAX_FLOODS)

    def pause_after(self, frames: int, now: float) -> float:
        """Count handled frames; return the seconds to wait before more are handled."""
        passed = max(0.0, now - self._counted_at)
        self._counted_at = now
        left = min(FRAME_BURST, self._frames_left + passed * FRAMES_A_SECOND)
        self._frames_left = left - frames
        return max(0.0, -self._frames_left / FRAMES_A_SECOND)

    def unacked_streams(self) -> Set[int]:
        """Ids of the streams with DATA that the peer has not acknowledged."""
        return {stream for _, type_, stream, _ in self._replay if type_ == DATA}

    def check_alive(self, now: float) -> bool:
        """Send a PING if the peer is silent. False if the link is to be given up."""
        silent = now - self.last_heard
        if silent >= DEAD_AFTER:
            return False
        if silent >= PING_AFTER and now - self._last_ping >= PING_AFTER:
            self._last_ping = now
            self._link_frames.append((PING, b""))
        return True

    def measure(self, now: float) -> Optional[float]:
        """How long the link took to answer a PING since the last call, if it did. Sends the next
        one with the next ``take``, but not too many a second."""
        took, self._round_trip = self._round_trip, None
        due = now - self._measured_from >= _MEASURE_INTERVAL
        if self.attached and due and not self._measuring:
            self._measuring, self._measured_from = True, now
            self._link_frames.append((PING, _MEASURING))
        return took

    def _in_order(self, frame: Frame) -> bool:
        if frame.seq <= self.received:
            self.wasted()
            return False  # delivered twice
        if frame.seq != self.received + 1:
            raise WireError("frame %d follows frame %d" % (frame.seq, self.received), fatal=False)
        self.received = frame.seq
        self._unacked_in_frames += 1
        self._unacked_in_bytes += len(frame.payload)
        self._spare += frame.type == DATA  # bounded where it is spent
        return True

    def _acknowledged(self, seq: int) -> bool:
        """True if that was not acknowledged before."""
        if seq >= self._next_seq:
            raise WireError("acknowledgement of frame %d, which was never sent" % seq)
        if seq <= self._acked:
            return False
        self._acked = seq
        replay = self._replay
        while replay and replay[0][0] <= seq:
            self.unacked_bytes -= len(replay.popleft()[3])
        return True
