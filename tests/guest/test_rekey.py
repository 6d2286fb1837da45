"""Re-keying: an agent learns that it is a copy, and nobody can take it for the original again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from typing import Any

import pytest

from sandbox_kernel.guest.connector import EXIT_NO_AGENT, SOCKET
from sandbox_kernel.guest.endpoints import CHANNELS
from sandbox_kernel.guest.rekey import EXIT_REFUSED, MAX_REQUEST
from sandbox_kernel.wire.handshake import REFUSALS, Refuse, Welcome
from tests.guest.agents import FROM_PACKAGE, LIMIT, AgentProcess, Host, NewHost

NEW_TOKEN = "0123456789abcdef" * 4
REQUEST = {"token": "token", "new_token": NEW_TOKEN, "name": "the-copy", "entropy": "c0ffee" * 8}


def rekey(agent: AgentProcess, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run ``rekey`` as the host does, with a request that is right but for ``changes``."""
    return run(agent, json.dumps({**REQUEST, **changes}) + "\n")


def run(agent: AgentProcess, line: str) -> subprocess.CompletedProcess[str]:
    command = [*FROM_PACKAGE, "rekey", agent.folder]
    return subprocess.run(command, input=line, capture_output=True, text=True, timeout=LIMIT)


def refused(code: str) -> Refuse:
    return Refuse(code, REFUSALS[code])


def test_the_token_of_the_original_is_refused_in_the_copy(host: Host, new_host: NewHost) -> None:
    """Whoever knows the new token is welcome; the old one opens nothing any more."""
    assert rekey(host.agent).stdout == "ok\n"
    assert new_host("two").connect() == refused("token")
    assert isinstance(new_host("three").connect(token=NEW_TOKEN), Welcome)


def test_the_new_token_is_refused_by_the_original(host: Host, new_host: NewHost) -> None:
    """An agent that was not re-keyed knows nothing of the copy's token."""
    assert new_host("two").connect(token=NEW_TOKEN) == refused("token")
    assert host.call("info")["name"] == ""


def test_the_copy_knows_its_name(host: Host, new_host: NewHost) -> None:
    """``info`` says which sandbox this is."""
    rekey(host.agent)
    copy = new_host("two")
    copy.connect(token=NEW_TOKEN)
    assert copy.call("info")["name"] == "the-copy"


def test_re_keying_ends_the_session_of_the_original(host: Host, new_host: NewHost) -> None:
    """Its link is cut and cannot be resumed, not even by who knows the new token."""
    assert rekey(host.agent).returncode == 0
    host.driver.until(lambda: host.lost, "the link of the old session stays")
    assert new_host("one").connect(token=NEW_TOKEN, resume=True) == refused("unknown-session")


def test_the_kernel_goes_on_and_its_old_clients_are_gone(host: Host, new_host: NewHost) -> None:
    """The same process, which sees the connections of the old session end."""
    pid = host.launch()["pid"]
    # All channels, so that all of the kernel's sockets are there before they are counted.
    for channel in (*CHANNELS, "shell"):
        host.open(f"kernel:{channel}").expect(channel.encode() + b"\n")
    connections = kernel_connections(pid)
    rekey(host.agent)
    host.driver.until(lambda: kernel_connections(pid) < connections, "the kernel keeps its client")
    copy = new_host("two")
    copy.connect(token=NEW_TOKEN)
    assert copy.call("status")["pid"] == pid
    shell = copy.open("kernel:shell")
    shell.expect(b"shell\n")
    shell.send(b"still here")
    shell.expect(b"still here")


def kernel_connections(pid: int) -> int:
    """How many sockets the echo kernel has; it keeps the last of a channel, and of the others
    those whose clients are there."""
    found = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        found += target.startswith("socket:")
    return found


def test_superseded_sessions_are_forgotten(host: Host, new_host: NewHost) -> None:
    """Session names of the original mean nothing in the copy."""
    assert isinstance(new_host("two").connect(), Welcome)
    assert new_host("one").connect() == refused("superseded")
    rekey(host.agent)
    assert isinstance(new_host("one").connect(token=NEW_TOKEN), Welcome)


def test_a_copy_of_a_copy(host: Host, new_host: NewHost) -> None:
    """Each re-keying needs the token that holds now."""
    assert rekey(host.agent).returncode == 0
    assert rekey(host.agent).returncode == EXIT_REFUSED
    assert rekey(host.agent, token=NEW_TOKEN, new_token="f" * 64).stdout == "ok\n"
    assert isinstance(new_host("two").connect(token="f" * 64), Welcome)


@pytest.mark.parametrize("token", ["", "guess", "token ", NEW_TOKEN])
def test_a_wrong_token_changes_nothing(host: Host, token: str) -> None:
    """The session goes on as if nothing had been asked."""
    ran = rekey(host.agent, token=token)
    assert (ran.stdout, ran.returncode) == ("token\n", EXIT_REFUSED)
    assert host.call("info")["name"] == ""


def test_an_agent_that_has_no_token_yet_is_no_copy(agent: AgentProcess) -> None:
    """Nobody has attached to it, so nothing can have been copied."""
    assert rekey(agent).stdout == "token\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"new_token": "short"},
        {"new_token": 7},
        {"new_token": "\u00e9" * 64},
        {"new_token": "\ud800" * 64},
        {"entropy": "no hex"},
        {"name": None},
        {"more": "fields"},
        {"entropy": "00" * MAX_REQUEST},
    ],
)
def test_a_malformed_request_is_not_passed_on(host: Host, changes: dict[str, Any]) -> None:
    """``rekey`` says so itself, and the agent is unharmed."""
    ran = rekey(host.agent, **changes)
    assert ran.returncode == 2
    assert "no re-key request" in ran.stderr
    assert host.call("info")["name"] == ""


@pytest.mark.parametrize(
    "message",
    [
        b'{"rekey": null}',
        b'{"rekey": {"token": "token"}}',
        b'{"rekey": {"token": "token", "new_token": "\\ud800", "name": "", "entropy": ""}}',
        b'["rekey"]',
        b'"rekey"',
        b"17",
        b"\0" * 3000,
    ],
)
def test_garbage_on_the_socket_is_refused(host: Host, message: bytes) -> None:
    """Code in the sandbox can reach the agent's socket; the agent lives through what it says."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT)
        connection.connect(os.path.join(host.agent.folder, SOCKET))
        connection.sendall(message)
        assert connection.recv(100) in (b"malformed\n", b"")
    assert host.call("info")["name"] == ""


def test_without_an_agent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that there is none, in time."""
    monkeypatch.setattr("sandbox_kernel.guest.connector.AGENT_TIMEOUT", 0.01)
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    from sandbox_kernel.guest import rekey as module

    monkeypatch.setattr(module, "read_request", lambda line: dict(REQUEST))
    assert module.main(str(tmp_path)) == EXIT_NO_AGENT
