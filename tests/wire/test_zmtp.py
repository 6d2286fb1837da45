"""The reader of ZeroMQ's own protocol."""

from __future__ import annotations

import pytest

from sandbox_kernel.wire.zmtp import (
    COMMAND,
    GREETING_SIZE,
    LONG,
    MORE,
    PLAIN_GREETING,
    READY,
    READY_SUB,
    SUBSCRIBE_ALL,
    ZmtpFrame,
    ZmtpReader,
    speaks_plainly,
)

PLENTY = 2**40


def frames(reader: ZmtpReader, most: int = PLENTY) -> list[ZmtpFrame]:
    found = []
    while (frame := reader.next_frame(most)) is not None:
        found.append(frame)
    return found


def long(flags: int, body: bytes) -> bytes:
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


@pytest.mark.parametrize("size", [1, 3, 64, 10**6])
def test_bytes_may_be_cut_anywhere(size: int) -> None:
    """A subscriber's first words, then a message in two parts."""
    sent = PLAIN_GREETING + READY_SUB + SUBSCRIBE_ALL + long(MORE, b"x" * 300) + b"\0\1y"
    reader = ZmtpReader()
    found = []
    for at in range(0, len(sent), size):
        reader.feed(sent[at : at + size])
        found += frames(reader)
    assert reader.greeting == PLAIN_GREETING
    assert len(PLAIN_GREETING) == GREETING_SIZE
    ready, *rest = found
    assert ready.flags == COMMAND
    assert ready.body.startswith(READY)
    assert rest == [
        ZmtpFrame(0, b"\1", 1),
        ZmtpFrame(MORE | LONG, b"x" * 300, 300),
        ZmtpFrame(0, b"y", 1),
    ]
    assert reader.next_flags is None


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_a_long_body_is_skipped_and_not_kept(size: int) -> None:
    """Its frame comes with the header; the next one is read as usual."""
    reader = ZmtpReader()
    sent = PLAIN_GREETING + long(0, bytes(5000)) + b"\0\1y"
    found, most_kept = [], 0
    for at in range(0, len(sent), size):
        reader.feed(sent[at : at + size])
        found += frames(reader, 100)
        most_kept = max(most_kept, len(reader._data))
    assert found == [ZmtpFrame(LONG, b"", 5000), ZmtpFrame(0, b"y", 1)]
    assert most_kept < GREETING_SIZE


def test_a_frame_is_encoded_as_it_was_sent() -> None:
    """A short one and a long one."""
    reader = ZmtpReader()
    reader.feed(PLAIN_GREETING + b"\1\1y" + long(COMMAND, b"x" * 300))
    assert [f.encoded() for f in frames(reader)] == [b"\1\1y", long(COMMAND, b"x" * 300)]


@pytest.mark.parametrize("most", [PLENTY, -1], ids=["read", "skipped"])
def test_where_a_message_ends(most: int) -> None:
    """After its last byte, and nowhere else."""
    message = b"\1\1y" + long(MORE, b"x" * 300) + b"\0\2zz"
    reader = ZmtpReader()
    reader.feed(PLAIN_GREETING)
    ends = []
    for at, byte in enumerate(2 * message, 1):
        reader.feed(bytes([byte]))
        frames(reader, most)
        if reader.between_messages:
            ends.append(at)
    assert ends == [len(message), 2 * len(message)]


def test_flags_are_known_before_the_frame_is_complete() -> None:
    """But not before the greeting is."""
    reader = ZmtpReader()
    reader.feed(PLAIN_GREETING[:-1])
    assert (reader.next_flags, reader.next_frame(PLENTY)) == (None, None)
    reader.feed(PLAIN_GREETING[-1:] + bytes([COMMAND]))
    assert (reader.next_flags, reader.next_frame(PLENTY)) == (COMMAND, None)


@pytest.mark.parametrize(
    ("greeting", "plain"),
    [
        (PLAIN_GREETING, True),
        (PLAIN_GREETING.replace(b"NULL", b"CURV"), False),
        (b"\x01" + PLAIN_GREETING[1:], False),
        (PLAIN_GREETING[:10] + b"\x01" + PLAIN_GREETING[11:], False),
    ],
)
def test_which_greetings_are_plain(greeting: bytes, plain: bool) -> None:
    """ZMTP 3 without a security mechanism."""
    assert speaks_plainly(greeting) is plain
