"""The gateway with real sockets: what passes, what does not, and what the client is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway import closing
from sandbox_kernel.gateway.service import Limits
from tests.helpers.waiting import until

from .origins import Rig, answering, echo, origin, running

EMPTY = b"\r\nContent-Length: 0"
WEBSOCKET = "Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"


def get(
    host: str, path: str = "/", *headers: str, method: str = "GET", version: str = "1.1"
) -> bytes:
    lines = (f"{method} http://{host}{path} HTTP/{version}", f"Host: {host}", *headers, "", "")
    return "\r\n".join(lines).encode("latin-1")


def connect(target: str) -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode("latin-1")


def socks(host: bytes, port: int) -> tuple[bytes, bytes]:
    request = b"\5\1\0\3" + bytes([len(host)]) + host + port.to_bytes(2, "big")
    return b"\5\1\0", request


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


CLOSE = "Connection: close"


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


# --- what passes


async def test_plain_http_is_forwarded_in_origin_form() -> None:
    async with origin() as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            answer = await rig.talk(
                get(host, "/x?y=1", "Proxy-Connection: keep-alive", "Proxy-Secret: x", "TE: x")
                + get(host, "/z", "X-Hop: 1", "Connection: close, X-Hop", "Keep-Alive: 5")
            )
            assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2
            assert answer.endswith(b"hello")
            rest = f" HTTP/1.1\r\nHost: {host}\r\n\r\n"
            assert served.text == f"GET /x?y=1{rest}GET /z{rest}"
            assert len(served.received) == 1, "the second request uses the same connection"
            assert rig.actions() == ["allow", "allow"]
            event = rig.events[0]
            assert (event["host"], event["port"], event["path"]) == ("a.example", served.port, "/x")
            assert (event["method"], event["rule"], event["kind"]) == ("GET", 1, "egress")
            assert event["received"] > 5


async def test_a_connect_tunnel_passes_bytes_both_ways_with_half_close() -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()  # to the end
        writer.write(b"%d" % len(data))

    async with origin(count) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(connect(host) + b"x" * 1000)
            assert (await read_head(reader)).startswith(b"HTTP/1.1 200 ")
            writer.write(b"x" * 1_000_000)
            writer.write_eof()
            assert await reader.read() == b"1001000"
            writer.close()
            await until(lambda: rig.gateway.connections == 0)
            assert rig.events[0]["sent"] == 1_001_000
            assert rig.events[0]["received"] == 7


async def test_socks_clients_are_served_on_the_same_port() -> None:
    async with origin(echo) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            greeting, request = socks(b"a.example", served.port)
            writer.write(greeting + request + b"ping")
            assert await reader.readexactly(2) == b"\5\0"
            assert (await reader.readexactly(10))[:2] == b"\5\0"
            assert await reader.readexactly(4) == b"ping"
            writer.close()
            assert rig.resolved == ["a.example"], "the name is resolved here, not by the client"


async def test_a_server_that_speaks_first() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.write(await reader.readexactly(4))

    async with origin(greet) as served:
        at = ("a.example", served.port)
        name = f"a.example:{served.port}"
        async with running("a.example", trusted=[name], transparent=at) as rig:
            reader, writer = await rig.connect()
            assert await reader.readline() == b"220 hello\r\n"
            writer.write(b"QUIT")
            assert await reader.read() == b"QUIT"
            writer.close()


async def test_post_bodies_and_chunks_are_framed_anew() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"3;ext=1\r\nabc\r\n0\r\nTrailer: 1\r\n\r\n")

    async with origin(answer) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            head = get(host, "/", "Transfer-Encoding: chunked", CLOSE, method="POST")
            answered = await rig.talk(head, b"2;x\r\nhi\r\n0\r\nX: y\r\n\r\n")
            assert answered.endswith(b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
            assert served.text.endswith("\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
            # A client of HTTP/1.0 gets the content alone, to the end.
            old = get(host, "/", "Content-Length: 5", method="POST", version="1.0")
            answered = await rig.talk(old, b"0\r\n\r\n")
            assert answered.endswith(b"Connection: close\r\n\r\nabc")


@pytest.mark.parametrize(
    ("method", "response", "expected"),
    [
        (
            "HEAD",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 99\r\n\r\n",
        ),
        (
            "GET",
            b"HTTP/1.1 204 None\r\n\r\n",
            b"HTTP/1.1 204 None\r\nConnection: close\r\n\r\n",
        ),
        (
            "GET",
            b"HTTP/1.1 304 Same\r\nETag: x\r\n\r\n",
            b"HTTP/1.1 304 Same\r\nEtag: x\r\nConnection: close\r\n\r\n",
        ),
        (
            "GET",
            b"HTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 103 Hints\r\n\r\n"
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        ),
    ],
)
async def test_responses_without_a_body(method: str, response: bytes, expected: bytes) -> None:
    async with origin(answering(response)) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            assert await rig.talk(get(host, "/", CLOSE, method=method)) == expected


async def test_a_response_without_a_length_ends_with_its_connection() -> None:
    async with origin(answering(b"HTTP/1.1 200 OK\r\n\r\nall of it", close=True)) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            answer = await rig.talk(get(host))
            assert answer.endswith(b"Connection: close\r\n\r\nall of it")


async def test_expect_continue_is_between_client_and_server() -> None:
    async def careful(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n" + await reader.readexactly(3))

    async with origin(careful) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            more = ("Content-Length: 3", "Expect: 100-continue", CLOSE)
            writer.write(get(host, "/", *more, method="PUT"))
            assert await read_head(reader) == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"abc")
            assert (await reader.read()).endswith(b"abc")
            writer.close()


async def test_websockets_pass() -> None:
    async def switch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 101 Switching\r\n{WEBSOCKET}\r\n".encode())
        await echo(reader, writer)

    async with origin(switch) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(get(host, "/ws", *WEBSOCKET.strip().split("\r\n")) + b"early")
            assert (await read_head(reader)).startswith(b"HTTP/1.1 101 ")
            assert await reader.readexactly(5) == b"early"
            writer.close()
            # Not asked for, so not passed on.
            assert status(await rig.talk(get(host))) == 502


async def test_a_used_connection_that_the_server_has_closed_is_replaced() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")

    async with origin(once) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            answer = await rig.talk(get(host) + get(host, "/2", CLOSE))
            assert answer.count(b"200 OK") == 2
            assert len(served.received) == 2


# --- what does not pass


async def test_what_must_not_happen_twice_is_sent_once() -> None:
    """A server that closes a used connection may have done what it was asked for."""
    methods: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            methods.append((await read_head(reader)).split(b" ")[0])
            if methods[-1] == b"POST":
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with origin(handle) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            answer = await rig.talk(
                get(host) + get(host, "/pay", "Content-Length: 0", CLOSE, method="POST")
            )
            assert methods == [b"GET", b"POST"]
            assert b"502 the server closed the connection without an answer" in answer


@pytest.mark.parametrize("first", [b"204 No Content\r\nContent-Length: 41", b"200 OK" + EMPTY])
async def test_an_answer_that_nobody_asked_for_is_not_the_next_ones(first: bytes) -> None:
    """Neither a body where there is none, nor a second answer to one request."""
    unasked = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_head(reader)
        if b"/first" in head:
            writer.write(b"HTTP/1.1 " + first + b"\r\n\r\n" + unasked)
            await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nright")

    async with origin(handle) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            answer = await rig.talk(get(host, "/first") + get(host, "/", CLOSE))
            assert answer.endswith(b"\r\n\r\nright"), answer
            assert b"bad" not in answer


async def test_a_denied_request_is_answered_with_the_reason() -> None:
    async with running("a.example", default="deny") as rig:
        line = 'egress denied: b.example:80 (no rule allows it; allow it with egress=["b.example"])'
        answer = await rig.talk(get("b.example", "/secret?key=1", CLOSE))
        assert answer.startswith(f"HTTP/1.1 403 {line}\r\n".encode())
        assert answer.endswith(f"\r\n\r\n{line}\n".encode()[-len(line) - 1 :])
        line = line.replace(":80", ":443")
        answer = await rig.talk(connect("b.example:443"))
        assert answer.startswith(f"HTTP/1.1 403 {line}\r\n".encode())
        answer = await rig.talk(*socks(b"b.example", 443))
        assert answer[:4] == b"\5\0\5\2"
        assert rig.actions() == ["deny"] * 3
        assert rig.events[0]["path"] == "/secret"
        assert "key" not in str(rig.events)
        assert rig.resolved == [], "names that are not allowed are not even resolved"


async def test_an_empty_list_denies_everything() -> None:
    async with running() as rig:
        assert status(await rig.talk(connect("a.example:443"))) == 403
        assert status(await rig.talk(get("a.example", "/", CLOSE))) == 403


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"),
        *("1.1.1.1", "[2606:4700::1111]", "224.0.0.1", "[fe80::1]", "[64:ff9b::7f00:1]"),
    ],
)
async def test_addresses_need_a_rule_for_addresses(host: str) -> None:
    async with running("*", default="allow") as rig:
        assert status(await rig.talk(connect(f"{host}:443"))) == 403
        assert status(await rig.talk(get(host, "/", CLOSE))) == 403
        assert rig.actions() == ["deny", "deny"]


@pytest.mark.parametrize(
    "host",
    [
        *("2130706433", "0177.0.0.1", "0x7f.1", "127.1", "a.example..", "a..example"),
        *("[fe80::1%1]", "a%2eexample", "u@a.example", "[a.example]", "t\xe4st.example"),
        "a\0.example",
    ],
)
async def test_names_in_odd_forms_are_refused(host: str) -> None:
    async with running("*", default="allow") as rig:
        assert status(await rig.talk(connect(f"{host}:443"))) == 400
        answer = await rig.talk(*socks(host.encode("latin-1"), 443))
        assert answer[:4] == b"\5\0\5\2"
        assert "allow" not in rig.actions()
        assert rig.resolved == []


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fd00:ec2::254"),
        *("100.64.0.1", "224.0.0.1", "0.0.0.0", "64:ff9b::a00:1", "2002:7f00:1::1", "fe80::1"),
    ],
)
async def test_a_name_cannot_lead_to_such_an_address(address: str) -> None:
    async with running("*", default="allow", names={"a.example": [address]}) as rig:
        answer = await rig.talk(connect("a.example:443"))
        assert status(answer) == 403
        assert b"has the address" in answer
        assert status(await rig.talk(get("a.example", "/", CLOSE))) == 403
        assert rig.actions() == ["deny", "deny"]


async def test_other_ports_are_not_allowed() -> None:
    async with origin() as served:
        host = f"a.example:{served.port}"
        async with running("a.example:443", "b.example:22", trusted=[host]) as rig:
            assert status(await rig.talk(connect(host))) == 403
            assert status(await rig.talk(get(host, "/", CLOSE))) == 403
            assert status(await rig.talk(connect("a.example:22"))) == 403
            assert served.received == []


async def test_a_second_request_for_another_host_is_decided_anew() -> None:
    empty = answering(b"HTTP/1.1 200 B\r\nContent-Length: 0\r\n\r\n")
    async with origin() as served, origin(empty) as other:
        a, b = f"a.example:{served.port}", f"b.example:{other.port}"
        async with running("a.example", "b.example", trusted=[a, b]) as rig:
            answer = await rig.talk(get(a) + get("c.example") + get(b) + get(a, "/", CLOSE))
            statuses = [line for line in answer.split(b"\r\n") if b"HTTP/1.1 " in line]
            assert [b"200 OK" in line for line in statuses] == [True, False, False, True]
            assert b" 403 " in statuses[1]
            assert b" 200 B" in statuses[2]
            assert rig.actions() == ["allow", "deny", "allow", "allow"]
            assert "c.example" not in served.text + other.text


SMUGGLED = [
    ("Content-Length: 4\r\nContent-Length: 5", b"GET / HTTP/1.1\r\n\r\n"),
    ("Content-Length: 4\r\nTransfer-Encoding: chunked", b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
    ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"0\r\n\r\n"),
    ("Transfer-Encoding : chunked", b"0\r\n\r\n"),
    ("Transfer-Encoding:\x0bchunked", b"0\r\n\r\n"),
    ("X: y\n Transfer-Encoding: chunked", b"0\r\n\r\n"),
    ("Content-Length: +4", b"abcd"),
    ("Host: b.example", b""),
]


@pytest.mark.parametrize(("headers", "body"), SMUGGLED)
async def test_ambiguous_requests_reach_nobody(headers: str, body: bytes) -> None:
    async with origin() as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            answer = await rig.talk(get(host, "/", headers, method="POST"), body)
            assert status(answer) in (400, 501)
            assert answer.count(b"HTTP/1.1 ") == 1
            assert served.received == []


async def test_a_pipelined_request_is_not_a_body() -> None:
    """What follows a body is the next request, and is decided as such."""
    async with origin() as served:
        host = f"a.example:{served.port}"
        async with running({"host": "a.example", "path": "/ok"}, trusted=[host]) as rig:
            body = b"abc"
            answer = await rig.talk(
                get(host, "/ok", "Content-Length: 3", method="POST")
                + body
                + get(host, "/forbidden", CLOSE)
            )
            assert answer.count(b"HTTP/1.1 200 ") == 1
            assert answer.count(b"HTTP/1.1 403 ") == 1
            assert "forbidden" not in served.text


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 1\n\na",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switch\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
        b"",
    ],
)
async def test_ambiguous_responses_are_not_passed_on(response: bytes) -> None:
    async with origin(answering(response, close=True)) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            answer = await rig.talk(get(host))
            final = answer[answer.rindex(b"HTTP/1.1 ") :]
            assert status(final) == 502
            assert rig.actions() == ["error"]


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        (b"HTTP/1.1 102 Processing\r\n\r\n", b"too many interim responses"),
        (b"A: " + b"b" * 1000 + b"\r\n", b"the head is longer than 64 KiB"),
    ],
)
async def test_an_answer_that_never_begins(piece: bytes, why: bytes) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"" if piece.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(piece)
            await writer.drain()

    async with origin(flood) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            answer = await rig.talk(get(host))
            assert why in answer
            assert answer.count(b"HTTP/1.1 102 ") <= 16
            assert answer.count(b"HTTP/1.1 502 ") == 1


async def test_an_upgrade_that_the_server_does_not_take() -> None:
    """What follows are requests, and each is decided; HTTP/2 without TLS is never asked for."""
    async with origin() as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            upgrade = ("HTTP2-Settings: AAA", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings")
            answer = await rig.talk(
                get(host, "/1", *WEBSOCKET.strip().split("\r\n"))
                + get(host, "/2", *upgrade)
                + get("denied.example", "/3", CLOSE)
            )
            assert [status(part) for part in answer.split(b"HTTP/1.1")[1:]] == [200, 200, 403]
            assert "h2c" not in served.text
            assert "Http2" not in served.text
            assert rig.actions() == ["allow", "allow", "deny"]


async def test_other_kinds_of_socks_are_refused_at_once() -> None:
    async with running("*") as rig:
        assert await rig.talk(b"\4\1\1\xbb\x7f\0\0\1user\0") == b"\0\x5b" + bytes(6)
        assert await rig.talk(b"\4\1\1\xbb\0\0\0\1u\0a.example\0") == b"\0\x5b" + bytes(6)
        for command in (2, 3):  # BIND, UDP ASSOCIATE
            asked = bytes((5, 1, 0, 5, command, 0, 1, 192, 0, 2, 1, 0, 80))
            assert await rig.talk(asked) == b"\5\0\5\7\0\1" + bytes(6)
        assert await rig.talk(b"\5\1\2") == b"\5\xff"
        assert rig.resolved == []


async def test_a_response_that_breaks_off_is_not_an_orderly_end() -> None:
    cut = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", close=True)
    async with origin(cut) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(get(host))
            await read_head(reader)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()
            assert rig.actions() == ["error"]


@pytest.mark.parametrize(
    "path", ["/v1/%2e%2e/x", "/v1/../x", "/v1//x", "/v1\\x", "/v1/%2fx", "/v1/\xe4", "/v1/%5cx"]
)
async def test_odd_paths_are_refused_where_rules_look_at_paths(path: str) -> None:
    async with origin() as served:
        a, b = f"a.example:{served.port}", f"b.example:{served.port}"
        rules: list[Any] = [{"host": "a.example", "path": "/v1/*"}, "b.example"]
        async with running(*rules, trusted=[a, b]) as rig:
            assert status(await rig.talk(get(a, path, CLOSE))) == 403
            assert status(await rig.talk(get(b, path, CLOSE))) == 200


async def test_methods_and_paths_hold_for_plain_http_on_every_way() -> None:
    rule = {"host": "a.example", "methods": "GET", "path": "/v1/*"}
    async with running(rule) as rig:
        for way in (b"", connect("a.example:80"), b"".join(socks(b"a.example", 80))):
            for method, path in (("POST", "/v1/x"), ("GET", "/v2/x")):
                request = get("a.example", path, CLOSE, method=method)
                if way:
                    request = request.replace(b"http://a.example", b"")
                answer = await rig.talk(way + request)
                assert b"HTTP/1.1 403 egress denied: a.example:80" in answer
        # Nothing of an encrypted connection can be read.
        answer = await rig.talk(connect("a.example:443"))
        assert b"needs the extra 'gateway'" in answer.split(b"\r\n")[0]
        assert rig.resolved == []


async def test_a_redirect_to_a_denied_host_is_another_request() -> None:
    moved = b"HTTP/1.1 302 Moved\r\nLocation: http://evil.test/\r\nContent-Length: 0\r\n\r\n"
    async with origin(answering(moved)) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            process = await asyncio.create_subprocess_exec(
                *("curl", "-sS", "-L", "-x", f"http://127.0.0.1:{rig.port}", f"http://{host}/"),
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await process.communicate()
            assert output.startswith(b"egress denied: evil.test:80 (no rule allows it")


async def test_a_relayed_connect_is_just_another_host() -> None:
    """A proxy behind the gateway: only by a rule for it, and no way past the rules before that."""
    async with origin(echo) as served:
        host = f"proxy.example:{served.port}"
        async with running("proxy.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(connect(host))
            await read_head(reader)
            writer.write(connect("b.example:443"))
            assert await read_head(reader) == connect("b.example:443"), "that proxy's business"
            writer.close()
            # A second CONNECT to the gateway itself, after a request.
            answer = await rig.talk(get("b.example") + connect("b.example:443"))
            assert [status(part) for part in answer.split(b"\n\r\n")[0:1]] == [403]
            assert b" 400 " in answer


# --- names inside: SNI and Host


def hello(name: str) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("way", ["connect", "socks", "transparent"])
@pytest.mark.parametrize("name", ["a.example", "b.example"])
async def test_tls_must_be_for_the_host_that_was_allowed(way: str, name: str) -> None:
    async with origin(echo) as served:
        host = f"a.example:{served.port}"
        at = ("a.example", served.port) if way == "transparent" else None
        async with running("a.example", "b.example", trusted=[host], transparent=at) as rig:
            reader, writer = await rig.connect()
            if way == "connect":
                writer.write(connect(host))
                await read_head(reader)
            elif way == "socks":
                writer.write(b"".join(socks(b"a.example", served.port)))
                await reader.readexactly(12)
            first = hello(name)
            writer.write(first[:3])
            await writer.drain()
            writer.write(first[3:])
            if name == "a.example":
                assert await reader.readexactly(len(first)) == first
            else:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
                assert served.text == "", "not a byte has arrived"
                assert rig.actions() == ["deny"]
                assert "TLS for 'b.example'" in rig.events[0]["reason"]
            writer.close()


async def test_transparent_http_is_decided_by_request_and_host() -> None:
    rule = {"host": "a.example", "methods": "GET"}
    names = {"a.example": ["127.0.0.1"]}
    async with running(rule, transparent=("a.example", 80), names=names) as rig:
        post = b"POST / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n"
        assert status(await rig.talk(post)) == 403
        other = b"GET / HTTP/1.1\r\nHost: b.example\r\n\r\n"
        assert status(await rig.talk(other)) == 421
        whole = b"GET http://b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n"
        assert status(await rig.talk(whole)) == 421
        # Allowed, but this name has the loopback's address.
        plain = b"GET / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n"
        answer = await rig.talk(plain)
        assert b"403 egress denied: a.example:80 (has the address 127.0.0.1" in answer
        assert rig.actions() == ["deny"] * 4


async def test_a_transparent_connection_that_is_denied_is_reset() -> None:
    async with running("a.example", transparent=("b.example", 5432)) as rig:
        reader, writer = await rig.connect()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert rig.actions() == ["deny"]
    async with running("*", default="allow", transparent=("127.1", 443)) as rig:
        assert await rig.talk() == b""
        assert rig.actions() == ["error"]


# --- limits and changes


async def test_failures_of_the_server_are_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"a.example:{unused.getsockname()[1]}"
        async with running("a.example", trusted=[host]) as rig:
            assert status(await rig.talk(connect(host))) == 502
            assert status(await rig.talk(get(host, "/", CLOSE))) == 502
            name, _, port = host.rpartition(":")
            assert (await rig.talk(*socks(name.encode(), int(port))))[:4] == b"\5\0\5\4"
            assert rig.actions() == ["error"] * 3


async def test_slow_clients_are_answered_and_closed() -> None:
    async with running("a.example", limits=Limits(head=0.05, idle=20)) as rig:
        assert status(await rig.talk(b"GET http://a.exa")) == 408
        assert status(await rig.talk(b"")) == 408
        assert (await rig.talk(b"\5")).startswith(b"\5\1")
        assert await rig.talk(b"\4\1\0\x50\1\1\1\1x\0") == b"\0\x5b" + bytes(6)
        assert status(await rig.talk(b"\x16\3\1")) == 400


async def test_idle_connections_end() -> None:
    async with origin(echo) as served:
        host = f"a.example:{served.port}"
        limits = Limits(head=20, idle=0.05, opaque=0.05)
        async with running("a.example", trusted=[host], limits=limits) as rig:
            answer = await rig.talk(connect(host))
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert rig.actions() == ["error"]
        limits = Limits(head=20, idle=0.05)
        async with running("a.example", trusted=[host], limits=limits) as rig:
            reader, writer = await rig.connect()
            writer.write(connect(host))
            await read_head(reader)
            await asyncio.sleep(0.2)
            writer.write(b"still there")  # a database session may be idle for long
            assert await reader.readexactly(11) == b"still there"
            writer.close()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with origin(silent) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host], limits=limits) as rig:
            assert status(await rig.talk(get(host))) == 504


async def test_a_response_that_never_ends_takes_no_memory() -> None:
    """A client that does not read stops the server."""
    written = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            written += 65536

    async with origin(endless) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(get(host))
            await read_head(reader)
            before = -1
            while written != before:  # until nothing moves any more
                before = written
                await asyncio.sleep(0.2)
            assert written < 64 * 1024 * 1024
            writer.transport.abort()
            await until(lambda: rig.gateway.connections == 0)


async def test_connections_are_bounded() -> None:
    async with origin(echo) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host], max_connections=1) as rig:
            reader, writer = await rig.connect()
            writer.write(connect(host))
            await read_head(reader)
            assert status(await rig.talk(get(host))) == 503
            writer.close()
            await until(lambda: rig.gateway.connections == 0)
            answer = await rig.talk(get("b.example", "/", CLOSE))
            assert status(answer) == 403, "there is room again"


async def test_a_rate_limit_is_told_with_when_to_come_back() -> None:
    rule = {"host": "a.example", "rate_limit_rpm": 1}
    async with running(rule, names={"a.example": ["10.0.0.1"]}) as rig:
        await rig.talk(get("a.example", "/", CLOSE))
        answer = await rig.talk(get("a.example", "/", CLOSE))
        assert status(answer) == 429
        assert b"\r\nRetry-After: 60\r\n" in answer
        assert rig.events[-1]["action"] == "deny"


async def test_a_change_of_rules_ends_what_is_no_longer_allowed() -> None:
    async with origin(echo) as served:
        a, b = f"a.example:{served.port}", f"b.example:{served.port}"
        async with running("a.example", "b.example", trusted=[a, b]) as rig:
            pairs = [await rig.connect(), await rig.connect()]
            for (reader, writer), host in zip(pairs, (a, b), strict=True):
                writer.write(connect(host))
                await read_head(reader)
            rig.gate.set_policy(EgressPolicy.of("b.example"))
            (reader, writer), (other, out) = pairs
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            out.write(b"still here")
            assert await other.readexactly(10) == b"still here"
            assert rig.actions() == ["deny"]
            assert "the rules have changed" in rig.events[0]["reason"]
            assert status(await rig.talk(connect(a))) == 403
            writer.close()
            out.close()


async def test_a_change_of_rules_ends_a_download() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nx")
        await reader.read()

    async with origin(endless) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(get(host))
            await read_head(reader)
            rig.gate.set_policy(EgressPolicy())
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()
            assert rig.actions() == ["deny"]


async def test_a_cancelled_connection_leaves_nothing_open() -> None:
    async with origin(echo) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            ours, theirs = socket.socketpair()
            served_end = await asyncio.open_connection(sock=theirs)
            task = asyncio.create_task(rig.gateway.serve(*served_end))
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(connect(host))
            await read_head(reader)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert rig.gateway.connections == 0
            assert await reader.read() == b""
            writer.close()


async def test_nobody_is_let_down_by_a_failing_audit() -> None:
    def broken(event: dict[str, Any]) -> None:
        raise RuntimeError("the disk is full")

    async with running("a.example") as rig:
        rig.gateway._service._audit = broken
        assert status(await rig.talk(connect("b.example:443"))) == 403


# --- real clients


async def curl(rig: Rig, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--max-time", "30", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@pytest.mark.parametrize("way", ["http", "socks5h", "socks5", "tunnel"])
async def test_curl(way: str) -> None:
    async with origin() as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            proxy = f"{'http' if way == 'tunnel' else way}://127.0.0.1:{rig.port}"
            more = ["-p"] if way == "tunnel" else []
            if way == "socks5":  # curl resolves, and asks for an address
                more = ["--resolve", f"a.example:{served.port}:127.0.0.1"]
            code, output = await curl(rig, "-x", proxy, *more, f"http://{host}/")
            if way == "socks5":
                assert code != 0
                assert rig.actions() == ["deny"]
            else:
                assert (code, output) == (0, "hello")
            code, output = await curl(rig, "-x", proxy, "-v", "https://b.example/")
            assert code != 0
            if way in ("http", "tunnel"):
                assert "403 egress denied: b.example:443 (no rule allows it" in output


async def test_curl_sends_a_large_file() -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(8_000_000)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nall!")

    async with origin(count) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            process = await asyncio.create_subprocess_exec(
                *("curl", "-sS", "-x", f"http://127.0.0.1:{rig.port}", "--data-binary", "@-"),
                f"http://{host}/",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await process.communicate(b"x" * 8_000_000)
            assert output == b"all!"


async def test_the_standard_library_shows_the_reason() -> None:
    """What urllib says when CONNECT fails is what a person sees in the notebook."""
    from urllib.error import URLError
    from urllib.request import ProxyHandler, build_opener

    async with running("a.example") as rig:
        opener = build_opener(ProxyHandler({"https": f"http://127.0.0.1:{rig.port}"}))
        with pytest.raises(URLError, match=r"403 egress denied: b.example:443 \(no rule allows it"):
            await asyncio.to_thread(opener.open, "https://b.example/", None, 20)


async def test_what_a_client_does_not_read_is_not_cut_off_in_silence() -> None:
    """An orderly end could be taken for that of the data."""
    ended = asyncio.Event()

    async def unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 32_000_000)
        await closing.close(writer, seconds=0.2)
        ended.set()

    async with origin(unread) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        await ended.wait()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
