"""The handshake: the first frame in each direction of every link.

The host sends HELLO: protocol version, session id, token, and the highest frame that it has. The
agent answers WELCOME with the highest frame that *it* has, or REFUSE with a code from REFUSALS and
a message for a person, and closes the link. Payloads are JSON objects.
"""

import json
from typing import Any, Dict, NamedTuple

from . import WireError
from .frames import HELLO, REFUSE, WELCOME, Frame, encode

REFUSALS = {
    "version": "the agent speaks another version of the protocol",
    "token": "the session token is wrong",
    "superseded": "another host process has taken this sandbox over",
    "unknown-session": "the agent does not know this session (it was restarted)",
}


class Hello(NamedTuple):
    version: int
    session: str
    token: str
    received: int
    """Highest session frame that the host has; 0 in a new session."""
    resume: bool
    """The agent must know this session already, or refuse."""
    checked: bool
    """This link may damage bytes: both sides must add checksums of payloads."""


class Welcome(NamedTuple):
    version: int
    session: str
    received: int


class Refuse(NamedTuple):
    code: str
    message: str


_TYPES = {Hello: HELLO, Welcome: WELCOME, Refuse: REFUSE}


def encode_message(message: "Hello | Welcome | Refuse") -> bytes:
    payload = json.dumps(message._asdict()).encode()
    return encode(Frame(_TYPES[type(message)], 0, 0, 0, payload))


def decode_hello(frame: Frame) -> Hello:
    """For the agent, of the first frame of a link."""
    if frame.type != HELLO:
        raise WireError("link must begin with HELLO, got frame type %d" % frame.type)
    return Hello(**_fields(frame, Hello))


def decode_answer(frame: Frame) -> "Welcome | Refuse":
    """For the host, of the first frame that comes back."""
    if frame.type == WELCOME:
        return Welcome(**_fields(frame, Welcome))
    if frame.type == REFUSE:
        return Refuse(**_fields(frame, Refuse))
    raise WireError("answer to HELLO must be WELCOME or REFUSE, got type %d" % frame.type)


def _fields(frame: Frame, kind: Any) -> Dict[str, Any]:
    """The payload's fields of ``kind``, each of the right type; others are ignored. Strings are
    printable, so they can be encoded and logged."""
    try:
        values = json.loads(bytes(frame.payload))
        picked = {name: values[name] for name in kind._fields}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError("handshake is not readable: %r" % error) from error
    for name, expected in kind.__annotations__.items():
        value = picked[name]
        if (
            type(value) is not expected
            or (expected is int and value < 0)
            or (expected is str and not value.isprintable())
        ):
            raise WireError("handshake field %r is invalid" % name)
    return picked
