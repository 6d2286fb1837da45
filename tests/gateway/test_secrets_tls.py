"""Secrets inside TLS: the gateway ends it for the hosts that a secret is bound to."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.gateway.secret_rewriting import SecretRewriting

from .secure import H2Server, Secure, securing
from .test_secrets import PLACEHOLDER, VALUE, echoing, held

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


async def test_a_server_that_cannot_prove_who_it_is(tmp_path: Path) -> None:
    """Gets nothing."""
    async with bound(tmp_path, names=("evil.example",)) as at:
        arguments = (at.url, at.proxy, str(at.bundle), PLACEHOLDER)
        shown = await run(sys.executable, "-c", REQUESTS, *arguments)
        assert shown.startswith("502 the certificate of a.example")
        assert VALUE not in at.served.text
