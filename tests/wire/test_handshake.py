"""The handshake: HELLO, and WELCOME or REFUSE, each one frame with a JSON object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox_kernel.wire import VERSION, WireError
from sandbox_kernel.wire.frames import ACK, HELLO, REFUSE, WELCOME, Frame
from sandbox_kernel.wire.handshake import (
    REFUSALS,
    Hello,
    Refuse,
    Welcome,
    decode_answer,
    decode_hello,
    encode_message,
)
from tests.wire.sides import frames_of

HI = Hello(VERSION, "5e55", "70ce", 3, True, False)
REFUSED = Refuse("token", REFUSALS["token"])


def frame(type_: int, payload: bytes) -> Frame:
    return Frame(type_, 0, 0, 0, payload)


def test_hello_on_the_wire() -> None:
    """Byte for byte, and back."""
    header = "00000063 031a18d1 01 01 0000 00000000 0000000000000000 0000000000000000"
    payload = (
        b'{"version": 1, "session": "5e55", "token": "70ce", "received": 3, '
        b'"resume": true, "checked": false}'
    )
    assert encode_message(HI) == bytes.fromhex(header) + payload
    assert decode_hello(*frames_of(encode_message(HI))) == HI


def test_welcome_on_the_wire() -> None:
    """Byte for byte, and back."""
    header = "00000031 9966e82a 02 01 0000 00000000 0000000000000000 0000000000000000"
    welcome = Welcome(VERSION, "5e55", 12)
    payload = b'{"version": 1, "session": "5e55", "received": 12}'
    assert encode_message(welcome) == bytes.fromhex(header) + payload
    assert decode_answer(*frames_of(encode_message(welcome))) == welcome


def test_refuse_on_the_wire() -> None:
    """Byte for byte, and back: a code for programs and words for people."""
    header = "0000003a 798fc5ac 03 01 0000 00000000 0000000000000000 0000000000000000"
    payload = b'{"code": "token", "message": "the session token is wrong"}'
    assert encode_message(REFUSED) == bytes.fromhex(header) + payload
    assert decode_answer(*frames_of(encode_message(REFUSED))) == REFUSED


@pytest.mark.parametrize("code", REFUSALS)
def test_every_refusal_can_be_said(code: str) -> None:
    """What the agent says can be read by the host."""
    refused = Refuse(code, REFUSALS[code])
    assert decode_answer(*frames_of(encode_message(refused))) == Refuse(code, REFUSALS[code])


def test_a_link_begins_with_hello_and_its_answer() -> None:
    """Anything else first is not this protocol."""
    with pytest.raises(WireError, match="HELLO") as caught:
        decode_hello(frame(ACK, b""))
    assert caught.value.fatal
    with pytest.raises(WireError, match="must be WELCOME or REFUSE") as caught:
        decode_answer(frame(HELLO, b"{}"))
    assert caught.value.fatal


def test_fields_of_a_later_version_are_ignored() -> None:
    """So that a version can be refused by its number and not by accident."""
    values = {**HI._asdict(), "version": 2, "compression": "zstd"}
    assert decode_hello(frame(HELLO, json.dumps(values).encode())).version == 2


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff\xfe\xfd", b"[]", b"7", b'"version"', b"{}", b"[" * 60_000, b"9" * 5000],
)
def test_what_is_no_json_object_with_the_fields_is_refused(payload: bytes) -> None:
    """One kind of error, whatever the JSON parser makes of it."""
    with pytest.raises(WireError, match="handshake") as caught:
        decode_hello(frame(HELLO, payload))
    assert caught.value.fatal
    with pytest.raises(WireError, match="handshake"):
        decode_answer(frame(WELCOME, payload))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", "1"),
        ("version", True),
        ("session", None),
        ("token", 5),
        ("token", "\ud800"),
        ("session", "one\ntwo"),
        ("received", -1),
        ("received", 1.0),
        ("resume", 1),
        ("checked", "no"),
    ],
)
def test_each_field_has_its_type(name: str, value: Any) -> None:
    """No field is converted; numbers are not negative and strings are printable."""
    payload = json.dumps({**HI._asdict(), name: value}).encode()
    with pytest.raises(WireError, match=name) as caught:
        decode_hello(frame(HELLO, payload))
    assert caught.value.fatal


def test_a_refusal_cannot_forge_lines_of_a_log() -> None:
    """Its words are shown to a person."""
    payload = json.dumps({"code": "token", "message": "no\nroot logged in"}).encode()
    with pytest.raises(WireError, match="message"):
        decode_answer(frame(REFUSE, payload))
