"""Ways out of a real jail, to a gateway of the test's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.closing import reset
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.local.client import LocalClient
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background
from tests.helpers.echo_gateway import DIAL, Echo, echo_for_all

T = TypeVar("T")
LOG = logging.getLogger(__name__)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Echo:
    return echo_for_all(monkeypatch)


def run(script: str, *, egress: Sequence[str] = ("x.example",)) -> str:
    """Run a script of Python in a jail with ways out; what it prints."""

    async def main() -> str:
        spec = SandboxSpec(egress=EgressPolicy.of(*egress))
        kernel = await SandboxedKernel.create(LocalClient(), spec, LOG)
        try:
            ran = await kernel.handle.exec("python3", ["-c", script], timeout=60)
            return ran.output
        finally:
            await kernel.remove()

    return asyncio.run(_in_background(main()))


async def _in_background(coroutine: Coroutine[Any, Any, T]) -> T:
    return await background.run(coroutine)


def test_the_proxy(gateway: Echo) -> None:
    script = DIAL + 'print(talk(("127.0.0.1", 3128)))'
    assert run(script) == "b'proxy\\nhello\\nthe end\\n'\n"


def test_by_name(gateway: Echo) -> None:
    """Each name has an address of its own, and listeners at the ports that rules allow."""
    script = DIAL + (
        'for address in (("data.example", 443), ("db.example", 5432), ("data.example", 80)):\n'
        "    print(talk(address))\n"
        'one, other = (socket.gethostbyname(n) for n in ("data.example", "db.example"))\n'
        'print(one != other, one.startswith("127."), other.startswith("127."))\n'
    )
    assert run(script).splitlines() == [
        "b'data.example 443\\nhello\\nthe end\\n'",
        "b'db.example 5432\\nhello\\nthe end\\n'",
        "b'data.example 80\\nhello\\nthe end\\n'",
        "True True True",
    ]


def test_a_name_that_no_rule_can_permit_is_refused_at_once(gateway: Echo) -> None:
    script = (
        "import socket\n"
        "try: socket.getaddrinfo('elsewhere.test', 443)\n"
        "except socket.gaierror as error: print(error.errno == socket.EAI_NONAME)\n"
        "try: socket.create_connection(('data.example', 22), timeout=30)\n"
        "except ConnectionRefusedError: print('refused')\n"
    )
    assert run(script).splitlines() == ["True", "refused"]
    assert gateway.asked[0] == "elsewhere.test"


def test_a_name_has_addresses_and_nothing_else(gateway: Echo) -> None:
    """Whoever asks for an HTTPS record or a TXT first must not learn that there is no such name."""
    script = (
        "import socket, struct\n"
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "sock.settimeout(30)\n"
        "sock.connect(('127.0.0.1', 53))\n"
        "for kind in (65, 16, 1):\n"
        "    head = struct.pack('>HHHHHH', kind, 0x100, 1, 0, 0, 0)\n"
        "    sock.send(head + b'\\4data\\7example\\0' + struct.pack('>HH', kind, 1))\n"
        "    answer = struct.unpack_from('>HHHHHH', sock.recv(4096))\n"
        "    print(answer[0], answer[1] & 15, answer[3])\n"
    )
    assert run(script).splitlines() == ["65 0 0", "16 0 0", "1 0 1"]


def test_much_both_ways(gateway: Echo) -> None:
    script = DIAL + (
        "import hashlib, os, threading\n"
        "data = os.urandom(30_000_000)\n"
        "sock = socket.create_connection(('data.example', 443))\n"
        "def send():\n    sock.sendall(data); sock.shutdown(socket.SHUT_WR)\n"
        "threading.Thread(target=send).start()\n"
        "found = b''.join(iter(lambda: sock.recv(2**20), b''))\n"
        "print(found == b'data.example 443\\n' + data + b'\\nthe end\\n')\n"
    )
    assert run(script) == "True\n"


def test_a_transfer_survives_cuts_of_the_link(gateway: Echo) -> None:
    script = DIAL + (
        "data = b'0123456789' * 2_000_000\n"
        "sock = socket.create_connection(('data.example', 443))\n"
        "import threading\n"
        "def send():\n    sock.sendall(data); sock.shutdown(socket.SHUT_WR)\n"
        "threading.Thread(target=send).start()\n"
        "found = b''.join(iter(lambda: sock.recv(2**20), b''))\n"
        "print(found == b'data.example 443\\n' + data + b'\\nthe end\\n')\n"
    )

    async def main() -> tuple[str, int]:
        spec = SandboxSpec(egress=EgressPolicy.of("x.example"))
        kernel = await SandboxedKernel.create(LocalClient(), spec, LOG)
        gateway.every_megabyte = kernel.tunnel.cut
        try:
            ran = await kernel.handle.exec("python3", ["-c", script], timeout=120)
            return ran.output, kernel.tunnel.reconnects
        finally:
            await kernel.remove()

    output, reconnects = asyncio.run(_in_background(main()))
    assert output == "True\n"
    assert reconnects > 3


def test_a_connection_that_breaks_is_no_orderly_end(gateway: Echo) -> None:
    """On neither side: what was cut short must not look complete."""
    broken: list[Exception] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"so far")
        await writer.drain()
        try:
            await reader.readexactly(100)
        except (OSError, asyncio.IncompleteReadError) as error:
            broken.append(error)
        reset(writer)

    gateway.serve = serve  # type: ignore[method-assign]
    script = (
        "import socket, struct\n"
        "sock = socket.create_connection(('127.0.0.1', 3128), timeout=30)\n"
        "print(sock.recv(6)); sock.sendall(b'x' * 100)\n"
        "try: print(sock.recv(6))\n"
        "except ConnectionResetError: print('reset')\n"
        "sock = socket.create_connection(('127.0.0.1', 3128), timeout=30)\n"
        "print(sock.recv(6)); sock.sendall(b'x' * 50)\n"
        "sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))\n"
        "sock.close()\n"
        "sock = socket.create_connection(('127.0.0.1', 3128), timeout=30)\n"
        "print(sock.recv(6))\n"
    )
    assert run(script).splitlines() == ["b'so far'", "reset", "b'so far'", "b'so far'"]
    assert any(isinstance(error, ConnectionResetError) for error in broken)


def test_connections_are_bounded(gateway: Echo) -> None:
    """Those beyond the limit end at once, and the next ones after those are served again."""
    script = DIAL + (
        "socks = [socket.create_connection(('127.0.0.1', 3128), timeout=30) for _ in range(300)]\n"
        "greeted = 0\n"
        "for sock in socks:\n"
        "    try: greeted += sock.recv(100) == b'proxy\\n'\n"
        "    except ConnectionResetError: pass\n"
        "print(greeted)\n"
        "for sock in socks: sock.close()\n"
        "again = b''\n"
        "while not again:\n"
        "    try: again = talk(('127.0.0.1', 3128))\n"
        "    except OSError: pass\n"
        "print(again)\n"
    )
    output = run(script)
    assert output.count("\n") == 2, output
    greeted, again = output.splitlines()
    assert greeted == "256"
    assert again == "b'proxy\\nhello\\nthe end\\n'"


def test_the_jail_has_no_other_network(gateway: Echo) -> None:
    script = (
        "import socket\n"
        "print(socket.if_nameindex())\n"
        "for address in ('192.0.2.1', '169.254.169.254', '10.0.0.1'):\n"
        "    try: socket.create_connection((address, 80), timeout=10)\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    lines = run(script).splitlines()
    assert lines == ["[(1, 'lo')]", *3 * ["Network is unreachable"]]


def test_without_rules_there_is_no_way(gateway: Echo) -> None:
    script = (
        "import os, socket\n"
        "print('HTTPS_PROXY' in os.environ)\n"
        "try: socket.create_connection(('127.0.0.1', 3128))\n"
        "except ConnectionRefusedError: print('refused')\n"
    )
    assert run(script, egress=()).splitlines() == ["False", "refused"]
