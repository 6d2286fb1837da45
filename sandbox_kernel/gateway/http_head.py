"""Heads of HTTP/1 requests and responses, read strictly. No I/O.

Whatever two parsers could read in two ways is refused: that is what request smuggling lives on.
RFC 9112 lets a recipient be lenient in most of these places; this one is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandbox_kernel.gateway.refusals import Refusal

Headers = tuple[tuple[str, str], ...]

MAX_HEAD = 64 * 1024
MAX_HEADERS = 100
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
_TARGET = re.compile(r"[\x21\x22\x24-\x7e\x80-\xff]+")  # all but controls, space and #
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_VERSION = re.compile(r"HTTP/1\.[01]")
_LENGTH = re.compile(r"[0-9]{1,18}")
_STATUS = re.compile(r"[1-5][0-9]{2}")

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length")
)
"""Of one connection only. Content-Length is among them because bodies are framed anew."""


class BadHead(Refusal):
    """A head is not valid, or can be read in two ways."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(status, f"bad HTTP: {why}")


@dataclass(frozen=True)
class Head:
    """What requests and responses have in common. Header names are in lower case."""

    version: str
    headers: Headers

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def words(self, name: str) -> list[str]:
        """The comma-separated words of a header, in lower case."""
        words = (word.strip().lower() for value in self.all(name) for word in value.split(","))
        return [word for word in words if word]

    @property
    def is_old(self) -> bool:
        return self.version == "HTTP/1.0"

    @property
    def wants_websocket(self) -> bool:
        return "upgrade" in self.words("connection") and self.words("upgrade") == ["websocket"]

    def end_to_end(self, *, leave_out: tuple[str, ...] = ()) -> Headers:
        """The headers that are not of this connection only."""
        dropped = {*_HOP_BY_HOP, *self.words("connection"), *leave_out}
        return tuple(
            (name, value)
            for name, value in self.headers
            if name not in dropped and not name.startswith("proxy-")
        )


@dataclass(frozen=True)
class RequestHead(Head):
    method: str
    target: str

    @property
    def is_last(self) -> bool:
        """Whether the client expects the connection to end with the response."""
        return self.is_old or "close" in self.words("connection") + self.words("proxy-connection")


@dataclass(frozen=True)
class ResponseHead(Head):
    status: int
    reason: str


@dataclass(frozen=True)
class Body:
    """How a body is framed: so many bytes, chunked, or (responses only) until the end."""

    length: int | None = 0
    chunked: bool = False

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    @property
    def until_close(self) -> bool:
        return self.length is None and not self.chunked


NO_BODY = Body()
CHUNKED = Body(None, chunked=True)
UNTIL_CLOSE = Body(None)


def take_request(buffer: bytearray) -> RequestHead | None:
    """A parser for ByteSource. BadHead."""
    lines = _take_lines(buffer)
    if lines is None:
        return None
    parts = lines[0].split(" ")
    if len(parts) != 3:
        raise BadHead("the request line is not METHOD TARGET VERSION")
    method, target, version = parts
    if not _METHOD.fullmatch(method):
        raise BadHead("the method is not in capital letters")
    if not _TARGET.fullmatch(target):
        raise BadHead("the target has a forbidden character")
    if not _VERSION.fullmatch(version):
        raise BadHead("the version is neither HTTP/1.1 nor HTTP/1.0", 505)
    return RequestHead(version, _headers(lines[1:]), method, target)


def take_response(buffer: bytearray) -> ResponseHead | None:
    """A parser for ByteSource. BadHead, whose status is 502."""
    try:
        lines = _take_lines(buffer)
        if lines is None:
            return None
        version, _, rest = lines[0].partition(" ")
        status, _, reason = rest.partition(" ")
        if not _VERSION.fullmatch(version) or not _STATUS.fullmatch(status):
            raise BadHead("the status line is not VERSION STATUS REASON")
        if not _VALUE.fullmatch(reason):
            raise BadHead("the reason has a forbidden character")
        return ResponseHead(version, _headers(lines[1:]), int(status), reason)
    except BadHead as error:
        raise _by_server(error) from None


def body_of_request(head: RequestHead) -> Body:
    """How a request's body is framed. BadHead if that is not clear."""
    return _framing(head, otherwise=NO_BODY)


def body_of_response(head: ResponseHead, method: str) -> Body:
    """How the body of a response to ``method`` is framed. BadHead (502) if that is not clear."""
    try:
        body = _framing(head, otherwise=UNTIL_CLOSE)
    except BadHead as error:
        raise _by_server(error) from None
    empty = method == "HEAD" or head.status in (204, 304) or head.status < 200
    return NO_BODY if empty else body


def _take_lines(buffer: bytearray) -> list[str] | None:
    """The lines of a head without their ends."""
    end = buffer.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end < 0:
        if len(buffer) >= MAX_HEAD:
            raise BadHead(f"the head is longer than {MAX_HEAD // 1024} KiB", 431)
        # Bare line ends never become valid: do not wait for more.
        if _has_bare_line_end(bytes(buffer)):
            raise BadHead("a line does not end with CR LF")
        return None
    head = bytes(buffer[:end])
    if _has_bare_line_end(head):
        raise BadHead("a line does not end with CR LF")
    del buffer[: end + 4]
    return head.decode("latin-1").split("\r\n")


def _has_bare_line_end(data: bytes) -> bool:
    data = data.removesuffix(b"\r").replace(b"\r\n", b"")
    return b"\r" in data or b"\n" in data


def _headers(lines: list[str]) -> Headers:
    if len(lines) > MAX_HEADERS:
        raise BadHead(f"there are more than {MAX_HEADERS} headers", 431)
    headers = []
    for line in lines:
        if line[:1] in (" ", "\t"):
            raise BadHead("a header is continued on another line")
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name):
            raise BadHead("a header is not NAME: VALUE")
        if not _VALUE.fullmatch(value):
            raise BadHead("a header's value has a control character")
        headers.append((name.lower(), value.strip(" \t")))
    return tuple(headers)


def _framing(head: Head, *, otherwise: Body) -> Body:
    lengths, codings = head.all("content-length"), head.all("transfer-encoding")
    if codings:
        if lengths:
            raise BadHead("both Content-Length and Transfer-Encoding")
        if head.is_old:
            raise BadHead("Transfer-Encoding in HTTP/1.0")
        if len(codings) > 1 or codings[0].lower() != "chunked":
            raise BadHead("a Transfer-Encoding other than chunked", 501)
        return CHUNKED
    if not lengths:
        return otherwise
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise BadHead("Content-Length is not one number")
    return Body(int(lengths[0]))


def _by_server(error: BadHead) -> BadHead:
    return BadHead(f"{str(error).removeprefix('bad HTTP: ')}, in the server's answer", 502)


def write_request(method: str, target: str, host: str, headers: Headers) -> bytes:
    """The bytes of a request's head; ``host`` is its one Host header."""
    return _written(f"{method} {target} HTTP/1.1", (("host", host), *headers))


def write_response(status: int, reason: str, headers: Headers) -> bytes:
    """The bytes of a response's head."""
    return _written(f"HTTP/1.1 {status} {reason}", headers)


def _written(first: str, headers: Headers) -> bytes:
    lines = (first, *(f"{_capitalized(name)}: {value}" for name, value in headers), "", "")
    return "\r\n".join(lines).encode("latin-1")


def _capitalized(name: str) -> str:
    # Some servers know headers by their usual spelling only.
    return "-".join(part.capitalize() for part in name.split("-"))
