"""Rules that change while a sandbox runs, by the command in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.audit.trail import audit_path
from sandbox_kernel.cli.commands import live_policy
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecError, SpecRefused
from sandbox_kernel.gateway.audit import read
from sandbox_kernel.gateway.edits import edited
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.sandboxes.local.client import LocalClient
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background
from tests.cli.running import Cli
from tests.helpers.own_folders import own_folders
from tests.helpers.waiting import wait_until

T = TypeVar("T")
LOG = logging.getLogger(__name__)
DIAL = """
import socket, sys, time
def connect(host, port):
    sock = socket.create_connection(("127.0.0.1", 3128), timeout=60)
    sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n".encode())
    answer = b""
    while b"\\r\\n\\r\\n" not in answer:
        answer += sock.recv(4096)
    return sock, answer.split(b"\\r\\n")[0].decode()
"""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    with own_folders() as folder:
        yield Cli(folder)


class _Echo(BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := self.request.recv(4096):
                self.request.sendall(data)


@contextmanager
def server() -> Iterator[int]:
    """The port of a server on this machine that sends everything back."""
    ThreadingTCPServer.allow_reuse_address = True
    with ThreadingTCPServer(("127.0.0.1", 0), _Echo) as made:
        made.daemon_threads = True
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made.server_address[1]
        made.shutdown()


class Sandbox:
    """A jail whose gateway is in this process."""

    def __init__(self, *egress: str) -> None:
        spec = SandboxSpec(name="live", egress=EgressPolicy.of(*egress))
        self.kernel: SandboxedKernel = self._do(SandboxedKernel.create(LocalClient(), spec, LOG))

    def run(self, script: str) -> str:
        ran = self._do(self.kernel.handle.exec("python3", ["-c", DIAL + script], timeout=60))
        return str(ran.output)

    def attach_again(self) -> None:
        """As the next server does."""
        self._do(self.kernel.detach())
        self.kernel = self._do(SandboxedKernel.attach(LocalClient(), "live", LOG))

    def remove(self) -> None:
        self._do(self.kernel.remove())

    @staticmethod
    def _do(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(background.run(coroutine))


@contextmanager
def sandbox(*egress: str) -> Iterator[Sandbox]:
    made = Sandbox(*egress)
    try:
        yield made
    finally:
        made.remove()


def reach(made: Sandbox, port: int) -> str:
    return made.run(f"print(connect('127.0.0.1', {port})[1])").strip()


def policy(cli: Cli, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    ran = cli("policy", *words)
    assert ran.returncode == code, ran
    return ran


def test_a_host_is_opened_and_closed_again_with_its_connections(cli: Cli) -> None:
    """What is added can be reached at once; what is removed ends also where it is in use."""
    with server() as port, sandbox("other.example") as made:
        assert "403 egress denied" in reach(made, port)
        ran = policy(cli, "set", "live", f"+127.0.0.1:{port}")
        assert f"1. allow 127.0.0.1 ports={port}" in ran.stdout
        assert "200" in reach(made, port)

        long = threading.Thread(
            target=lambda: said.append(
                made.run(
                    f"sock, answer = connect('127.0.0.1', {port})\n"
                    "sock.sendall(b'x'); sock.recv(1)\n"
                    "open('/workspace/open', 'w').close()\n"
                    "try: print('ended', sock.recv(1))\n"
                    "except OSError as error: print('ended', error)\n"
                )
            )
        )
        said: list[str] = []
        long.start()
        there = "import os; print(os.path.exists('/workspace/open'))"
        wait_until(lambda: made.run(there) == "True\n", "the connection")
        policy(cli, "set", "live", "-127.0.0.1")
        long.join(60)
        [ended] = said
        assert ended.startswith("ended")
        assert "403 egress denied" in reach(made, port)
        shown = json.loads(policy(cli, "show", "live", "--json").stdout)
        assert (shown["source"], shown["egress"]) == ("policy set", ["other.example"])
        assert shown["in_force"] is True
        events = [e for e in read(audit_path("local", "live")) if e["kind"] == "policy"]
        assert [event["action"] for event in events] == ["set", "in force"] * 2
        assert events[0]["by"]["program"] == "sandbox-kernel policy"


def test_a_change_stays_for_the_next_process_and_goes_with_the_sandbox(cli: Cli) -> None:
    with server() as port:
        with sandbox("other.example") as made:
            policy(cli, "set", "live", f"127.0.0.1:{port}")
            made.attach_again()
            assert "200" in reach(made, port)
            policy(cli, "set", "live", "--reset")
            assert "403 egress denied" in reach(made, port)
            assert "as made with" in policy(cli, "show", "live").stdout
            policy(cli, "set", "live", f"127.0.0.1:{port}")
            path = Records().rules_path("local", "live")
            assert path.stat().st_mode & 0o777 == 0o600
        assert not path.exists()
        with sandbox("other.example") as made:
            assert "403 egress denied" in reach(made, port)


def test_rules_that_cannot_be_read_deny_everything(cli: Cli) -> None:
    """Also for a process that takes the sandbox over; and another sandbox's file says nothing."""
    with server() as port, sandbox(f"127.0.0.1:{port}") as made:
        assert "200" in reach(made, port)
        path = Records().rules_path("local", "live")
        path.write_text('{"sandbox_id": ')
        wait_until(lambda: "403 egress denied" in reach(made, port), "the denial")
        assert "damaged" in policy(cli, "show", "live", code=1).stderr
        made.attach_again()
        assert "403 egress denied" in reach(made, port)
        policy(cli, "set", "live", f"127.0.0.1:{port}")
        assert "200" in reach(made, port)
        path.write_text(json.dumps({"sandbox_id": "other", "revision": "1", "egress": []}))
        made.attach_again()
        assert "200" in reach(made, port)


def test_what_cannot_be_changed_is_refused(cli: Cli) -> None:
    with sandbox("other.example") as made:
        assert "no rule for x.example" in policy(cli, "set", "live", "-x.example", code=2).stderr
        policy(cli, "set", "live", "+a.example", "b.example", code=2)
        policy(cli, "set", "live", code=2)
        made._do(made.kernel.detach())
        ran = policy(cli, "set", "live", "+a.example", code=1)
        assert "apply as soon as one does" in ran.stderr
        made.kernel = made._do(SandboxedKernel.attach(LocalClient(), "live", LOG))
        shown = json.loads(policy(cli, "show", "live", "--json").stdout)
        assert shown["egress"] == ["a.example", "other.example"]


def test_a_sandbox_without_a_way_out_keeps_none(cli: Cli) -> None:
    with sandbox():
        ran = policy(cli, "set", "live", "+a.example", code=1)
        assert "made without a way out" in ran.stderr
        assert "no way out" in policy(cli, "show", "live").stdout


class _Lacking(LocalClient):
    """A backend whose gateway cannot hold methods."""

    capabilities = Capabilities("egress", "gateway")


def test_what_the_backend_cannot_enforce_is_refused() -> None:
    wanted = EgressPolicy.read([{"host": "other.example", "methods": ["GET"]}])
    with pytest.raises(SpecRefused, match=r"stay as they are: .* egress\[0\]\.methods=\['GET'\]"):
        live_policy._check_enforced(_Lacking(), "live", wanted)


def test_edits() -> None:
    before = EgressPolicy.read(["!*.a.example", "b.example:5432", "c.example"])
    after = edited(before, ["+x.a.example", "-b.example"])
    assert after.to_json() == [
        "x.a.example",
        {"host": "*.a.example", "action": "deny"},
        "c.example",
    ]
    assert edited(before, ["-b.example:5432"]) == edited(before, ["-b.example"])
    assert not edited(before, ["default=deny"])
    for words in ([], ["+a.example", "b.example"], ["-b.example:1"], ["+default=allow"]):
        with pytest.raises(SpecError):
            edited(before, words)


HOSTS = ["a.example", "b.a.example", "c.test", "192.0.2.7"]
LEVELS = st.recursive(
    st.none(),
    lambda within: st.builds(
        EgressPolicy.of,
        st.sampled_from(["a.example", "*.a.example", "!b.a.example", "*", "192.0.2.0/24"]),
        st.sampled_from(["!c.test", "a.example:443", "!a.example", "*.example"]),
        default=st.sampled_from(["allow", "deny"]),
        within=within,
    ),
    max_leaves=3,
).filter(bool)


@given(LEVELS, st.sampled_from(HOSTS), st.sampled_from([80, 443]))
def test_what_is_added_passes(policy: EgressPolicy, host: str, port: int) -> None:
    """Whatever rules there are, and within whatever others."""
    assert edited(policy, [f"+{host}"]).decide(host, port) == "allow"
    assert edited(policy, [f"+!{host}"]).decide(host, port) == "deny"
    assert EgressPolicy.read(json.loads(json.dumps(policy.to_json()))) == policy
