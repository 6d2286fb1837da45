"""What HTTP/2 header blocks say, read strictly. No I/O.

As in http_head: what two readers could read in two ways is refused, and what could mean something
else in HTTP/1, too, because nobody knows what is behind the server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sandbox_kernel.gateway.http_head import MAX_HEADERS, BadHead, Headers
from sandbox_kernel.gateway.names import Target, read_authority
from sandbox_kernel.gateway.refusals import Refusal

Raw = Iterable[tuple[bytes, bytes]]

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
_PATH = re.compile(r"/[\x21\x22\x24-\x7e\x80-\xff]*")
_STATUS = re.compile(r"[1-5][0-9]{2}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_FORBIDDEN = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-connection",
        "transfer-encoding",
        "upgrade",
    )
)
"""They belong to connections of HTTP/1; in HTTP/2 they only deceive."""
_OF_FRAMING = frozenset(("content-length", "te", "trailer", "host"))


@dataclass(frozen=True)
class Request:
    method: str
    path_and_query: str
    headers: Headers
    """End to end: without ``host`` and framing."""
    length: str | None
    te: bool
    """Whether the client takes trailers (gRPC insists)."""

    @property
    def path(self) -> str:
        return self.path_and_query.partition("?")[0]

    def raw(self, target: Target, path_and_query: str, headers: Headers, length: str | None) -> Raw:
        """The block for the server, with the body's length if that is known."""
        return encoded(
            (
                (":method", self.method),
                (":scheme", "https"),
                (":authority", target.host_header(443)),
                (":path", path_and_query),
                *((("content-length", length),) if length else ()),
                *((("te", "trailers"),) if self.te else ()),
                *headers,
            )
        )


@dataclass(frozen=True)
class Response:
    status: int
    headers: Headers
    length: str | None

    def raw(self, headers: Headers) -> Raw:
        """The block for the client."""
        return encoded(
            (
                (":status", str(self.status)),
                *((("content-length", self.length),) if self.length else ()),
                *headers,
            )
        )


def read_request(block: Raw, target: Target) -> Request:
    """A request on a connection for the target. BadHead; NameRefused; Refusal 421."""
    pseudo, headers = _read(block, {":method", ":scheme", ":authority", ":path", ":protocol"})
    method, path = pseudo.get(":method", ""), pseudo.get(":path", "")
    if not _METHOD.fullmatch(method):
        raise BadHead("the method is not in capital letters")
    if method == "CONNECT" or ":protocol" in pseudo:
        raise BadHead("CONNECT is for proxies")
    if pseudo.get(":scheme") != "https":
        raise BadHead("the scheme is not https")
    if not _PATH.fullmatch(path) and not (path == "*" and method == "OPTIONS"):
        raise BadHead("the path has a forbidden character")
    named = [pseudo[":authority"]] if ":authority" in pseudo else []
    named += [value for name, value in headers if name == "host"]
    if not named:
        raise BadHead("neither :authority nor Host")
    for host in named:
        if read_authority(host, 443) != target:
            text = f"egress denied: :authority {host[:80]!a} on a connection for {target}"
            raise Refusal(421, text)
    te = [value for name, value in headers if name == "te"]
    if any(value.lower() != "trailers" for value in te):
        raise BadHead("te is not trailers")
    return Request(method, path, _end_to_end(headers), _length(headers), bool(te))


def read_response(block: Raw) -> Response:
    """A response, an interim one included. BadHead, whose status is 502."""
    try:
        pseudo, headers = _read(block, {":status"})
        status = pseudo.get(":status", "")
        if not _STATUS.fullmatch(status) or status == "101":
            raise BadHead("there is no valid :status")
        return Response(int(status), _end_to_end(headers), _length(headers))
    except BadHead as error:
        raise BadHead(f"{_why(error)}, in the server's answer", 502) from None


def read_trailers(block: Raw, status: int) -> Headers:
    """Trailers to pass on. BadHead with this status."""
    try:
        _, headers = _read(block, set())
    except BadHead as error:
        raise BadHead(f"{_why(error)}, in trailers", status) from None
    return _end_to_end(headers)


def encoded(headers: Headers) -> Raw:
    """As a block."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def refusal_block(refusal: Refusal, length: int) -> Raw:
    """The head of the gateway's own answer."""
    return encoded(
        (
            (":status", str(refusal.status)),
            ("content-type", "text/plain; charset=us-ascii"),
            ("content-length", str(length)),
            *((("retry-after", str(refusal.wait)),) if refusal.wait else ()),
        )
    )


def _read(block: Raw, known: set[str]) -> tuple[dict[str, str], Headers]:
    pseudo: dict[str, str] = {}
    headers: list[tuple[str, str]] = []
    for raw_name, raw_value in block:
        name, value = bytes(raw_name).decode("latin-1"), bytes(raw_value).decode("latin-1")
        if not _VALUE.fullmatch(value):
            raise BadHead("a header's value has a control character")
        if name.startswith(":"):
            if name not in known or name in pseudo or headers:
                raise BadHead("a pseudo-header is unknown, doubled or out of place")
            pseudo[name] = value
            continue
        if not _NAME.fullmatch(name):
            raise BadHead("a header's name has a forbidden character")
        if name in _FORBIDDEN:
            raise BadHead(f"the header {name} has no place in HTTP/2")
        headers.append((name, value.strip(" \t")))
    if len(headers) > MAX_HEADERS:
        raise BadHead(f"there are more than {MAX_HEADERS} headers", 431)
    return pseudo, tuple(headers)


def _end_to_end(headers: Headers) -> Headers:
    return tuple(
        (name, value)
        for name, value in headers
        if name not in _OF_FRAMING and not name.startswith(("proxy-", "http2-"))
    )


def _length(headers: Headers) -> str | None:
    found = [value for name, value in headers if name == "content-length"]
    if len(found) > 1 or not all(map(_LENGTH.fullmatch, found)):
        raise BadHead("content-length is not one number")
    return found[0] if found else None


def _why(error: BadHead) -> str:
    return str(error).removeprefix("bad HTTP: ")
