"""A real jail with ways out, whose gateway finds servers of this machine behind named hosts."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from sandbox_kernel.audit.reading import read
from sandbox_kernel.audit.trail import audit_path
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.gateway import Gateway
from sandbox_kernel.kernels import SandboxedKernel, way_out
from sandbox_kernel.sandboxes.local.client import LocalClient
from sandbox_kernel.sandboxes.results import ExecResult
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.coroutines import finish
from tests.helpers.named_hosts import NamedHosts
from tests.helpers.waiting import LIMIT


class Answer(NamedTuple):
    """All that a socket has got, and how it ended: ``closed``, or the name of an error."""

    data: bytes
    end: str

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])


LOG = logging.getLogger(__name__)


TALK = """
import base64, json, socket, sys
way, *sends = json.loads(sys.argv[1])
answer, end = b"", "closed"
try:
    sock = socket.create_connection(tuple(way), timeout=60)
    for data in sends:
        sock.sendall(base64.b64decode(data))
    while piece := sock.recv(65536):
        answer += piece
except OSError as error:
    end = type(error).__name__
print(json.dumps([base64.b64encode(answer).decode(), end]))
"""
PROXY = ("127.0.0.1", 3128)


class Jail:
    """One sandbox, and what its gateway does."""

    def __init__(self, kernel: SandboxedKernel, gateway: Gateway, hosts: NamedHosts) -> None:
        self.kernel = kernel
        self.gateway = gateway
        self.hosts = hosts

    def talk(self, *sends: bytes, to: tuple[str, int] = PROXY) -> Answer:
        """Connect a plain socket in the jail, send this, and read to the end."""
        request = [to, *(base64.b64encode(data).decode() for data in sends)]
        ran = self.run(["python3", "-S", "-c", TALK, json.dumps(request)])
        data, end = json.loads(ran.output)
        return Answer(base64.b64decode(data), end)

    def python(self, script: str, env: Mapping[str, str] | None = None) -> str:
        """What a script of Python prints."""
        return self.run(["python3", "-c", script], env).output

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> ExecResult:
        command, *arguments = argv
        return finish(self.kernel.handle.exec(command, arguments, env=env, timeout=LIMIT))

    @contextlib.contextmanager
    def running(self, script: str) -> Iterator[None]:
        """While a script of Python runs, whose standard input ends with this."""
        stream = finish(self.kernel.handle.open_stream(["python3", "-c", script]))
        try:
            yield
        finally:
            finish(stream.close())

    def write(self, path: str, content: bytes) -> None:
        handle = self.kernel.handle
        wrote = finish(handle.exec("sh", ["-c", 'cat > "$0"', path], stdin=content, timeout=60))
        assert wrote.ok, wrote.output

    def events(self) -> list[dict[str, Any]]:
        """The audit so far. What is still open is not in it."""
        found = read(audit_path("local", self.kernel.handle.name))
        return [event for event in found if event["kind"] == "egress"]


@contextlib.contextmanager
def running_jail(
    *rules: Any, monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts | None = None, **spec: Any
) -> Iterator[Jail]:
    hosts = hosts or NamedHosts(monkeypatch)
    gateways: list[Gateway] = []

    def made(*arguments: Any, **options: Any) -> Gateway:
        gateways.append(Gateway(*arguments, **options))
        return gateways[-1]

    monkeypatch.setattr(way_out, "Gateway", made)
    spec.setdefault("egress", EgressPolicy.of(*rules))
    kernel = finish(SandboxedKernel.create(LocalClient(), SandboxSpec(**spec), LOG))
    try:
        [gateway] = gateways
        yield Jail(kernel, gateway, hosts)
    finally:
        finish(kernel.remove())
