"""DNS messages of the sandbox's resolver."""

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.guest.egress import dns


def question(name: bytes, kind: int = dns.A, flags: int = 0x0100, class_: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b".") if label)
    header = struct.pack(">HHHHHH", 0x1234, flags, 1, 0, 0, 0)
    return header + labels + b"\0" + struct.pack(">HH", kind, class_)


def test_an_address() -> None:
    query = dns.parse(question(b"Data.Example."))
    assert query is not None
    assert (query.name, query.kind) == ("data.example", dns.A)
    answer = dns.answer(query, dns.NO_ERROR, socket.inet_aton("127.77.0.1"))
    number, flags, questions, answers, *_ = struct.unpack_from(">HHHHHH", answer)
    assert (number, flags & 0x800F, questions, answers) == (0x1234, 0x8000, 1, 1)
    assert answer.endswith(struct.pack(">H4s", 4, socket.inet_aton("127.77.0.1")))


def test_no_address() -> None:
    query = dns.parse(question(b"data.example", dns.AAAA))
    assert query is not None
    for code in (dns.NO_ERROR, dns.NO_SUCH_NAME, dns.SERVER_FAILED):
        _, flags, _, answers, *_ = struct.unpack_from(">HHHHHH", dns.answer(query, code))
        assert (flags & 0xF, answers) == (code, 0)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x" * 11,
        question(b"a.b")[:-1],
        question(b"a.b", flags=0x8000),
        question(b"a.b", flags=0x2800),
        question(b"a.b", class_=3),
        struct.pack(">HHHHHH", 1, 0, 2, 0, 0, 0) + question(b"a.b")[12:],
        struct.pack(">HHHHHH", 1, 0, 1, 0, 0, 0) + b"\xc0\x0c" + bytes(4),
        question(b"a.b") + bytes(5000),
    ],
)
def test_what_is_no_question(message: bytes) -> None:
    assert dns.parse(message) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "a..b",
        "-a.b",
        "a b",
        "a\0b",
        "b\u00fccher.example",
        "x" * 64 + ".b",
        "a." * 130 + "b",
    ],
)
def test_what_is_no_name(name: str) -> None:
    assert not dns.is_name(name)


@given(st.binary(max_size=600))
def test_any_bytes(message: bytes) -> None:
    query = dns.parse(message)
    if query is not None:
        assert dns.answer(query, dns.NO_SUCH_NAME)[:2] == message[:2]
        dns.is_name(query.name)
