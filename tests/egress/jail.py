"""A real jail with ways out, whose gateway finds servers of this machine behind named hosts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from sandbox_kernel.audit.reading import read
from sandbox_kernel.audit.trail import audit_path
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.local.client import LocalClient
from sandbox_kernel.sandboxes.results import ExecResult
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.coroutines import finish
from tests.helpers.named_hosts import NamedHosts
from tests.helpers.waiting import LIMIT

LOG = logging.getLogger(__name__)


class Jail:
    """One sandbox, and what its gateway does."""

    def __init__(self, kernel: SandboxedKernel, hosts: NamedHosts) -> None:
        self.kernel = kernel
        self.hosts = hosts

    def python(self, script: str, env: Mapping[str, str] | None = None) -> str:
        """What a script of Python prints."""
        return self.run(["python3", "-c", script], env).output

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> ExecResult:
        command, *arguments = argv
        return finish(self.kernel.handle.exec(command, arguments, env=env, timeout=LIMIT))

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
    spec.setdefault("egress", EgressPolicy.of(*rules))
    kernel = finish(SandboxedKernel.create(LocalClient(), SandboxSpec(**spec), LOG))
    try:
        yield Jail(kernel, hosts)
    finally:
        finish(kernel.remove())
