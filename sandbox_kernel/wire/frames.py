"""Frames: the unit that is numbered, acknowledged and replayed.

A frame is a header of 32 bytes and a payload:

    length u32 | crc u32 | type u8 | flags u8 | zero u16 | stream u32 | seq u64 | ack u64

in network byte order. ``crc`` is the CRC-32 of the header from ``type`` on, and of the payload too
if the flag CHECKED is set. ``seq`` is 0 for link frames and counts 1, 2, 3... for session frames;
``ack`` is the highest ``seq`` that the sender of the frame has received.
"""

import struct
import zlib
from typing import List, NamedTuple, Union

from . import WireError

Buffer = Union[bytes, bytearray, memoryview]

# Link frames: about one link, never replayed.
HELLO = 1
WELCOME = 2
REFUSE = 3
ACK = 4
PING = 5
PONG = 6
# Session frames: numbered and replayed until acknowledged.
OPEN = 16
DATA = 17
CREDIT = 18
FIN = 19
RESET = 20
BLOCKED = 21

LINK_TYPES = frozenset((HELLO, WELCOME, REFUSE, ACK, PING, PONG))
SESSION_TYPES = frozenset((OPEN, DATA, CREDIT, FIN, RESET, BLOCKED))

CHECKED = 1

MAX_PAYLOAD = 65536
"""Longest payload of a frame; a longer one is refused before it is read."""

_LENGTHS = struct.Struct(">II")
_BODY = struct.Struct(">BBHIQQ")
HEADER_SIZE = _LENGTHS.size + _BODY.size


class Frame(NamedTuple):
    type: int
    stream: int
    seq: int
    ack: int
    payload: Buffer


def encode_header(
    type_: int, stream: int, seq: int, ack: int, payload: Buffer, checked: bool
) -> bytes:
    """The 32 bytes that go before ``payload``."""
    body = _BODY.pack(type_, CHECKED if checked else 0, 0, stream, seq, ack)
    crc = zlib.crc32(body)
    if checked:
        crc = zlib.crc32(payload, crc)
    return _LENGTHS.pack(len(payload), crc) + body


def encode(frame: Frame, checked: bool = True) -> bytes:
    """A whole frame as bytes, for handshakes and tests, where a copy does not matter."""
    return encode_header(*frame, checked) + bytes(frame.payload)


class FrameDecoder:
    """Cuts the bytes of one link into frames. After a WireError it must not be used again."""

    def __init__(self) -> None:
        self.more = False
        """Another frame may be complete already: ``feed(b"")`` returns it."""
        self._chunks: List[Buffer] = []
        self._have = 0
        self._need = HEADER_SIZE

    def feed(self, data: Buffer, most: int = 2**31) -> List[Frame]:
        """Take the next bytes of the link; return the frames that they complete, but not more than
        ``most``: decoding costs by the frame, and a link may be full of short ones.

        Payloads are views of the bytes given, so those must not change afterwards.
        """
        if data:
            self._chunks.append(data)
            self._have += len(data)
        self.more = False
        if self._have < self._need:
            return []
        chunks = self._chunks
        view = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        frames: List[Frame] = []
        at, end = 0, len(view)
        self._need = HEADER_SIZE
        while end - at >= HEADER_SIZE:
            if len(frames) == most:
                self.more = True
                break
            length, crc = _LENGTHS.unpack_from(view, at)
            if length > MAX_PAYLOAD:
                raise WireError(
                    "frame payload of %d bytes is longer than %d" % (length, MAX_PAYLOAD),
                    fatal=False,
                )
            after = at + HEADER_SIZE + length
            if after > end:
                self._need = HEADER_SIZE + length
                break
            frames.append(self._decode(view, at, after, crc))
            at = after
        self._chunks = [view[at:]] if at < end else []
        self._have = end - at
        return frames

    @staticmethod
    def _decode(view: memoryview, at: int, after: int, crc: int) -> Frame:
        body = view[at + _LENGTHS.size : at + HEADER_SIZE]
        payload = view[at + HEADER_SIZE : after]
        type_, flags, zero, stream, seq, ack = _BODY.unpack(body)
        found = zlib.crc32(body)
        if flags & CHECKED:
            found = zlib.crc32(payload, found)
        if found != crc or zero or flags & ~CHECKED:
            raise WireError("frame is damaged", fatal=False)
        numbered = type_ in SESSION_TYPES
        if numbered != bool(seq) or not (numbered or type_ in LINK_TYPES):
            raise WireError("frame type %d with sequence number %d" % (type_, seq))
        return Frame(type_, stream, seq, ack, payload)
