"""Frames: 32 bytes of header, a payload, a checksum. The vectors are the contract."""

from __future__ import annotations

import zlib

import pytest

from sandbox_kernel.wire import WireError
from sandbox_kernel.wire.frames import (
    ACK,
    BLOCKED,
    CREDIT,
    DATA,
    FIN,
    HEADER_SIZE,
    HELLO,
    LINK_TYPES,
    MAX_PAYLOAD,
    OPEN,
    PING,
    PONG,
    REFUSE,
    RESET,
    SESSION_TYPES,
    WELCOME,
    Frame,
    FrameDecoder,
    encode,
)

# One frame of each kind, byte for byte, for other implementations to check themselves with:
# length + crc | type, flags, zero | stream | seq | ack | payload.
VECTORS = {
    "HELLO": (
        Frame(HELLO, 0, 0, 0, b'{"version": 1}'),
        "0000000e 46057247 01 01 0000 00000000 0000000000000000 0000000000000000"
        "7b2276657273696f6e223a20317d",
    ),
    "WELCOME": (
        Frame(WELCOME, 0, 0, 0, b'{"version": 1}'),
        "0000000e 0bed7220 02 01 0000 00000000 0000000000000000 0000000000000000"
        "7b2276657273696f6e223a20317d",
    ),
    "REFUSE": (
        Frame(REFUSE, 0, 0, 0, b'{"code": "token"}'),
        "00000011 c4c3f893 03 01 0000 00000000 0000000000000000 0000000000000000"
        "7b22636f6465223a2022746f6b656e227d",
    ),
    "ACK": (
        Frame(ACK, 0, 0, 7, b""),
        "00000000 cfd02b08 04 01 0000 00000000 0000000000000000 0000000000000007",
    ),
    "PING": (
        Frame(PING, 0, 0, 7, b"tick"),
        "00000004 6c55fe01 05 01 0000 00000000 0000000000000000 0000000000000007 7469636b",
    ),
    "PONG": (
        Frame(PONG, 0, 0, 7, b"tick"),
        "00000004 6e8bf926 06 01 0000 00000000 0000000000000000 0000000000000007 7469636b",
    ),
    "OPEN": (
        Frame(OPEN, 1, 1, 0, b"\x02kernel:shell"),
        "0000000d 749bd145 10 01 0000 00000001 0000000000000001 0000000000000000"
        "02 6b65726e656c3a7368656c6c",
    ),
    "DATA": (
        Frame(DATA, 1, 2, 0, b"hello"),
        "00000005 e95a9dec 11 01 0000 00000001 0000000000000002 0000000000000000 68656c6c6f",
    ),
    "CREDIT": (
        Frame(CREDIT, 1, 3, 0, (768 * 1024).to_bytes(4, "big")),
        "00000004 ddc25176 12 01 0000 00000001 0000000000000003 0000000000000000 000c0000",
    ),
    "FIN": (
        Frame(FIN, 1, 4, 9, b""),
        "00000000 bc51d40a 13 01 0000 00000001 0000000000000004 0000000000000009",
    ),
    "RESET": (
        Frame(RESET, 1, 5, 9, b"gone"),
        "00000004 5f4d8ba9 14 01 0000 00000001 0000000000000005 0000000000000009 676f6e65",
    ),
    "BLOCKED": (
        Frame(BLOCKED, 1, 6, 9, b""),
        "00000000 229aaedc 15 01 0000 00000001 0000000000000006 0000000000000009",
    ),
}
UNCHECKED_DATA = bytes.fromhex(
    "00000005 f4df33ff 11 00 0000 00000001 0000000000000002 0000000000000000 68656c6c6f"
)


def raw_frame(type_: int, flags: int = 1, zero: int = 0, seq: int = 0) -> bytes:
    """A frame with a right checksum over what may be a wrong header."""
    body = bytes([type_, flags]) + zero.to_bytes(2, "big") + bytes(4) + seq.to_bytes(8, "big")
    body += bytes(8)
    return bytes(4) + zlib.crc32(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("name", VECTORS)
def test_each_kind_of_frame_has_exactly_these_bytes(name: str) -> None:
    """Encoding gives the vector, and decoding it gives the frame back."""
    frame, text = VECTORS[name]
    assert encode(frame).hex() == text.replace(" ", "")
    assert FrameDecoder().feed(bytes.fromhex(text)) == [frame]


def test_the_vectors_cover_every_type() -> None:
    """A new type of frame needs a vector."""
    assert {frame.type for frame, _ in VECTORS.values()} == LINK_TYPES | SESSION_TYPES


def test_a_link_that_keeps_bytes_intact_needs_no_checksum_of_payloads() -> None:
    """Without CHECKED the checksum covers the header only: the payload costs no pass over it."""
    frame = VECTORS["DATA"][0]
    assert encode(frame, checked=False) == UNCHECKED_DATA
    assert FrameDecoder().feed(UNCHECKED_DATA) == [frame]
    other_payload = UNCHECKED_DATA[:HEADER_SIZE] + b"HELLO"
    assert FrameDecoder().feed(other_payload)[0].payload == b"HELLO"


@pytest.mark.parametrize("size", [1, 3, 31, 32, 33, 50, 10_000])
def test_frames_may_arrive_in_pieces_of_any_size(size: int) -> None:
    """The link knows nothing of frames."""
    frames = [frame for frame, _ in VECTORS.values()]
    data = b"".join(map(encode, frames))
    decoder = FrameDecoder()
    found = [f for at in range(0, len(data), size) for f in decoder.feed(data[at : at + size])]
    assert found == frames


def test_payloads_are_views_not_copies() -> None:
    """A gigabyte of output is not copied once more here."""
    data = encode(VECTORS["DATA"][0])
    (frame,) = FrameDecoder().feed(data)
    assert isinstance(frame.payload, memoryview)
    assert frame.payload.obj is data


def test_the_longest_payload_passes_and_a_longer_one_is_refused_unread() -> None:
    """The length is judged as soon as the header is there."""
    longest = Frame(DATA, 1, 1, 0, bytes(MAX_PAYLOAD))
    assert FrameDecoder().feed(encode(longest)) == [longest]
    too_long = encode(Frame(DATA, 1, 1, 0, bytes(MAX_PAYLOAD + 1)))
    with pytest.raises(WireError, match="65537 bytes") as caught:
        FrameDecoder().feed(too_long[:HEADER_SIZE])
    assert not caught.value.fatal


@pytest.mark.parametrize("at", [*range(4, HEADER_SIZE), HEADER_SIZE, HEADER_SIZE + 4])
def test_a_damaged_byte_ends_the_link_but_not_the_session(at: int) -> None:
    """Damage is found by the checksum; a new link and a replay mend it."""
    data = bytearray(encode(VECTORS["DATA"][0]))
    data[at] ^= 0x10
    with pytest.raises(WireError) as caught:
        FrameDecoder().feed(data)
    assert not caught.value.fatal


@pytest.mark.parametrize(("flags", "zero"), [(2, 0), (0x80, 0), (1, 1)])
def test_reserved_bits_must_be_zero(flags: int, zero: int) -> None:
    """So that they can mean something in another version."""
    with pytest.raises(WireError, match="damaged"):
        FrameDecoder().feed(raw_frame(ACK, flags, zero))


@pytest.mark.parametrize(
    ("type_", "seq"),
    [(ACK, 1), (HELLO, 5), (DATA, 0), (FIN, 0), (0, 0), (7, 0), (15, 3), (22, 3), (255, 0)],
)
def test_link_frames_have_no_number_and_session_frames_have_one(type_: int, seq: int) -> None:
    """An intact frame of a wrong or unknown kind is the peer's fault: the session is over."""
    with pytest.raises(WireError, match="sequence number") as caught:
        FrameDecoder().feed(raw_frame(type_, seq=seq))
    assert caught.value.fatal


def test_frames_can_be_had_a_few_at_a_time() -> None:
    """Nothing is decoded before it is asked for, and nothing is lost or copied twice."""
    frames = [Frame(DATA, 1, number, 0, b"x" * number) for number in range(1, 8)]
    whole = b"".join(map(encode, frames))
    decoder = FrameDecoder()
    got = decoder.feed(whole[:-1], 3)
    assert got == frames[:3]
    while decoder.more:
        got += decoder.feed(b"", 3)
    assert got == frames[:-1]
    assert decoder.feed(b"", 3) == []
    assert decoder.feed(whole[-1:], 3) == frames[-1:]
    assert not decoder.more
