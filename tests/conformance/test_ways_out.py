"""Ways out of a backend's sandboxes that have no network: over the wire, to the host's gateway."""

from __future__ import annotations

import logging

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.capabilities import EgressWay
from tests.helpers.coroutines import finish
from tests.helpers.echo_gateway import DIAL, echo_for_all
from tests.helpers.waiting import LIMIT

from .conftest import Backend

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
