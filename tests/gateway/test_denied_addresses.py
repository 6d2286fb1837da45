"""Rules that deny addresses hold for names on connections that exist already: when the rules
change, and when another rule allows the next request."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sandbox_kernel.egress import EgressPolicy, EgressRule
from sandbox_kernel.gateway.names import Address

from .origins import OK, Handler, Rig, echo, origin, running
from .secure import H2Client, H2Server, securing

HERE = "!127.0.0.0/8"
ANY = EgressRule("a.example", path="/*")
READ = EgressRule("a.example", methods=("GET",))
CHANGE = EgressRule("a.example", methods=("PUT",))
BY_ADDRESS = (READ, HERE, CHANGE)
"""Reading is allowed wherever the name leads, changing is not there."""


def request(method: str, host: str, url: str) -> bytes:
    return f"{method} {url} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split(" ")[1]), (await reader.readexactly(length)).decode()


async def test_a_tunnel_ends() -> None:
    async with origin(echo) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\nx".encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(1) == b"x"
            rig.gate.set_policy(EgressPolicy.of("!192.0.2.0/24", "a.example"))
            writer.write(b"y")
            assert await reader.readexactly(1) == b"y"
            rig.gate.set_policy(EgressPolicy.of(HERE, "a.example"))
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert rig.actions() == ["deny"]


async def test_an_address_is_no_longer_trusted() -> None:
    """A preset has opened it, and is taken away; another rule is for the same name."""
    async with origin(echo) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\nx".encode())
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"x"
            rig.gateway.private_names = ()
            rig.gate.set_policy(EgressPolicy.of("a.example", "b.example"))
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert rig.actions() == ["deny"]


async def test_rules_that_change_while_it_is_dialled() -> None:
    """What was looked up before the change counts for nothing after it."""
    rigs: list[Rig] = []

    async def resolve(name: str, port: int) -> Sequence[Address]:
        rigs[0].gate.set_policy(EgressPolicy.of(HERE, "a.example"))
        return [ipaddress.ip_address("127.0.0.1")]

    async with origin(echo) as served:
        host = f"a.example:{served.port}"
        async with running("a.example", trusted=[host]) as rig:
            rigs.append(rig)
            rig.gateway._dialler._resolve = resolve
            said = await rig.talk(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\nx".encode())
            assert said.startswith(b"HTTP/1.1 403 "), said
            assert rig.actions() == ["deny"]


Change = Callable[[Rig], object]


def stays(rig: Rig) -> None:
    """The next request is one that another rule allows."""


def changes(rig: Rig) -> None:
    rig.gate.set_policy(EgressPolicy.of(HERE, ANY))


@pytest.mark.parametrize("change", [stays, changes])
async def test_plain_http_that_is_kept_alive(change: Change) -> None:
    async with origin() as served:
        host = f"a.example:{served.port}"
        async with running(*BY_ADDRESS, trusted=[host]) as rig:
            reader, writer = await rig.connect()
            writer.write(request("GET", host, f"http://{host}/"))
            assert await answer(reader) == (200, "hello")
            change(rig)
            writer.write(request("PUT", host, f"http://{host}/"))
            status, said = await answer(reader)
            assert status == 403
            assert "a rule denies 127.0.0.0/8" in said
            writer.close()
            assert "PUT" not in served.text


@pytest.mark.parametrize("change", [stays, changes])
@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
async def test_inside_tls(tmp_path: Path, protocol: str, change: Change) -> None:
    server = H2Server()
    handle: Handler = server if protocol == "h2" else OK
    async with securing(tmp_path, *BY_ADDRESS, protocols=(protocol,), handle=handle) as at:
        reader, writer = await at.connect(protocol)
        if protocol == "h2":
            client = H2Client(reader, writer)
            first = client.get("/", authority=at.host)
            assert (await client.response(first))[0] == 200
            change(at.rig)
            second = client.get("/", method="PUT", authority=at.host)
            status, said = (await client.response(second))[0], "a rule denies 127.0.0.0/8"
            assert [sent[":method"] for sent in server.requests] == ["GET"]
        else:
            writer.write(request("GET", at.host, "/"))
            assert (await answer(reader))[0] == 200
            change(at.rig)
            writer.write(request("PUT", at.host, "/"))
            status, said = await answer(reader)
        assert status == 403
        assert "a rule denies 127.0.0.0/8" in said
        writer.transport.abort()


async def test_the_connection_that_tls_began_with(tmp_path: Path) -> None:
    """It was made before any request was known."""
    async with securing(tmp_path, *BY_ADDRESS) as at:
        said = await at.talk(request("PUT", at.host, "/"))
        assert said.startswith(b"HTTP/1.1 403 "), said
        assert b"a rule denies 127.0.0.0/8" in said
