"""Secrets inside TLS: the gateway ends it for the hosts that a secret is bound to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from sandbox_kernel.gateway.secret_rewriting import HeldSecret, SecretRewriting
from sandbox_kernel.gateway.secret_values import SecretValue
from sandbox_kernel.secret_declarations import read_secrets

from .bound_secrets import FAKE_ID, KEY_ID, PLACEHOLDER, VALUE, echoing, held
from .secure import H2Client, H2Request, H2Server, Secure, securing

REQUESTS = """
import sys, requests
url, proxy, bundle, key = sys.argv[1:]
answer = requests.get(url, proxies={"https": proxy}, verify=bundle, headers={"X-Key": key})
print(answer.status_code, answer.text)
"""
HTTPX = """
import sys, httpx, ssl
url, proxy, bundle, key = sys.argv[1:]
verify = ssl.create_default_context(cafile=bundle)
with httpx.Client(http2=True, proxy=proxy, verify=verify) as client:
    answer = client.get(url, headers={"X-Key": key})
    print(answer.http_version, answer.text)
"""


@contextlib.asynccontextmanager
async def bound(folder: Path, **options: Any) -> AsyncIterator[Secure]:
    """A gateway whose sandbox has a secret for a.example, and not for plain http."""
    options.setdefault("handle", echoing)
    rewriting = SecretRewriting([], lambda event: None)
    async with securing(folder, "a.example", rewriting=rewriting, **options) as at:
        rewriting._secrets = (held(hosts=[at.host]),)
        yield at


async def run(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return out.decode()


@pytest.mark.parametrize("client", ["requests", "curl"])
async def test_https(client: str, tmp_path: Path) -> None:
    """The value arrives, encrypted; what comes back has the placeholder."""
    async with bound(tmp_path) as at:
        arguments = (at.url, at.proxy, str(at.bundle), PLACEHOLDER)
        if client == "requests":
            shown = await run(sys.executable, "-c", REQUESTS, *arguments)
        else:
            command = ("curl", "-sS", "--http1.1", "--proxy", at.proxy, "--cacert", str(at.bundle))
            shown = await run(*command, "-H", f"X-Key: {PLACEHOLDER}", at.url)
        assert f"X-Key: {VALUE}\r\n" in at.served.text
        assert f"X-Key: {PLACEHOLDER}" in shown
        assert VALUE not in shown
        assert [event["secrets"] for event in at.rig.events] == [["KEY"]]
        assert at.rig.events[0]["action"] == "allow"


async def test_http2(tmp_path: Path) -> None:
    server = H2Server()
    async with bound(tmp_path, handle=server, protocols=("h2",)) as at:
        arguments = (at.url, at.proxy, str(at.bundle), PLACEHOLDER)
        shown = await run(sys.executable, "-c", HTTPX, *arguments)
        assert shown.startswith("HTTP/2 "), shown
        assert server.requests[0]["x-key"] == VALUE
        assert PLACEHOLDER in shown
        assert VALUE not in shown
        assert [event["secrets"] for event in at.rig.events] == [["KEY"]]


async def test_no_library_logs_a_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever level the host's logs have, as with ``papermill --log-level DEBUG``."""
    for name in ("", "hpack", "hpack.hpack", "hpack.table", "h2", "asyncio"):
        caplog.set_level(logging.DEBUG, name or None)
    server = H2Server()
    async with bound(tmp_path, handle=server, protocols=("h2",)) as at:
        client = H2Client(*await at.connect("h2"))
        await client.response(client.get("/", ("x-key", PLACEHOLDER), authority=at.host))
        assert server.requests[0]["x-key"] == VALUE
    async with bound(tmp_path) as at:
        await at.talk(
            f"GET / HTTP/1.1\r\nHost: {at.host}\r\nX-Key: {PLACEHOLDER}\r\n"
            f"Connection: close\r\n\r\n".encode()
        )
        assert VALUE in at.served.text
    assert not [record for record in caplog.records if VALUE in record.getMessage()]


async def test_a_server_that_cannot_prove_who_it_is(tmp_path: Path) -> None:
    """Gets nothing."""
    async with bound(tmp_path, names=("evil.example",)) as at:
        arguments = (at.url, at.proxy, str(at.bundle), PLACEHOLDER)
        shown = await run(sys.executable, "-c", REQUESTS, *arguments)
        assert shown.startswith("502 the certificate of a.example")
        assert VALUE not in at.served.text


async def test_plain_http_in_a_tunnel_is_read(tmp_path: Path) -> None:
    """Also at a port that is not 80: the host is bound, so its requests are looked at."""
    async with bound(tmp_path) as at:
        reader, writer = await at.tunnel()
        writer.write(f"GET / HTTP/1.1\r\nHost: {at.host}\r\nX-Key: {PLACEHOLDER}\r\n\r\n".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"403 egress denied: the secret KEY is not sent over plain http" in answer
        writer.close()


async def test_http2_answers_that_echo(tmp_path: Path) -> None:
    """In interim headers, headers, a body in small frames and trailers."""

    def answer(connection: Any, stream: int, request: H2Request) -> None:
        key = request["x-key"]
        connection.send_headers(stream, [(":status", "103"), ("link", key)])
        connection.send_headers(stream, [(":status", "200"), ("x-echo", key)])
        for letter in f"<{key}>":
            connection.send_data(stream, letter.encode())
        connection.send_headers(stream, [("x-trailer", key)], end_stream=True)

    server = H2Server(answer=answer)
    async with bound(tmp_path, handle=server, protocols=("h2",)) as at:
        client = H2Client(*await at.connect("h2"))
        stream = client.get("/", ("x-key", PLACEHOLDER), authority=at.host)
        _, body = await client.response(stream)
        assert server.requests[0]["x-key"] == VALUE
        said = repr(client.events)
        assert VALUE not in said
        assert said.count(PLACEHOLDER) >= 3
        assert body == f"<{PLACEHOLDER}>".encode()


async def test_aws_with_http2(tmp_path: Path) -> None:
    """The body is held for its signature, which the real key makes."""
    server = H2Server()
    async with bound(tmp_path, handle=server, protocols=("h2",)) as at:
        made = AWSRequest("POST", f"{at.url}/", data=b"some data")
        SigV4Auth(Credentials(FAKE_ID, PLACEHOLDER), "sqs", "eu-central-1").add_auth(made)
        both = {"hosts": [at.host]}
        names = [{"name": "ID", **both}, {"name": "KEY", "sigv4": "ID", **both}]
        values = [(FAKE_ID, KEY_ID), (PLACEHOLDER, VALUE)]
        at.rig.gateway._service.rewriting._secrets = tuple(  # type: ignore[attr-defined]
            HeldSecret(declared, fake, SecretValue(real))
            for declared, (fake, real) in zip(read_secrets(names), values, strict=True)
        )
        script = (
            "import sys, httpx, ssl, json\n"
            "url, proxy, bundle, headers = sys.argv[1:]\n"
            "verify = ssl.create_default_context(cafile=bundle)\n"
            "with httpx.Client(http2=True, proxy=proxy, verify=verify) as client:\n"
            "    answer = client.post(url, headers=json.loads(headers), content=b'some data')\n"
            "    print(answer.status_code, answer.http_version)\n"
        )
        headers = json.dumps(dict(made.headers.items()))
        shown = await run(sys.executable, "-c", script, at.url, at.proxy, str(at.bundle), headers)
        assert shown == "200 HTTP/2\n"
        [got] = server.requests
        assert got.body == b"some data"
        theirs = AWSRequest("POST", f"{at.url}/", data=b"some data")
        theirs.context["timestamp"] = made.context["timestamp"]
        theirs.headers["X-Amz-Date"] = made.headers["X-Amz-Date"]
        auth = SigV4Auth(Credentials(KEY_ID, VALUE), "sqs", "eu-central-1")
        text = auth.string_to_sign(theirs, auth.canonical_request(theirs))
        assert got["authorization"].endswith(f"Signature={auth.signature(text, theirs)}")
        assert at.rig.events[-1]["secrets"] == ["ID", "KEY"]
