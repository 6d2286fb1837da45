"""Codecs: the same session over streams that keep bytes and streams that are text."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import pytest

from sandbox_kernel.wire import WireError
from sandbox_kernel.wire.codec import (
    BASE64,
    CODECS,
    MAX_BANNER,
    MAX_LINE,
    PREAMBLE,
    RAW,
    Base64Codec,
    PreambleFilter,
)
from sandbox_kernel.wire.frames import Buffer


def joined(buffers: Sequence[Buffer]) -> bytes:
    return b"".join(buffers)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 49152, 49153, 200_000])
def test_what_is_encoded_is_decoded(name: str, size: int) -> None:
    """For buffers of any length, also when they come in odd pieces."""
    plain = bytes(i * 7 % 256 for i in range(size))
    wire = joined(CODECS[name]().encode([plain[: size // 3], memoryview(plain)[size // 3 :]]))
    decoder = CODECS[name]()
    pieces = [wire[at : at + 1000] for at in range(0, len(wire), 1000)]
    assert joined([bytes(decoder.decode(piece)) for piece in pieces]) == plain


def test_raw_is_the_bytes_themselves() -> None:
    """No copy, no framing."""
    buffer = b"as it is"
    assert CODECS[RAW]().encode([buffer])[0] is buffer


def test_base64_is_lines_that_every_text_stream_can_carry() -> None:
    """Byte for byte: RFC 4648 with padding, LF at the end, at most MAX_LINE long."""
    assert CODECS[BASE64]().encode([b"sandbox", b"\xff\x00"]) == [b"c2FuZGJveP8A\n"]
    lines = CODECS[BASE64]().encode([bytes(100_000)])
    assert len(lines) == 3
    assert max(map(len, lines)) < MAX_LINE
    assert joined(lines).isascii()


def test_base64_survives_other_line_ends_and_empty_lines() -> None:
    """A terminal may turn LF into CR LF, and a provider may add an empty line."""
    assert Base64Codec().decode(b"\r\nc2FuZGJveA==\r\n\n  \nIQ==\r\n") == b"sandbox!"


@pytest.mark.parametrize("line", [b"c2FuZGJveA=\n", b"c2Fu\nc2F\n", b"=aaa\nA===\n"])
def test_a_line_that_is_not_base64_ends_the_link(line: bytes) -> None:
    """Text was lost or added on the way; a replay mends it."""
    with pytest.raises(WireError, match="not base64") as caught:
        Base64Codec().decode(line)
    assert not caught.value.fatal


def test_a_line_without_end_is_not_kept() -> None:
    """What waits for its end is bounded."""
    codec = Base64Codec()
    assert codec.decode(b"A" * MAX_LINE) == b""
    with pytest.raises(WireError, match="line is longer than"):
        codec.decode(b"A")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_banner_before_the_preamble_is_skipped(line_end: bytes, size: int) -> None:
    """A login shell's greeting is no part of the session, whatever the pieces."""
    preamble = PREAMBLE.replace(b"\n", line_end)
    said = b"Welcome!\r\nsandbox-kernel/1 read" + preamble + b"the session \n goes on"
    gate = PreambleFilter()
    passed = joined([gate.feed(said[at : at + size]) for at in range(0, len(said), size)])
    assert passed == b"the session \n goes on"
    assert gate.seen == b""


def test_what_came_instead_of_the_preamble_explains_a_failed_connector() -> None:
    """The error of a missing interpreter is text on the same stream."""
    gate = PreambleFilter()
    assert gate.feed(b"sh: python3: not found\n") == b""
    assert gate.seen == b"sh: python3: not found\n"


def test_a_banner_without_end_ends_the_link() -> None:
    """Nobody can fill the host's memory before the session begins."""
    gate = PreambleFilter()
    gate.feed(b"x" * MAX_BANNER)
    with pytest.raises(WireError, match="no preamble") as caught:
        gate.feed(b"x")
    assert not caught.value.fatal


def test_the_preamble_is_not_base64() -> None:
    """So no session can contain it by chance on a text stream."""
    with pytest.raises(ValueError, match=r"base64|padding"):
        base64.b64decode(PREAMBLE.strip(), validate=True)
