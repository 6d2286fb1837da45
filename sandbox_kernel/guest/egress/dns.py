"""DNS messages, as far as a resolver that knows only addresses of its own needs them. No I/O."""

import re
import struct
from typing import List, NamedTuple, Optional

A, AAAA = 1, 28
MAX_MESSAGE = 4096
_HEADER = struct.Struct(">HHHHHH")
_QUESTION = struct.Struct(">HH")
_ANSWER = struct.Struct(">HHHIH4s")
_RESPONSE, _AUTHORITATIVE, _RECURSION_WANTED, _RECURSION = 0x8000, 0x0400, 0x0100, 0x0080
_OPCODE = 0x7800
_INTERNET = 1
_POINTER_TO_QUESTION = 0xC00C
LIFE = 5
"""Seconds for which an answer may be kept: rules can change."""
_NAME = re.compile(
    r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*"
)

NO_ERROR, SERVER_FAILED, NO_SUCH_NAME, NOT_IMPLEMENTED = 0, 2, 3, 4


class Query(NamedTuple):
    """One question: the name in lower case without its last dot, and what is wanted."""

    name: str
    kind: int
    head: bytes
    """The start of any answer: header and question."""


def parse(message: bytes) -> Optional[Query]:
    """The question of a message; None if it is not one that can be answered at all."""
    if len(message) > MAX_MESSAGE or len(message) < _HEADER.size:
        return None
    number, flags, questions, answers, _, _ = _HEADER.unpack_from(message)
    if flags & (_RESPONSE | _OPCODE) or questions != 1 or answers:
        return None
    labels: List[bytes] = []
    at = _HEADER.size
    while at < len(message) and message[at]:
        length = message[at]
        if length > 63 or len(labels) > 127:
            return None
        labels.append(message[at + 1 : at + 1 + length])
        at += 1 + length
    end = at + 1 + _QUESTION.size
    if len(message) < end:
        return None
    kind, class_ = _QUESTION.unpack_from(message, at + 1)
    if class_ != _INTERNET:
        return None
    name = b".".join(labels).decode("latin-1").lower()
    flags = _RESPONSE | _AUTHORITATIVE | _RECURSION | flags & _RECURSION_WANTED
    head = _HEADER.pack(number, flags, 1, 0, 0, 0) + message[_HEADER.size : end]
    return Query(name, kind, head)


def is_name(name: str) -> bool:
    """Whether a rule could name it."""
    return len(name) <= 253 and _NAME.fullmatch(name) is not None


def answer(query: Query, code: int, address: Optional[bytes] = None) -> bytes:
    """The answer with a code, and with an address of four bytes if there is one."""
    number, flags, *_ = _HEADER.unpack_from(query.head)
    found = address is not None and code == NO_ERROR
    header = _HEADER.pack(number, flags | code, 1, int(found), 0, 0)
    body = query.head[_HEADER.size :]
    if not found or address is None:
        return header + body
    return header + body + _ANSWER.pack(_POINTER_TO_QUESTION, A, _INTERNET, LIFE, 4, address)
