"""Ways out of a backend's sandboxes that have no network: over the wire, to the host's gateway.

In the local jail, in emulated hosted sandboxes, and in the rig's microVMs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.audit import Event
from sandbox_kernel.audit.reading import read
from sandbox_kernel.audit.trail import audit_path
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.capabilities import EgressWay
from tests.helpers.coroutines import finish
from tests.helpers.echo_gateway import DIAL, echo_for_all
from tests.helpers.waiting import LIMIT, wait_until

from .conftest import Backend
from .kernels import execute, kernel, sandboxed
from .package_index import PACKAGE, package_index

LOG = logging.getLogger(__name__)

RULES = EgressPolicy.of("x.example:443")
"""No provider has rules by port."""
SCRIPT = (
    DIAL
    + """
import os
print(talk(("127.0.0.1", 3128)))
print(talk(("data.example", 443)))
print(talk(("db.example", 5432)))
try:
    socket.getaddrinfo("elsewhere.test", 443)
except socket.gaierror as error:
    print(error.errno == socket.EAI_NONAME)
print(os.environ["HTTPS_PROXY"], os.environ["no_proxy"])
try:
    socket.create_connection(("192.0.2.1", 443), timeout=5)
except OSError as error:
    print("unreachable")
"""
)


def test_ways_out(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the proxy and by name; and there is no other way."""
    echo_for_all(monkeypatch)

    async def main() -> str:
        spec = backend.spec(egress=RULES)
        assert backend.capabilities.egress_way(spec.egress) is EgressWay.GATEWAY
        kernel = await SandboxedKernel.create(backend.client, spec, LOG)
        try:
            assert (await kernel.handle.info()).egress == "gateway"
            python = kernel.handle.python or "python3"
            return (await kernel.handle.exec(python, ["-c", SCRIPT], timeout=LIMIT)).output
        finally:
            await kernel.remove()

    assert finish(main()).splitlines() == [
        "b'proxy\\nhello\\nthe end\\n'",
        "b'data.example 443\\nhello\\nthe end\\n'",
        "b'db.example 5432\\nhello\\nthe end\\n'",
        "True",
        "http://127.0.0.1:3128 localhost,127.0.0.1,::1",
        "unreachable",
    ]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The index that pip on this machine uses; gives what a sandbox needs in addition."""
    with package_index(tmp_path, os.environ.get("SANDBOX_KERNEL_RIG")) as environment:
        yield environment


ELSEWHERE = "import urllib.request; urllib.request.urlopen('https://elsewhere.example/')"
INTERFACES = """
import socket
try:
    socket.create_connection(("192.0.2.1", 443), timeout=5)
except OSError:
    print([name for _, name in socket.if_nameindex()])
"""


def test_pip_install_with_nothing_but_the_index(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, index: dict[str, str]
) -> None:
    """One word lets a real pip install a real package. A second host is refused, and the cell says
    by what and how to allow it. There is no network but that; in a jail, not even a card."""
    for name, value in backend.environment(egress=["@pip"], env=index).items():
        monkeypatch.setenv(name, value)
    with kernel() as (manager, client):
        reply, printed = execute(client, f"%pip install --no-deps {PACKAGE}")
        assert (reply["status"], "Successfully installed" in printed) == ("ok", True), printed
        assert "moo" in execute(client, f"import {PACKAGE}; {PACKAGE}.cow('moo')")[1]
        refused, _ = execute(client, ELSEWHERE)
        assert refused["status"] == "error"
        assert (
            "egress denied: elsewhere.example:443 (no rule allows it; allow it with "
            'egress=["elsewhere.example"])'
        ) in refused["evalue"]
        cards = execute(client, INTERFACES)[1]
        assert cards == "['lo']\n" if backend.row.name == "local" else cards
        audit = audit_path(backend.row.name, sandboxed(manager).handle.name)

        def events(action: str) -> list[Event]:
            return [event for event in read(audit) if event.get("action") == action]

        # An event waits for the word which cell it belongs to.
        denied = wait_until(lambda: events("deny"), "the audit says what was denied")
        assert [event["host"] for event in denied] == ["elsewhere.example"]
        assert all(event["received"] > 0 for event in events("allow"))
