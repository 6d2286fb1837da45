"""Secrets inside TLS that is ended, over HTTP/1.1 and HTTP/2: for hosts that no rule looks at."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import h2.connection
import pytest

from sandbox_kernel.gateway.placeholders import placeholder_for
from sandbox_kernel.gateway.secret_rewriting import HeldSecret, SecretRewriting
from sandbox_kernel.gateway.secret_values import SecretValue
from sandbox_kernel.secret_declarations import read_secrets

from .secure import H2Client, H2Request, H2Server, Secure, securing

VALUE = "the real value 0123456789"
PLACEHOLDER = placeholder_for(VALUE)
BOTH = ("h2", "http/1.1")


def give_secret(at: Secure, *places: str) -> None:
    declared = {"name": "KEY", "hosts": [at.host], "in": list(places)}
    [one] = read_secrets([declared])
    held = HeldSecret(one, PLACEHOLDER, SecretValue(VALUE))
    at.rig.gateway._service.rewriting = SecretRewriting([held], at.rig.events.append)


async def test_over_http_1(tmp_path: Path) -> None:
    async def echo_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(head) + head)
        await writer.drain()

    async with securing(tmp_path, "a.example", handle=echo_head) as at:
        give_secret(at, "header")
        lines = (f"Host: {at.host}", f"Authorization: Bearer {PLACEHOLDER}", "Connection: close")
        answer = await at.talk("\r\n".join(("GET / HTTP/1.1", *lines, "", "")).encode())
        assert f"Authorization: Bearer {VALUE}" in at.served.text or at.served.received
        assert f"Authorization: Bearer {VALUE}" in at.served.text
        assert VALUE.encode() not in answer, "the echo is taken out of the answer"
        assert PLACEHOLDER.encode() in answer
        assert at.rig.events[-1]["secrets"] == ["KEY"]


async def test_over_http_2(tmp_path: Path) -> None:
    """In a header and in a body of another length; taken out of head, body and trailers."""

    def answer(connection: h2.connection.H2Connection, stream: int, request: H2Request) -> None:
        connection.send_headers(stream, [(":status", "200"), ("x-echo", request["x-key"])])
        connection.send_data(stream, bytes(request.body))
        connection.send_headers(stream, [("x-sum", request["x-key"])], end_stream=True)

    server = H2Server(answer=answer)
    async with securing(tmp_path, "a.example", handle=server, protocols=BOTH) as at:
        give_secret(at, "header", "body")
        client = H2Client(*await at.connect("h2"))
        body = f"key={PLACEHOLDER}&more".encode()
        stream = client.get(
            "/",
            ("x-key", PLACEHOLDER),
            ("content-length", str(len(body))),
            method="POST",
            end=False,
            authority=at.host,
        )
        for at_byte in range(0, len(body), 7):
            piece = body[at_byte : at_byte + 7]
            client.connection.send_data(stream, piece, end_stream=at_byte + 7 >= len(body))
        status, echoed = await client.response(stream)
        [request] = server.requests
        assert (status, request["x-key"]) == (200, VALUE)
        assert request.body.decode() == f"key={VALUE}&more"
        assert "content-length" not in dict(request.headers)
        assert echoed == body
        assert VALUE not in str(client.events)
        assert VALUE not in json.dumps(at.rig.events)
        assert at.rig.events[-1]["secrets"] == ["KEY"]
        client._writer.transport.abort()


@pytest.mark.parametrize("path", ["/", "/x?key="])
async def test_a_placeholder_for_another_host_stays_one(tmp_path: Path, path: str) -> None:
    rules = ("a.example", {"host": "b.example", "path": "/*"})
    async with securing(
        tmp_path, *rules, handle=H2Server(), protocols=BOTH, names=("a.example", "b.example")
    ) as at:
        give_secret(at, "header", "query")
        at.host = at.host.replace("a.example", "b.example")
        client = H2Client(*await at.connect("h2", name="b.example"))
        asked = path + PLACEHOLDER
        stream = client.get(asked, ("x-key", PLACEHOLDER), authority=at.host)
        status, text = await client.response(stream)
        assert (status, VALUE.encode() in text) == (200, False)
        assert PLACEHOLDER.encode() in text
        assert [e["action"] for e in at.rig.events if e["kind"] == "secret"] == ["kept"]
        client._writer.transport.abort()
