"""Egress rules of hosted sandboxes: held by the service where it can hold them all, else by the
gateway of this host, while the sandbox has no network of the service's."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.spec import SandboxSpec

from ..emulators.running import Running
from ..helpers.echo_gateway import DIAL, Echo, echo_for_all
from ..helpers.waiting import until
from .sandboxes import LIMIT, sandbox
from .services import Hosted

LOG = logging.getLogger(__name__)
FETCH = """
import socket, sys
def fetch(address, host):
    try:
        with socket.create_connection((address, 80), timeout=30) as sock:
            sock.sendall(b"GET / HTTP/1.1\\r\\nHost: %s\\r\\n\\r\\n" % host.encode())
            return sock.recv(1000).decode().rpartition("\\r\\n")[2] or "ended"
    except OSError as error:
        return error.strerror
print(fetch("192.0.2.1", "data.example"))
print(fetch("192.0.2.2", "elsewhere.example"))
"""
ONLY_THE_GATEWAY = "data.example:443"
"""No service has rules by port."""


async def fetched(handle: SandboxHandle) -> list[str]:
    """What the sandbox gets by the network of the service: what may be reached, and what not."""
    ran = await handle.exec("python3", ["-c", FETCH], timeout=LIMIT)
    return ran.output.splitlines()


@contextlib.asynccontextmanager
async def kernel(client: SandboxClient, *rules: str) -> AsyncIterator[SandboxedKernel]:
    made = await SandboxedKernel.create(client, SandboxSpec(egress=EgressPolicy.of(*rules)), LOG)
    try:
        yield made
    finally:
        await made.remove()


async def through(kernel: SandboxedKernel, way: str) -> str:
    """What a program in the sandbox gets at an address."""
    ran = await kernel.handle.exec("python3", ["-c", f"{DIAL}print(talk({way}))"], timeout=LIMIT)
    return ran.output


PROXY, BY_NAME = '("127.0.0.1", 3128)', '("data.example", 443)'
BY_PROXY, NAMED = "b'proxy\\nhello\\nthe end\\n'\n", "b'data.example 443\\nhello\\nthe end\\n'\n"


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Echo:
    return echo_for_all(monkeypatch)


async def test_rules_that_the_service_can_hold_are_held_there(
    hosted: Hosted, client: Any, gateway: Echo
) -> None:
    """There is a network, and no gateway in it."""
    async with kernel(client, *hosted.allowed) as made:
        assert (await made.handle.info()).egress == "backend"
        found = await fetched(made.handle)
        assert found == ["by the provider's network", "ended"]
        ran = await made.handle.exec("env", timeout=LIMIT)
        assert "_PROXY" not in ran.output
        assert "refused" in await through(made, PROXY)


async def test_all_other_rules_go_through_the_gateway(
    hosted: Hosted, client: Any, gateway: Echo
) -> None:
    """All of a policy's, so that their order means what it says; and there is no other network."""
    async with kernel(client, *hosted.allowed, ONLY_THE_GATEWAY) as made:
        assert (await made.handle.info()).egress == "gateway"
        assert await fetched(made.handle) == 2 * ["Network is unreachable"]
        assert await through(made, PROXY) == BY_PROXY
        assert await through(made, BY_NAME) == NAMED


async def test_without_rules_there_is_no_network(client: Any) -> None:
    async with sandbox(client) as handle:
        assert (await handle.info()).egress == "closed"
        assert await fetched(handle) == 2 * ["Network is unreachable"]


async def test_the_network_of_the_emulator_is_one(hosted: Hosted, client: Any) -> None:
    """So that the tests above show something."""
    async with sandbox(client, egress=["default=allow"]) as handle:
        assert await fetched(handle) == 2 * ["by the provider's network"]


async def test_a_network_that_is_not_switched_off_is_refused(
    hosted: Hosted, client: Any, emulator: Running
) -> None:
    """The service is asked what it has made of the rules; nothing is left."""
    hosted.settings(emulator, keep_network=True)
    with pytest.raises(SandboxError, match=r"could not be switched off|not the one"):
        await client.create(SandboxSpec(egress=EgressPolicy.of(ONLY_THE_GATEWAY)))
    assert hosted.all(emulator) == []


async def test_a_machine_where_commands_are_not_root(
    hosted: Hosted,
    client: Any,
    emulator: Running,
    gateway: Echo,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They have the proxy, but nothing by name, and that is said."""
    hosted.settings(emulator, root=False)
    async with kernel(client, ONLY_THE_GATEWAY) as made:
        assert await through(made, PROXY) == BY_PROXY
        assert "gaierror" in await through(made, BY_NAME)
    assert "only programs that use a proxy find a way out" in caplog.text


WAIT_IN_A_CONNECTION = """
import os, socket, time
sock = socket.create_connection(("data.example", 443))
sock.sendall(b"before, ")
open("begun", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
sock.sendall(b"after")
sock.shutdown(socket.SHUT_WR)
text = b"".join(iter(lambda: sock.recv(1000), b""))
open("new", "wb").write(text)
os.rename("new", "got")
"""


async def test_ways_out_after_a_pause(client: Any, gateway: Echo) -> None:
    """A connection goes on; others can be made, also when another process has the sandbox."""
    async with kernel(client, ONLY_THE_GATEWAY) as made:

        async def there(file: str) -> bool:
            return (await made.handle.shell(f"test -e {file}", timeout=LIMIT)).ok

        await made.handle.spawn(["python3", "-c", WAIT_IN_A_CONNECTION])
        await until(lambda: there("begun"))
        assert await made.pause()
        made.resume()

        async def again() -> bool:
            return (await made.handle.info()).status == "running" and not made.tunnel.paused

        await until(again)
        await made.handle.shell("touch go", timeout=LIMIT)
        await until(lambda: there("got"))
        got = (await made.handle.shell("cat got", timeout=LIMIT)).stdout
        assert got == "data.example 443\nbefore, after\nthe end\n"
        assert await through(made, BY_NAME) == NAMED
        assert await fetched(made.handle) == 2 * ["Network is unreachable"]
        await made.detach()
        another = await SandboxedKernel.attach(client, made.handle.name, LOG)
        assert await through(another, PROXY) == BY_PROXY
        assert await through(another, BY_NAME) == NAMED
        await another.remove()


async def test_ways_out_of_a_sandbox_that_was_stopped(client: Any, gateway: Echo) -> None:
    """They are opened again with its agent."""
    async with kernel(client, ONLY_THE_GATEWAY) as made:
        await made.handle.stop()
        await made.revive()
        assert await through(made, PROXY) == BY_PROXY
        assert await through(made, BY_NAME) == NAMED
        assert await fetched(made.handle) == 2 * ["Network is unreachable"]


def test_install_says_which_way_each_rule_takes(hosted: Hosted, cli: Any, tmp_path: Any) -> None:
    """And why, if it is not the service that holds them."""
    place = ("--prefix", str(tmp_path / "kernels"), "--unchecked")
    native = [word for rule in hosted.allowed for word in ("--egress", rule)]
    said = cli("install", hosted.name, *place, "--name", "a", *native).stdout
    assert f"by rules of {hosted.name}'s own" in said
    assert "gateway" not in said
    other = cli("install", hosted.name, *place, "--name", "b", "--egress", ONLY_THE_GATEWAY).stdout
    assert f"{ONLY_THE_GATEWAY}   through the gateway on this machine" in other
    assert f"off: {hosted.name}'s own rules cannot hold egress[0].ports=[443] (ports)" in other


def test_run_goes_through_the_gateway(hosted: Hosted, cli: Any) -> None:
    """A single command has an agent then, and the line that says what was refused."""
    fetch = "import urllib.request; urllib.request.urlopen('https://elsewhere.example/')"
    egress = ("--egress", ONLY_THE_GATEWAY)
    ran = cli("run", "--backend", hosted.name, *egress, "--", "python3", "-c", fetch)
    assert "403 egress denied: elsewhere.example:443 (no rule allows it" in ran.stderr


async def test_ps_says_which_way(client: Any, cli: Any, hosted: Hosted) -> None:
    async with sandbox(client, egress=[ONLY_THE_GATEWAY]):
        (found,) = json.loads(cli("ps", "--json").stdout)
        assert found["egress"] == "gateway"
