"""The parsers of HTTP, SOCKS and TLS: strict, bounded, and indifferent to how bytes arrive."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.gateway import socks, tls_hello
from sandbox_kernel.gateway.byte_source import ByteSource
from sandbox_kernel.gateway.http_body import BadBody, pieces_of, take_trailers
from sandbox_kernel.gateway.http_head import (
    CHUNKED,
    NO_BODY,
    UNTIL_CLOSE,
    BadHead,
    Body,
    RequestHead,
    body_of_request,
    body_of_response,
    take_request,
    take_response,
)
from sandbox_kernel.gateway.names import NameRefused
from sandbox_kernel.gateway.proxy_protocol import (
    Speaks,
    connect_target,
    direct_request,
    look_at_first,
    proxied_request,
)
from sandbox_kernel.gateway.refusals import PeerClosed, Refusal

T = TypeVar("T")


def request(*lines: str) -> bytes:
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def get(*headers: str) -> bytes:
    return request("GET http://a.example/x HTTP/1.1", "Host: a.example", *headers)


def in_bits(parse: Callable[[bytearray], T | None], data: bytes) -> T | None:
    """Feed a parser byte by byte."""
    buffer = bytearray()
    for byte in data:
        buffer.append(byte)
        found = parse(buffer)
        if found is not None:
            return found
    return None


def test_a_request_is_read_however_it_arrives() -> None:
    data = get("X-Some:  value \t", "Content-Length: 3")
    head = in_bits(take_request, data)
    assert head == take_request(bytearray(data))
    assert head is not None
    assert (head.method, head.target) == ("GET", "http://a.example/x")
    assert head.all("x-some") == ["value"]
    assert body_of_request(head) == Body(3)
    buffer = bytearray(data + b"abcGET ")
    take_request(buffer)
    assert buffer == b"abcGET "


BAD_REQUESTS = {
    "bare LF": b"GET http://a.example/ HTTP/1.1\nHost: a.example\n\n",
    "bare LF in a head": b"GET http://a.example/ HTTP/1.1\r\nA: b\nHost: a.example\r\n\r\n",
    "bare CR": b"GET http://a.example/ HTTP/1.1\r\nA: b\rc\r\n\r\n",
    "folded": get("A: b", " c"),
    "folded with tab": get("A: b", "\tc"),
    "space before colon": get("A : b"),
    "no colon": get("A"),
    "no name": get(": b"),
    "NUL": get("A: b\0c"),
    "control": get("A: b\x0bc"),
    "name": get("A\xe4: b"),
    "two spaces": request("GET  http://a.example/ HTTP/1.1"),
    "no version": request("GET http://a.example/"),
    "version": request("GET http://a.example/ HTTP/2.0"),
    "lower version": request("GET http://a.example/ http/1.1"),
    "lower method": request("get http://a.example/ HTTP/1.1"),
    "method": request("G(T http://a.example/ HTTP/1.1"),
    "target": request("GET http://a.example/\x7f HTTP/1.1"),
    "fragment": request("GET http://a.example/#x HTTP/1.1"),
    "empty line first": b"\r\n" + get(),
}


@pytest.mark.parametrize("data", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_heads_that_are_refused(data: bytes) -> None:
    with pytest.raises(BadHead):
        take_request(bytearray(data))


def test_heads_are_bounded() -> None:
    with pytest.raises(BadHead) as caught:
        take_request(bytearray(b"GET http://a.example/ HTTP/1.1\r\nA: " + b"x" * 70_000))
    assert caught.value.status == 431
    with pytest.raises(BadHead) as caught:
        take_request(bytearray(get(*["A: b"] * 101)))
    assert caught.value.status == 431


BAD_FRAMING = [
    ["Content-Length: 1", "Content-Length: 1"],
    ["Content-Length: 1", "Content-Length: 2"],
    ["Content-Length: 1, 1"],
    ["Content-Length: +1"],
    ["Content-Length: -1"],
    ["Content-Length: 0x1"],
    ["Content-Length: 1_0"],
    ["Content-Length:"],
    ["Content-Length: \xb2"],
    ["Content-Length: 1", "Transfer-Encoding: chunked"],
    ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
    ["Transfer-Encoding: chunked, chunked"],
    ["Transfer-Encoding: gzip, chunked"],
    ["Transfer-Encoding: identity"],
    ["Transfer-Encoding: xchunked"],
    ["Transfer-Encoding:"],
    ["Transfer-Encoding: \x80chunked"],
]


@pytest.mark.parametrize("headers", BAD_FRAMING)
def test_ambiguous_framing_is_refused_both_ways(headers: list[str]) -> None:
    head = take_request(bytearray(get(*headers)))
    assert head is not None
    with pytest.raises(BadHead):
        body_of_request(head)
    response = take_response(bytearray(request("HTTP/1.1 200 OK", *headers)))
    assert response is not None
    with pytest.raises(BadHead) as caught:
        body_of_response(response, "GET")
    assert caught.value.status == 502


def test_chunks_are_not_of_http_1_0() -> None:
    line = "POST http://a.example/ HTTP/1.0"
    head = take_request(bytearray(request(line, "Transfer-Encoding: chunked")))
    assert head is not None
    with pytest.raises(BadHead):
        body_of_request(head)


@pytest.mark.parametrize(
    ("method", "status", "headers", "body"),
    [
        ("GET", 200, ["Content-Length: 7"], Body(7)),
        ("GET", 200, ["Transfer-Encoding: Chunked"], CHUNKED),
        ("GET", 200, [], UNTIL_CLOSE),
        ("HEAD", 200, ["Content-Length: 7"], NO_BODY),
        ("GET", 204, [], NO_BODY),
        ("GET", 304, ["Content-Length: 7"], NO_BODY),
        ("GET", 100, [], NO_BODY),
    ],
)
def test_bodies_of_responses(method: str, status: int, headers: list[str], body: Body) -> None:
    response = take_response(bytearray(request(f"HTTP/1.1 {status} Fine", *headers)))
    assert response is not None
    assert body_of_response(response, method) == body


@pytest.mark.parametrize("line", ["HTTP/1.1 2000 OK", "HTTP/2 200", "200 OK", "HTTP/1.1 999 X"])
def test_bad_status_lines_are_the_servers_fault(line: str) -> None:
    with pytest.raises(BadHead) as caught:
        take_response(bytearray(request(line)))
    assert caught.value.status == 502


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parsers(data: bytes) -> None:
    """Whatever arrives: a result, a wish for more, or a Refusal."""
    for parse in (take_request, take_response, socks.take_greeting, socks.take_request):
        with contextlib.suppress(Refusal):
            parse(bytearray(data))
    for start in (b"", b"\x16\x03\x01", b"\x05\x01\x00\x03", b"GET http://a/ HTTP/1.1\r\n"):
        for look in (tls_hello.look_at, look_at_first, take_request, socks.take_request):
            with contextlib.suppress(Refusal):
                look(bytearray(start + data))


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET http://a.example/ HTTP/1.1", "Host: b.example"], 421),
        (["GET http://a.example/ HTTP/1.1", "Host: a.example:81"], 421),
        (["GET http://a.example/ HTTP/1.1"], 400),
        (["GET http://a.example/ HTTP/1.1", "Host: a.example", "Host: a.example"], 400),
        (["GET http://a.example/ HTTP/1.1", "Host: a.example, b.example"], 400),
        (["GET http://a.example/ HTTP/1.1", "Host: u@a.example"], 400),
        (["GET /x HTTP/1.1", "Host: a.example"], 400),
        (["GET https://a.example/ HTTP/1.1", "Host: a.example"], 400),
        (["GET http://u:p@a.example/ HTTP/1.1", "Host: a.example"], 400),
        (["GET http://a.example\\@b.example/ HTTP/1.1", "Host: a.example"], 400),
        (["GET http://2130706433/ HTTP/1.1", "Host: 2130706433"], 400),
    ],
)
def test_requests_to_a_proxy_that_are_refused(lines: list[str], status: int) -> None:
    head = take_request(bytearray(request(*lines)))
    assert head is not None
    with pytest.raises(Refusal) as caught:
        proxied_request(head)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["CONNECT a.example HTTP/1.1"], 400),
        (["CONNECT a.example:443 HTTP/1.1", "Host: b.example:443"], 421),
        (["CONNECT a.example:443 HTTP/1.1", "Host: a.example:80"], 421),
        (["CONNECT a.example:443 HTTP/1.1", "Host: a.example", "Host: a.example"], 400),
        (["CONNECT a.example:443 HTTP/1.1", "Content-Length: 5"], 400),
        (["CONNECT http://a.example/ HTTP/1.1"], 400),
    ],
)
def test_connects_that_are_refused(lines: list[str], status: int) -> None:
    head = take_request(bytearray(request(*lines)))
    assert head is not None
    with pytest.raises(Refusal) as caught:
        connect_target(head)
    assert caught.value.status == status


def test_requests_on_a_connection_whose_target_is_known() -> None:
    target = connect_target(take(request("CONNECT a.example:80 HTTP/1.1", "Host: a.example")))
    head = take(request("GET /x?y HTTP/1.1", "Host: A.example."))
    assert direct_request(head, target).path == "/x"
    head = take(request("GET http://a.example/x HTTP/1.1", "Host: a.example"))
    assert direct_request(head, target).path_and_query == "/x"
    for lines, status in (
        (["GET / HTTP/1.1", "Host: b.example"], 421),
        (["GET http://b.example/ HTTP/1.1", "Host: b.example"], 421),
        (["CONNECT b.example:443 HTTP/1.1", "Host: b.example:443"], 400),
    ):
        with pytest.raises(Refusal) as caught:
            direct_request(take(request(*lines)), target)
        assert caught.value.status == status


def take(data: bytes) -> RequestHead:
    head = take_request(bytearray(data))
    assert head is not None
    return head


# --- bodies


async def content(data: bytes, body: Body) -> tuple[bytes, bytes]:
    """The body at the start of these bytes, and what is left."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    source = ByteSource(reader)
    pieces = [piece async for piece in pieces_of(source, body)]
    left = b""
    while piece := await source.some():
        left += piece
    return b"".join(pieces), left


async def test_what_follows_a_body_is_not_part_of_it() -> None:
    assert await content(b"abcGET", Body(3)) == (b"abc", b"GET")
    chunks = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: x\r\n\r\nGET"
    assert await content(chunks, CHUNKED) == (b"abcde", b"GET")
    assert await content(b"abc", UNTIL_CLOSE) == (b"abc", b"")


@pytest.mark.parametrize(
    "data",
    [
        *(b"3\nabc\r\n0\r\n\r\n", b"3\r\nabcd\r\n", b"+3\r\nabc\r\n", b"0x3\r\nabc\r\n"),
        *(b" 3\r\nabc\r\n", b"3 \r\nabc\r\n", b"\r\nabc", b"-1\r\n", b"3\r\nabc\n0\r\n\r\n"),
        *(b"fffffffffffffffff\r\n", b"3;" + b"x" * 2000, b"0\r\nnot a trailer\r\n\r\n"),
        *(b"0\r\nA: b\n\r\n", b"3;a\0\r\nabc"),
    ],
)
async def test_broken_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(BadBody):
        await content(data, CHUNKED)


async def test_a_body_that_is_cut_short() -> None:
    for data, body in ((b"ab", Body(3)), (b"3\r\nab", CHUNKED), (b"3\r\nabc\r\n0\r\n", CHUNKED)):
        with pytest.raises(PeerClosed):
            await content(data, body)


def test_trailers_are_bounded() -> None:
    with pytest.raises(BadBody):
        take_trailers(bytearray(b"A: b\r\n" * 5000))


class ByteByByte:
    """A client that sends one byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    async def read(self, n: int = -1) -> bytes:
        return bytes([byte]) if (byte := next(self._data, None)) is not None else b""


RECORDS = b"".join(b"\x16\3\1\0\1" + bytes([byte]) for byte in b"\1\0\xff\0" + bytes(10_000))


@pytest.mark.parametrize(
    ("parse", "data", "why"),
    [
        (take_request, b"GET http://a/ HTTP/1.1\r\n" + b"a:\r\n" * 15_000, "too many small"),
        (tls_hello.look_at, RECORDS, "too many records"),
        (take_trailers, b"a:\r\n" * 4000, "too many trailers"),
    ],
)
async def test_small_pieces_are_not_looked_at_without_end(
    parse: Callable[[bytearray], object], data: bytes, why: str
) -> None:
    """They cost their sender nothing; each makes a parser begin anew."""
    with pytest.raises(Refusal, match=why):
        await ByteSource(ByteByByte(data)).take(parse)


async def test_a_usual_head_may_come_byte_by_byte() -> None:
    data = get("X: " + "x" * 4000)
    assert await ByteSource(ByteByByte(data)).take(take_request) == take_request(bytearray(data))


# --- SOCKS


def socks_request(host: bytes, port: int = 443, *, kind: int = 3, command: int = 1) -> bytes:
    named = bytes([len(host)]) + host if kind == 3 else host
    return bytes([5, command, 0, kind]) + named + port.to_bytes(2, "big")


def test_socks_names_and_addresses() -> None:
    assert str(in_bits(socks.take_request, socks_request(b"A.example"))) == "a.example:443"
    assert str(in_bits(socks.take_request, socks_request(b"\1\1\1\1", kind=1))) == "1.1.1.1:443"
    v6 = bytes(15) + b"\1"
    assert str(in_bits(socks.take_request, socks_request(v6, kind=4))) == "[::1]:443"
    assert in_bits(socks.take_greeting, b"\5\2\0\1") is True
    assert in_bits(socks.take_greeting, b"\5\1\2") is False


@pytest.mark.parametrize(
    "host", [b"a.example\0.evil.test", b"a.example ", b"", b"\xc3\xa4.example", b"127.1", b"a..b"]
)
def test_socks_names_are_checked(host: bytes) -> None:
    with pytest.raises(NameRefused) as caught:
        socks.take_request(bytearray(socks_request(host)))
    assert socks.reply_to(caught.value)[1] == 2


def test_other_socks_commands_are_refused() -> None:
    for data, reply in (
        (socks_request(b"a.example", command=2), 7),
        (socks_request(b"a.example", command=3), 7),
        (socks_request(b"abcd", kind=2), 8),
        (b"\4" + socks_request(b"a.example")[1:], 1),
    ):
        with pytest.raises(socks.SocksRefused) as caught:
            socks.take_request(bytearray(data))
        assert socks.reply_to(caught.value)[1] == reply


def test_what_a_client_speaks() -> None:
    assert look_at_first(bytearray()) is None
    for first, speaks in ((b"G", Speaks.HTTP), (b"\5", Speaks.SOCKS5), (b"\4", Speaks.SOCKS4)):
        assert look_at_first(bytearray(first)) is speaks
    assert look_at_first(bytearray(b"\x16")) is Speaks.UNKNOWN


# --- TLS


@functools.cache
def hello(name: str | None) -> bytes:
    """A ClientHello, as OpenSSL makes it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("name", ["a.example", None])
def test_the_name_in_a_client_hello(name: str | None) -> None:
    data = hello(name)
    expected = None if name is None else name.encode()
    found = in_bits(tls_hello.look_at, data)
    assert found == tls_hello.FirstBytes(is_tls=True, server_name=expected)
    # The same in records of seven bytes.
    message = data[5:]
    cut = b"".join(
        b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
        for part in (message[at : at + 7] for at in range(0, len(message), 7))
    )
    assert in_bits(tls_hello.look_at, cut) == found


def test_other_protocols_are_not_tls() -> None:
    for data in (b"GET / HTTP/1.1", b"\x16abc", b"SSH-2.0", b"\0\0\0\x08"):
        assert tls_hello.look_at(bytearray(data)) == tls_hello.FirstBytes(is_tls=False)
    assert tls_hello.look_at(bytearray()) is None


@given(st.data())
def test_a_damaged_hello_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(hello("a.example"))
    at = data.draw(st.integers(2, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(tls_hello.BadHello):
        tls_hello.look_at(whole)


def test_two_names_or_too_much() -> None:
    one = b"\0\0\x09" + b"a.example"
    listed = len(one * 2).to_bytes(2, "big") + one * 2
    extension = b"\0\0" + len(listed).to_bytes(2, "big") + listed
    body = b"\3\3" + bytes(32) + b"\0" + b"\0\2\0\0" + b"\1\0"
    body += len(extension).to_bytes(2, "big") + extension
    message = b"\1" + len(body).to_bytes(3, "big") + body
    record = b"\x16\3\1" + len(message).to_bytes(2, "big") + message
    with pytest.raises(tls_hello.BadHello, match="two hosts"):
        tls_hello.look_at(bytearray(record))
    huge = b"\x16\3\1\x40\0" + b"\1\xff\xff\xff" + bytes(100)
    with pytest.raises(tls_hello.BadHello, match="too long"):
        tls_hello.look_at(bytearray(huge))
