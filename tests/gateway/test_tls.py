"""TLS that is ended at the gateway: who it is ended for, and what holds inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
import requests
import websockets
from cryptography import x509

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.names import read_target
from sandbox_kernel.gateway.service import Limits
from sandbox_kernel.gateway.tls.authority import Authority
from tests.helpers.waiting import until

from .origins import answering, echo, origin
from .secure import ROOT, Secure, securing, server_context, trusts_root

RULE = {"host": "a.example", "methods": ["GET", "HEAD"], "path": "/v1/*"}


def request(path: str, host: str, *headers: str, method: str = "GET") -> bytes:
    lines = (f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", "")
    return "\r\n".join(lines).encode("latin-1")


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


CLOSE = "Connection: close"


# --- what holds


async def test_methods_and_paths_hold_inside_tls(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE) as at:
        assert status(await at.talk(request("/v1/x?key=1", at.host, CLOSE))) == 200
        answer = await at.talk(request("/v2", at.host, CLOSE))
        line = f"egress denied: {at.host} (no rule allows it; allow it with"
        assert answer.startswith(f"HTTP/1.1 403 {line}".encode())
        answer = await at.talk(request("/v1/x", at.host, CLOSE, method="DELETE"))
        assert status(answer) == 403
        assert at.rig.actions() == ["allow", "deny", "deny"]
        event = at.rig.events[0]
        assert (event["method"], event["path"], event["rule"]) == ("GET", "/v1/x", 1)
        assert at.served.received, "the server was reached"


async def test_each_request_of_a_connection_is_decided(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE) as at:
        answer = await at.talk(
            request("/v1/a", at.host) + request("/v2", at.host) + request("/v1/b", at.host, CLOSE)
        )
        assert [answer.count(b"HTTP/1.1 200"), answer.count(b"HTTP/1.1 403")] == [2, 1]
        assert at.rig.actions() == ["allow", "deny", "allow"]


async def test_another_host_inside_is_refused(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE, "b.example") as at:
        for host in ("b.example", "a.example", "a.example:443", f"b.example:{at.served.port}"):
            assert status(await at.talk(request("/v1/x", host, CLOSE))) == 421
        whole = f"https://b.example:{at.served.port}/v1/x"
        assert status(await at.talk(request(whole, at.host, CLOSE))) == 421
        assert set(at.rig.actions()) == {"deny"}


async def test_another_name_in_the_handshake_is_refused(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE, "b.example") as at:
        with pytest.raises((ssl.SSLError, OSError)):
            await at.connect("http/1.1", name="b.example")
        await until(lambda: at.rig.events)
        assert "TLS for 'b.example'" in at.rig.events[0]["reason"]


@pytest.mark.parametrize("path", ["/v1/%2e%2e/x", "/v1/..", "/v1//x", "/v1\\x", "/v1/%2f"])
async def test_odd_paths_are_refused(tmp_path: Path, path: str) -> None:
    async with securing(tmp_path, RULE) as at:
        assert status(await at.talk(request(path, at.host, CLOSE))) == 403


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Length: 4\r\nContent-Length: 5",
        "Content-Length: 4\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding : chunked",
        "X: y\n Transfer-Encoding: chunked",
    ],
)
async def test_ambiguous_requests_reach_nobody(tmp_path: Path, headers: str) -> None:
    async with securing(tmp_path, {"host": "a.example", "methods": "POST"}) as at:
        sent = request("/", at.host, headers, method="POST") + b"0\r\n\r\n"
        assert status(await at.talk(sent)) in (400, 501)
        assert at.rig.actions() == ["error"]


async def test_rates_count_requests(tmp_path: Path) -> None:
    async with securing(tmp_path, {"host": "a.example", "rate_limit_rpm": 2}) as at:
        answer = await at.talk(3 * request("/", at.host) + request("/", at.host, CLOSE))
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.count(b"HTTP/1.1 429") == 2


# --- who it is ended for


async def test_other_hosts_pass_untouched(tmp_path: Path) -> None:
    """The client sees the server's own certificate."""
    async with securing(tmp_path, RULE | {"host": "z.example"}, "a.example") as at:
        trusts = ssl.create_default_context()
        ROOT.configure_trust(trusts)
        reader, writer = await at.connect(trusts=trusts)
        writer.write(request("/", at.host))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await at.connect()


async def test_a_client_with_its_own_roots_fails_closed(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE) as at:
        trusts = ssl.create_default_context()
        ROOT.configure_trust(trusts)
        with pytest.raises(ssl.SSLCertVerificationError):
            await at.connect(trusts=trusts)
        await until(lambda: at.rig.events)
        [event] = at.rig.events
        assert event["action"] == "error"
        assert "does not accept the gateway's certificate" in event["reason"]


async def test_what_is_neither_tls_nor_http_is_refused(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE) as at:
        reader, writer = await at.tunnel()
        writer.write(b"\0\0\0\x08\x04\xd2\x16\x2f")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert at.rig.actions() == ["deny"]
        assert "neither TLS nor HTTP" in at.rig.events[0]["reason"]
        assert at.served.text == ""
        writer.close()


async def test_plain_http_on_such_a_port_is_read(tmp_path: Path) -> None:
    async with origin() as served:
        rule = RULE | {"ports": [served.port]}
        async with securing(tmp_path, rule, names=("a.example",)) as at:
            at.host = f"a.example:{served.port}"
            at.rig.gateway.private_names = [at.host]
            for path, expected in (("/v1/x", b"HTTP/1.1 200"), ("/v2", b"HTTP/1.1 403")):
                reader, writer = await at.tunnel()
                writer.write(request(path, at.host, CLOSE))
                assert (await reader.read()).startswith(expected)
                writer.close()


async def test_a_server_that_speaks_first_with_a_rate(tmp_path: Path) -> None:
    """Nothing of it can be read, so connections are counted."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.write(await reader.readexactly(4))

    async with origin(greet) as served:
        rule = {"host": "a.example", "ports": [served.port], "rate_limit_rpm": 1}
        async with securing(tmp_path, rule) as at:
            at.host = f"a.example:{served.port}"
            at.rig.gateway.private_names = [at.host]
            reader, writer = await at.tunnel()
            assert await reader.readline() == b"220 hello\r\n"
            writer.write(b"QUIT")
            assert await reader.read() == b"QUIT"
            writer.close()
            reader, writer = await at.tunnel()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert at.rig.actions() == ["allow", "deny"]
            writer.close()


async def test_nothing_is_dialled_if_no_request_could_pass(tmp_path: Path) -> None:
    rule = RULE | {"action": "deny"}
    async with securing(tmp_path, rule) as at:
        answer = await at.rig.talk(f"CONNECT {at.host} HTTP/1.1\r\n\r\n".encode())
        assert status(answer) == 403
        assert b"no rule allows it" in answer
        assert at.rig.resolved == []


# --- servers


@pytest.mark.parametrize("names", [("wrong.example",), ("a.example",)])
async def test_a_server_that_is_not_trusted(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Another host's certificate, and one of an authority that this machine does not know."""
    trusts = trusts_root if names != ("a.example",) else ssl.create_default_context
    async with securing(tmp_path, RULE, names=names, trusts=trusts) as at:
        answer = await at.talk(request("/v1/x", at.host, CLOSE))
        expected = f"HTTP/1.1 502 the certificate of {at.host} is not trusted by this machine: "
        assert answer.startswith(expected.encode())
        assert at.rig.actions() == ["error"]
        assert at.served.text == "", "not a byte of the request has left"


async def test_a_server_without_tls(tmp_path: Path) -> None:
    async with origin(echo) as served, securing(tmp_path, RULE) as at:
        at.host = f"a.example:{served.port}"
        at.rig.gateway.private_names = [at.host]
        answer = await at.talk(request("/v1/x", at.host, CLOSE))
        assert answer.startswith(f"HTTP/1.1 502 TLS with {at.host} failed: ".encode())


async def test_an_answer_that_is_cut_short_is_no_orderly_end(tmp_path: Path) -> None:
    """Without a length only TLS's own end says that all has arrived."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.transport._ssl_protocol._transport.abort()  # type: ignore[attr-defined]

    async with securing(tmp_path, RULE, handle=cut) as at:
        reader, writer = await at.connect("http/1.1")
        writer.write(request("/v1/x", at.host))
        await reader.readuntil(b"\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert at.rig.actions() == ["error"]
        writer.transport.abort()


# --- changes


async def test_a_change_of_rules_ends_a_download(tmp_path: Path) -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nx")
        await reader.read()

    async with securing(tmp_path, RULE, handle=endless) as at:
        reader, writer = await at.connect("http/1.1")
        writer.write(request("/v1/x", at.host))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        at.rig.gate.set_policy(EgressPolicy.of(RULE | {"path": "/v2"}))
        with contextlib.suppress(OSError):
            await reader.read()
        assert at.rig.actions() == ["deny"]
        assert "the rules have changed" in at.rig.events[0]["reason"]
        writer.transport.abort()


async def test_a_rule_that_needs_reading_may_come_later(tmp_path: Path) -> None:
    async with securing(tmp_path, "a.example") as at:
        trusts = ssl.create_default_context()
        ROOT.configure_trust(trusts)
        reader, writer = await at.connect(trusts=trusts)
        at.rig.gate.set_policy(EgressPolicy.of(RULE))
        with contextlib.suppress(OSError):
            assert await reader.read() == b"", "what cannot be read any more has ended"
        writer.transport.abort()
        assert status(await at.talk(request("/v2", at.host, CLOSE))) == 403
        assert status(await at.talk(request("/v1/", at.host, CLOSE))) == 200


async def test_a_stalled_handshake_ends(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE, limits=Limits(head=0.3, idle=20)) as at:
        reader, writer = await at.tunnel()
        writer.write(b"\x16\x03\x01")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert at.rig.actions() == ["error"]


# --- certificates


def test_certificates_are_valid_strictly() -> None:
    """Python 3.13's rules, for names, addresses and very long names."""
    authority = Authority("strict")
    trusts = ssl.create_default_context(cadata=authority.certificate.decode())
    trusts.verify_flags |= ssl.VERIFY_X509_STRICT
    for host in ("a.example", "192.0.2.7", "2001:db8::1", "x" * 60 + "." + "y" * 60 + ".example"):
        target = read_target(host, 443)
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = authority.for_clients(target, "h2").wrap_bio(
            to_server, to_client, server_side=True
        )
        client = trusts.wrap_bio(to_client, to_server, server_hostname=host)
        for _ in range(4):
            for side in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        assert client.version() == "TLSv1.3"
        found = x509.load_der_x509_certificate(client.getpeercert(True) or b"")
        assert found.not_valid_after_utc - found.not_valid_before_utc < timedelta(days=10)


def test_contexts_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_kernel.gateway.tls.authority.MOST_CONTEXTS", 2)
    authority = Authority("bounded")
    a, b, c = (read_target(f"{name}.example", 443) for name in "abc")
    first = authority.for_clients(a, None)
    assert authority.for_clients(a, None) is first
    authority.for_clients(b, None)
    authority.for_clients(c, None)
    assert authority.for_clients(a, None) is not first


def test_keys_never_reach_a_disk(tmp_path: Path) -> None:
    """Of all files that the process opens to write, or that it makes, none."""
    script = (
        "import sys\n"
        "from sandbox_kernel.gateway.names import read_target\n"
        "from sandbox_kernel.gateway.tls.authority import Authority\n"
        "Authority('warm').for_clients(read_target('a.example', 443), None)\n"
        "made = []\n"
        "def hook(event, args):\n"
        "    if event == 'open' and (args[1] is None or set(str(args[1])) & set('wax+')):\n"
        "        made.append(args)\n"
        "sys.addaudithook(hook)\n"
        "Authority('cold').for_clients(read_target('b.example', 443), None)\n"
        "print(made)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=True,
    )
    assert ran.stdout == "[]\n"
    assert list(tmp_path.iterdir()) == []


# --- real clients


async def test_requests(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE) as at:

        def get(path: str) -> tuple[int, str]:
            proxies = {"https": at.proxy}
            found = requests.get(at.url + path, proxies=proxies, verify=str(at.bundle), timeout=20)
            return found.status_code, found.text

        assert await asyncio.to_thread(get, "/v1/x") == (200, "hello")
        code, text = await asyncio.to_thread(get, "/v2")
        assert code == 403
        assert text.startswith(f"egress denied: {at.host} (no rule allows it")


async def test_aiohttp(tmp_path: Path) -> None:
    async with securing(tmp_path, RULE) as at, aiohttp.ClientSession() as session:
        context = at.trusts_gateway()
        for path, expected in (("/v1/x", 200), ("/v2", 403)):
            async with session.get(at.url + path, proxy=at.proxy, ssl=context) as found:
                assert found.status == expected


@pytest.mark.parametrize("way", ["http", "socks5h"])
async def test_curl(tmp_path: Path, way: str) -> None:
    async def curl(at: Secure, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "--max-time", "30", "--cacert", str(at.bundle)),
            *("-x", f"{way}://127.0.0.1:{at.rig.port}", "-w", "%{http_code}", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return output.decode()

    async with securing(tmp_path, RULE) as at:
        assert await curl(at, f"{at.url}/v1/x") == "hello200"
        assert (await curl(at, f"{at.url}/v2")).endswith("403")
        assert (await curl(at, "-X", "PUT", f"{at.url}/v1/x")).endswith("403")


async def test_a_redirect_to_a_denied_host_is_another_request(tmp_path: Path) -> None:
    moved = b"HTTP/1.1 302 Moved\r\nLocation: https://evil.test/\r\nContent-Length: 0\r\n\r\n"
    async with securing(tmp_path, RULE, handle=answering(moved)) as at:

        def get() -> None:
            proxies = {"https": at.proxy}
            requests.get(at.url + "/v1/x", proxies=proxies, verify=str(at.bundle), timeout=20)

        with pytest.raises(requests.exceptions.ProxyError, match=r"egress denied: evil\.test:443"):
            await asyncio.to_thread(get)


async def test_websockets(tmp_path: Path) -> None:
    async def talk(connection: websockets.ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    context = server_context("a.example", protocols=())
    async with websockets.serve(talk, "127.0.0.1", 0, ssl=context) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with securing(tmp_path, RULE) as at:
            at.host = f"a.example:{port}"
            at.rig.gateway.private_names = [at.host]
            url = f"wss://{at.host}"
            trusts = at.trusts_gateway()
            async with websockets.connect(f"{url}/v1/ws", ssl=trusts, proxy=at.proxy) as client:
                await client.send("x" * 200_000)
                assert len(await client.recv()) == 200_000
            with pytest.raises(websockets.InvalidStatus, match="403"):
                await websockets.connect(f"{url}/v2", ssl=trusts, proxy=at.proxy)
        assert sorted(at.rig.actions()) == ["allow", "deny"]


async def test_a_large_body_both_ways(tmp_path: Path) -> None:
    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        data = await reader.readexactly(8_000_000)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8000000\r\n\r\n" + data)
        await writer.drain()

    async with securing(tmp_path, {"host": "a.example", "methods": "PUT"}, handle=back) as at:
        data = os.urandom(8_000_000)

        def put() -> bytes:
            proxies = {"https": at.proxy}
            found = requests.put(
                at.url, data=data, proxies=proxies, verify=str(at.bundle), timeout=60
            )
            return found.content

        assert await asyncio.to_thread(put) == data
        assert at.rig.events[0]["sent"] > 8_000_000
