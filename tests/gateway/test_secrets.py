"""Secrets through the gateway: the value goes to the host that it is for, and nowhere else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.secret_rewriting import HeldSecret, SecretRewriting
from sandbox_kernel.gateway.secret_values import SecretValue
from sandbox_kernel.secret_declarations import read_secrets
from tests.helpers.waiting import until

from .bound_secrets import EMPTY, FAKE_ID, KEY_ID, PLACEHOLDER, VALUE, echoing, held
from .origins import Handler, Origin, Rig, answering, origin, running


@contextlib.asynccontextmanager
async def at(
    handle: Handler = echoing,
    *,
    hosts: str = "a.example",
    places: Sequence[str] = ("header", "basic"),
    **declared: Any,
) -> AsyncIterator[tuple[Rig, Origin, str]]:
    """A gateway with one secret for ``a.example``, and the server that stands for all hosts."""
    async with origin(handle) as served:
        names = [f"{name}:{served.port}" for name in ("a.example", "b.example", "x.a.example")]
        events: list[dict[str, Any]] = []
        declared = {"insecure": True, **declared}
        declared = {"hosts": [f"{hosts}:{served.port}"], "in": places, **declared}
        rewriting = SecretRewriting([held(**declared)], events.append)
        async with running("*", trusted=names, rewriting=rewriting, events=events) as rig:
            yield rig, served, f"a.example:{served.port}"


def message(
    host: str, path: str = "/", *headers: str, body: bytes = b"", method: str = "GET"
) -> bytes:
    lines = [f"{method} http://{host}{path} HTTP/1.1", f"Host: {host}", *headers]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def test_headers_basic_query_and_cookies() -> None:
    """In the places that are named, each in its form; and the audit has the name."""
    async with at(places=["header", "basic", "query"]) as (rig, served, host):
        path = f"/{PLACEHOLDER}?a=1&key={PLACEHOLDER}&k=%{ord(PLACEHOLDER[0]):02X}{PLACEHOLDER[1:]}"
        headers = (f"X-Key: {PLACEHOLDER}", f"Cookie: a=1; k={PLACEHOLDER}")
        auth = f"Authorization: {basic('user', PLACEHOLDER)}"
        answer = await rig.talk(message(host, path, *headers, auth))
        assert f"X-Key: {VALUE}\r\n" in served.text
        assert f"Cookie: a=1; k={VALUE}\r\n" in served.text
        assert f"Authorization: {basic('user', VALUE)}\r\n" in served.text
        quoted = (
            VALUE.replace("/", "%2F").replace('"', "%22").replace("+", "%2B").replace("=", "%3D")
        )
        assert f"GET /{PLACEHOLDER}?a=1&key={quoted}&k={quoted} HTTP/1.1" in served.text
        assert answer.endswith(b"the end.\n")
        allowed = [event for event in rig.events if event["kind"] == "egress"]
        assert [event["secrets"] for event in allowed] == [["KEY"]]
        assert [e["action"] for e in rig.events if e["kind"] == "secret"] == ["kept"], "in the path"
        assert VALUE not in repr(rig.events)


async def test_an_answer_that_echoes_is_scrubbed() -> None:
    """In reasons, headers, interim answers and bodies, byte by byte; nothing else changes."""
    async with at(places=["header", "basic", "query"]) as (rig, served, host):
        auth = f"Authorization: {basic('user', PLACEHOLDER)}"
        headers = (f"X-Key: {PLACEHOLDER}", "X-Early: 1")
        answer = await rig.talk(message(host, f"/?k={PLACEHOLDER}", *headers, auth))
        assert served.text.count(VALUE) == 1
        assert VALUE.encode() not in answer
        assert b"ABCDEF" not in answer
        assert answer.count(PLACEHOLDER.encode()) >= 5
        assert f"X-Key: {PLACEHOLDER}\r\n".encode() in answer.partition(b"\r\n\r\n")[2]
        shown = answer.rpartition(b"Authorization: Basic ")[2].partition(b"\r\n")[0]
        assert b"ABCDEF" not in base64.b64decode(shown)
        assert len(shown) == len(basic("user", VALUE)) - len("Basic ")


@pytest.mark.parametrize("host", ["b.example", "x.a.example"])
async def test_another_host_gets_the_placeholder(host: str) -> None:
    """And that it was asked for is in the audit, by name."""
    async with at() as (rig, served, bound):
        other = bound.replace("a.example", host)
        auth = f"Authorization: {basic('user', PLACEHOLDER)}"
        answer = await rig.talk(message(other, "/", f"X-Key: {PLACEHOLDER}", auth))
        assert f"X-Key: {PLACEHOLDER}\r\n" in served.text
        assert VALUE not in served.text
        assert answer.startswith(b"HTTP/1.1 200")
        kept, sent = rig.events
        assert (kept["kind"], kept["action"], kept["secret"]) == ("secret", "kept", "KEY")
        assert (kept["host"], kept["reason"]) == (host, "bound to other hosts")
        assert "secrets" not in sent


async def test_hosts_below_a_name() -> None:
    async with at(hosts="*.a.example") as (rig, served, bound):
        await rig.talk(message(bound, "/", f"X-Key: {PLACEHOLDER}"))
        assert VALUE not in served.text
        await rig.talk(message(f"x.{bound}", "/", f"X-Key: {PLACEHOLDER}"))
        assert VALUE in served.text


async def test_plain_http_is_refused() -> None:
    """Unless the declaration says that it may be, and in one line that says what to do."""
    async with at(insecure=False) as (rig, served, host):
        answer = await rig.talk(message(host, "/", f"X-Key: {PLACEHOLDER}"))
        line = f"egress denied: the secret KEY is not sent over plain http to {host} (use https)"
        assert answer.startswith(f"HTTP/1.1 403 {line}\r\n".encode())
        assert served.text == ""
        assert rig.actions() == ["deny"]
        answer = await rig.talk(message(host, "/"))
        assert answer.startswith(b"HTTP/1.1 200"), "other requests are not"


async def test_a_secret_without_a_value_is_named() -> None:
    async with at(value=None) as (rig, served, host):
        answer = await rig.talk(message(host, "/", f"X-Key: {PLACEHOLDER}"))
        assert b"502 egress failed: The secret 'KEY' has no value on this host: gone." in answer
        assert served.text == ""


@pytest.mark.parametrize(
    ("kind", "before", "sent"),
    [
        ("application/json", '{"k": "%s"}', VALUE.replace('"', '\\"')),
        ("application/vnd.x+json; charset=utf-8", '["%s"]', VALUE.replace('"', '\\"')),
        (
            "application/x-www-form-urlencoded",
            "a=%s&b=1",
            quote(VALUE, safe=""),
        ),
        ("text/xml", "<k>%s</k>", VALUE.replace('"', "&quot;")),
        ("text/plain", "%s", VALUE),
    ],
)
async def test_bodies_when_asked_for(kind: str, before: str, sent: str) -> None:
    """In the form that the body's type needs, across pieces; the length is not told then."""
    got = bytearray()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(EMPTY)

    async with at(take, places=["body"]) as (rig, _, host):
        body = (before % PLACEHOLDER).encode()
        whole = message(host, "/", f"Content-Type: {kind}", body=body, method="POST")
        reader, writer = await rig.connect()
        for byte in whole:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert b"200 OK" in await reader.read()
        writer.close()
        head, _, chunks = bytes(got).partition(b"\r\n\r\n")
        assert b"Transfer-Encoding: chunked" in head
        assert b"Content-Length" not in head
        plain = b"".join(chunks.split(b"\r\n")[1::2])
        assert plain.decode() == before % sent
        assert rig.events[-1]["secrets"] == ["KEY"]


async def test_bodies_when_not_asked_for() -> None:
    async with at(answering(EMPTY)) as (
        rig,
        served,
        host,
    ):
        await rig.talk(message(host, "/", body=PLACEHOLDER.encode(), method="POST"))
        assert VALUE not in served.text


async def test_a_compressed_body_that_may_need_a_secret_is_refused() -> None:
    async with at(places=["body"]) as (rig, served, host):
        gzip = message(host, "/", "Content-Encoding: gzip", body=b"x", method="POST")
        assert b"415 the body for a.example" in await rig.talk(gzip)
        assert served.text == ""


async def test_a_compressed_answer_is_refused() -> None:
    """No compression is offered; a server that compresses nevertheless is not passed on."""
    gzip = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx"
    async with at(answering(gzip)) as (rig, served, host):
        answer = await rig.talk(message(host, "/", "Accept-Encoding: gzip, br"))
        assert answer.startswith(b"HTTP/1.1 502 the answer of a.example")
        assert "Accept-Encoding: identity\r\n" in served.text
        assert "gzip" not in served.text
        other = host.replace("a.", "b.")
        assert (await rig.talk(message(other, "/"))).endswith(b"\r\n\r\nx"), "other hosts may"


async def test_a_websocket_that_echoes_is_scrubbed() -> None:
    async def upgraded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = next(row[7:] for row in head.split(b"\r\n") if row.startswith(b"X-Key: "))
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: x\r\n\r\n\x81" + bytes([len(key)]) + key
        )
        await reader.read(1)

    async with at(upgraded) as (rig, served, host):
        ways = ("Upgrade: websocket", "Sec-WebSocket-Extensions: permessage-deflate")
        whole = message(host, "/", f"X-Key: {PLACEHOLDER}", *ways)
        reader, writer = await rig.connect()
        writer.write(whole.replace(b"Connection: close", b"Connection: Upgrade"))
        await reader.readuntil(b"\r\n\r\n")
        frame = await reader.readexactly(2 + len(VALUE))
        assert frame[2:] == PLACEHOLDER.encode()
        assert VALUE in served.text
        assert "deflate" not in served.text
        writer.close()


@pytest.mark.parametrize("header", ["Sec-WebSocket-Accept: x", "Content-Type: application/grpc"])
async def test_headers_do_not_make_a_body_a_stream_of_messages(header: str) -> None:
    """The end of a message waits for nothing; a body that only looks like one waits for more."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert VALUE.encode() in head
        before = b"\1\x0a" if "Web" in header else b"\0\0\0\0\x0a"
        length = len(before) + len(VALUE)
        writer.write(f"HTTP/1.1 200 OK\r\n{header}\r\nContent-Length: {length}\r\n\r\n".encode())
        for byte in before + VALUE.encode():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    async with at(handle) as (rig, _, host):
        answer = await rig.talk(message(host, "/", f"X-Key: {PLACEHOLDER}"))
        assert answer.endswith(PLACEHOLDER.encode())


@contextlib.asynccontextmanager
async def at_aws(handle: Handler) -> AsyncIterator[tuple[Rig, Origin, str, list[Any]]]:
    """A gateway with a key pair for ``a.example``, and what it has recorded of it."""
    async with origin(handle) as served:
        host = f"a.example:{served.port}"
        bound = {"hosts": [host], "insecure": True}
        declared = read_secrets([{"name": "ID", **bound}, {"name": "KEY", "sigv4": "ID", **bound}])
        values = [(FAKE_ID, KEY_ID), (PLACEHOLDER, VALUE)]
        secrets = [
            HeldSecret(one, placeholder, SecretValue(value))
            for one, (placeholder, value) in zip(declared, values, strict=True)
        ]
        events: list[Any] = []
        rewriting = SecretRewriting(secrets, events.append)
        async with running("a.example", trusted=[host], rewriting=rewriting) as rig:
            yield rig, served, host, events


def signed_lines(made: Any) -> list[str]:
    """The headers of a request to AWS that the sandbox has signed with placeholders."""
    from botocore.auth import SigV4Auth
    from botocore.credentials import Credentials

    SigV4Auth(Credentials(FAKE_ID, PLACEHOLDER), "sqs", "eu-central-1").add_auth(made)
    return [f"{name}: {value}" for name, value in made.headers.items()]


async def test_a_key_that_signs_is_never_sent() -> None:
    """Neither in a header that AWS keeps, where another account could read it, nor in a query; and
    no error shows what was put into a header."""
    from botocore.awsrequest import AWSRequest

    async with at_aws(answering(EMPTY)) as (rig, served, host, events):
        for name in ("X-Amz-Meta-Note", "Authorization", "X-Amz-Content-SHA256"):
            for signs in (True, False):
                made = AWSRequest("GET", f"http://{host}/", headers={"X-Other": "x"})
                lines = signed_lines(made) if signs and name != "Authorization" else []
                lines = [line for line in lines if not line.startswith(name)]
                value = basic("x", PLACEHOLDER) if name == "Authorization" else PLACEHOLDER
                query = f"/?key={PLACEHOLDER}"
                answer = await rig.talk(message(host, query, f"{name}: {value}", *lines))
                assert VALUE.encode() not in answer
        for value in (PLACEHOLDER, FAKE_ID):
            made = AWSRequest("GET", f"http://{host}/", headers={"X-Amz-Content-SHA256": value})
            answer = await rig.talk(message(host, "/", *signed_lines(made)))
            assert answer.startswith(b"HTTP/1.1 400 a request to AWS that cannot be signed again")
            assert not any(text in answer for text in (VALUE.encode(), KEY_ID.encode()))
        assert VALUE not in served.text
        assert VALUE not in str(rig.events)
        assert {(event["secret"], event["action"]) for event in events} == {("KEY", "kept")}


async def test_aws_is_signed_again_with_the_real_key() -> None:
    """Also where the signature is over a body whose digest is in no header."""
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    got: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(9))
        writer.write(EMPTY)

    async with at_aws(take) as (rig, _, host, events):
        made = AWSRequest("POST", f"http://{host}/", data=b"some data")
        lines = signed_lines(made)
        answer = await rig.talk(message(host, "/", *lines, body=b"some data", method="POST"))
        assert answer.startswith(b"HTTP/1.1 200")
        assert rig.events[0]["secrets"] == ["ID", "KEY"]
        assert events == []
    [whole] = got
    theirs = AWSRequest("POST", f"http://{host}/", data=b"some data")
    theirs.context["timestamp"] = made.context["timestamp"]
    theirs.headers["X-Amz-Date"] = made.headers["X-Amz-Date"]
    auth = SigV4Auth(Credentials(KEY_ID, VALUE), "sqs", "eu-central-1")
    text = auth.string_to_sign(theirs, auth.canonical_request(theirs))
    signature = auth.signature(text, theirs)
    assert f"Credential={KEY_ID}/".encode() in whole
    assert f"Signature={signature}\r\n".encode() in whole
    assert whole.endswith(b"\r\n\r\nsome data")


async def test_a_change_of_rules_ends_what_waits_to_be_signed() -> None:
    """Bodies that are held in memory are few at a time, so a request may wait for its turn."""
    from botocore.awsrequest import AWSRequest

    async with at_aws(answering(EMPTY)) as (rig, served, host, _):
        service = rig.gateway._service
        service.whole_bodies = asyncio.Semaphore(0)
        made = AWSRequest("POST", f"http://{host}/", data=b"some data")
        request = message(host, "/", *signed_lines(made), body=b"some data", method="POST")
        talking = asyncio.create_task(rig.talk(request))
        await until(lambda: service._under_way)
        rig.gate.set_policy(EgressPolicy())
        assert (await talking).startswith(b"HTTP/1.1 403 egress denied")
        assert served.received == []
