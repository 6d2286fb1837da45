"""The agent and its connectors as the processes that they are in a sandbox."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.guest.agent import Agent
from sandbox_kernel.guest_program import zipapp
from sandbox_kernel.wire import VERSION
from sandbox_kernel.wire.codec import CODECS, PREAMBLE
from sandbox_kernel.wire.frames import ACK, Frame, encode
from sandbox_kernel.wire.handshake import REFUSALS, Refuse, Welcome
from tests.guest.agents import (
    FROM_PACKAGE,
    LIMIT,
    AgentProcess,
    CallFailed,
    Host,
    NewHost,
    read_to_end,
)
from tests.helpers.waiting import wait_until
from tests.wire.loops import Driver

MIB = 2**20


def refused(code: str) -> Refuse:
    return Refuse(code, REFUSALS[code])


# --- links and handshakes


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["pipes", "socket"])
def test_a_session_over_a_connector(new_host: NewHost, kind: str, codec: str) -> None:
    """Whatever the connector's stdio is, and with both codecs."""
    host = new_host()
    assert isinstance(host.connect(kind, codec), Welcome)
    info = host.call("info")
    assert info["version"] == VERSION
    assert info["pid"] == host.agent.process.pid
    assert info["kernel"]["running"] is False


def test_another_version_is_refused(new_host: NewHost) -> None:
    """Before anything else is looked at."""
    assert new_host().connect(version=VERSION + 1, token="") == refused("version")


def test_the_first_token_is_the_token(new_host: NewHost) -> None:
    """Whoever comes later must know it."""
    assert isinstance(new_host("one").connect(), Welcome)
    assert new_host("two").connect(token="guess") == refused("token")
    assert new_host("one").connect(token="") == refused("token")
    assert new_host("one").connect(token="\u00e9") == refused("token")
    assert isinstance(new_host("two").connect(), Welcome)


def test_a_session_that_the_agent_does_not_know_cannot_be_resumed(new_host: NewHost) -> None:
    """It is a new agent: the host must learn that its kernel is gone."""
    assert new_host().connect(resume=True) == refused("unknown-session")


def test_the_newest_connector_of_a_session_wins(host: Host) -> None:
    """The agent cannot know that the older one is dead; the session goes on over the new one."""
    host.call("info")
    first = host.peer.link
    second = Host(host.driver, host.agent)
    second.peer = host.peer
    second.hello = host.hello
    assert isinstance(second.connect(), Welcome)
    assert first is not host.peer.link
    assert host.call("status")["generation"] == 0
    host.agent.connectors[0].wait(LIMIT)
    assert host.agent.connectors[1].poll() is None


def test_a_new_session_takes_over(host: Host, new_host: NewHost) -> None:
    """The kernel stays; the older host is told so when it comes back, and every time."""
    launched = host.launch()
    new = new_host("two")
    assert isinstance(new.connect(), Welcome)
    host.driver.until(lambda: host.lost)
    assert new.call("status")["pid"] == launched["pid"]
    assert host.connect() == refused("superseded")
    assert host.connect(resume=False) == refused("superseded")
    assert new.call("status")["running"]


def test_calls_survive_a_broken_link(host: Host) -> None:
    """A session goes on where it was, also when the connector was killed."""
    host.launch()
    shell = host.open("kernel:shell")
    shell.expect(b"shell\n")
    for how in ("detach", "kill", "kill"):
        shell.send(b"before ")
        if how == "detach":
            host.peer.detach()
        else:
            host.driver.settle(2)
            host.agent.connectors[-1].kill()
            host.driver.until(lambda: host.peer.link is None)
        shell.send(b"after ")
        answer = host.connect()
        assert isinstance(answer, Welcome)
        shell.expect(b"before after ")
    assert host.call("status")["running"]


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n" * 4, bytes(64), encode(Frame(ACK, 0, 0, 0, b"")), b"\xff" * 100],
)
def test_garbage_instead_of_hello_ends_the_link(host: Host, garbage: bytes) -> None:
    """And nothing else: the session of the others goes on."""
    read, write = host.agent.connect()
    os.write(write, garbage)
    assert read_to_end(read) == PREAMBLE
    os.close(read)
    os.close(write)
    host.agent.connectors[-1].wait(LIMIT)
    assert host.call("info")["version"] == VERSION


def test_those_who_never_say_hello_do_not_keep_others_out(host: Host) -> None:
    """Too many of them are too many: the oldest are dropped."""
    silent = [host.agent.connect() for _ in range(20)]
    connectors = host.agent.connectors[-20:]
    host.driver.until(lambda: sum(c.poll() is not None for c in connectors) >= 4)
    host.peer.detach()
    assert isinstance(host.connect(), Welcome)
    assert host.call("info")["version"] == VERSION
    for fds in silent:
        for fd in fds:
            os.close(fd)


def test_who_never_says_hello_is_sent_away_after_a_while() -> None:
    """With a shorter while than in earnest."""
    patched = "import sandbox_kernel.guest.agent_socket as s; s.HELLO_TIMEOUT = 0.2; "
    agent = AgentProcess([sys.executable, "-c", patched + FROM_PACKAGE[2]])
    read, write = agent.connect("pipes")
    assert read_to_end(read) == PREAMBLE
    agent.connectors[0].wait(LIMIT)
    os.close(read)
    os.close(write)
    agent.close()


@pytest.mark.parametrize(("there", "waits"), [(True, "cat"), (False, "python")])
def test_a_small_program_waits_in_the_connectors_place(there: bool, waits: str) -> None:
    """Where there is one. It ends as the connector would, when the agent has closed the link, of
    which it holds nothing."""
    change = "" if there else "import sandbox_kernel.guest.connector as c; c.CAT = ('/none',); "
    agent = AgentProcess([sys.executable, "-c", change + FROM_PACKAGE[2]])
    read, write = agent.connect("pipes")
    (connector,) = agent.connectors

    def held() -> list[str]:
        found = Path(f"/proc/{connector.pid}/fd")
        return [os.readlink(found / number).split(":")[0] for number in "01"]

    wait_until(lambda: held() == ["socket", "/dev/null"], "it only waits", LIMIT)
    wait_until(lambda: waits in Path(f"/proc/{connector.pid}/comm").read_text(), waits, LIMIT)
    os.write(write, bytes(64))
    assert read_to_end(read) == PREAMBLE
    assert connector.wait(LIMIT) == 0
    os.close(read)
    os.close(write)
    agent.close()


def test_a_local_program_that_is_no_connector_is_sent_away(host: Host) -> None:
    """Anything in the sandbox may open the agent's socket."""
    path = os.path.join(host.agent.folder, "agent.sock")
    for message, fds in (
        (b"nonsense", []),
        (b'{"codec": "raw"}', []),
        (b'{"codec": "raw"}', [0]),
        (b'{"codec": "morse"}', [0, 1]),
        (b"[]", [0, 1]),
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(LIMIT)
            sock.connect(path)
            socket.send_fds(sock, [message], fds)
            assert sock.recv(1) == b""
    assert host.call("info")["version"] == VERSION


def test_the_socket_belongs_to_its_user_only(host: Host) -> None:
    """Mode 0600, whatever the umask."""
    assert os.stat(os.path.join(host.agent.folder, "agent.sock")).st_mode & 0o777 == 0o600


def test_a_session_that_broke_the_protocol_cannot_go_on(host: Host) -> None:
    """The agent has forgotten it: resuming is refused, and a new session is welcome."""
    host.call("info")
    host.peer.session.received += 5  # claims what was never sent
    host.peer.detach()
    host.connect()
    host.driver.until(lambda: host.lost)
    assert host.connect() == refused("unknown-session")


# --- control calls


def test_control_calls(host: Host) -> None:
    """Each answers, also when it cannot do what it is asked for."""
    assert host.call("lease", seconds=99)["lease"] == 99
    assert host.call("info")["lease"] == 99
    assert host.call("usage") == {}
    assert host.call("logs") == ""
    assert host.call("signal", signum=2) == {"sent": False}
    assert host.call("kill")["running"] is False
    for wrong, kind in (
        (("lease", {"seconds": -1}), "value"),
        (("lease", {}), "TypeError"),
        (("dance", {}), "unknown-call"),
    ):
        with pytest.raises(CallFailed) as caught:
            host.call(wrong[0], **wrong[1])
        assert caught.value.kind == kind


def test_a_target_that_is_not_there(host: Host) -> None:
    """Is reset, with words."""
    for target in ("kernel:nonsense", "nonsense", ""):
        channel = host.open(target)
        channel.wait_ended()
        assert channel.reset == f"there is no target {target!r} here"


# --- the kernel


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_kernel_is_launched_and_reached(host: Host, transport: str) -> None:
    """Through each of its five channels, as soon as it listens."""
    early = host.open("kernel:hb")
    early.send(b"before there was a kernel")
    status = host.launch(transport=transport)
    assert status["running"]
    assert status["generation"] == 1
    early.expect(b"hb\nbefore there was a kernel")
    for name in ("shell", "iopub", "stdin", "control", "hb"):
        channel = host.open("kernel:" + name)
        channel.send(b"ping")
        channel.expect(name.encode() + b"\nping")
    assert host.call("usage")["threads"] >= 5
    assert host.call("logs") == "kernel secret hello /\n"
    assert host.call("logs", size=2) == "/\n"


def test_megabytes_through_the_kernels_channel(host: Host) -> None:
    """Over the agent's pump and the connector's stream, there and back."""
    host.launch()
    iopub = host.open("kernel:iopub")
    iopub.expect(b"iopub\n")
    payload = bytes(range(256)) * (12 * MIB // 256)
    iopub.send(payload)
    iopub.expect(payload)


def test_a_channel_ends_with_the_client_and_with_the_kernel(host: Host) -> None:
    """Each end is told."""
    host.launch()
    first = host.open("kernel:shell")
    first.expect(b"shell\n")
    first.finish()
    first.wait_ended()
    second = host.open("kernel:shell")
    second.expect(b"shell\n")
    host.call("kill")
    second.wait_ended()


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_of_a_kernel_is_an_event(host: Host, code: int) -> None:
    """With its exit code; a next launch is another generation."""
    host.launch()
    host.open("kernel:shell").send(b"exit %d" % code)
    event = host.event()
    assert event["event"] == "kernel_exited"
    assert (event["exit_code"], event["running"], event["generation"]) == (code, False, 1)
    assert event["ended_at"] > 0
    assert host.launch()["generation"] == 2
    host.open("kernel:shell").expect(b"shell\n")


def test_a_kernel_that_is_killed_by_a_signal(host: Host) -> None:
    """The exit code is the negative number, as for a local process."""
    host.launch()
    assert host.call("signal", signum=signal.SIGKILL) == {"sent": True}
    assert host.event()["exit_code"] == -signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE])
def test_a_kernel_starts_with_the_default_signals(host: Host, signum: int) -> None:
    """What the agent ignores for itself, a kernel in any language must not inherit."""
    host.launch("sleep", "600")
    assert host.call("signal", signum=int(signum)) == {"sent": True}
    assert host.event(limit=5.0)["exit_code"] == -signum


def test_what_a_dead_kernel_left_in_its_group_ends_too(host: Host) -> None:
    """A child that holds its sockets would keep its channels open for ever."""
    script = "sleep 600 & echo $!; exit 7"
    host.launch("sh", "-c", script)
    assert host.event()["exit_code"] == 7
    while not (printed := host.call("logs").strip()):  # its end may be known before its last words
        pass
    child = int(printed)
    host.driver.until(lambda: not _lives(child))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("argv", "changes", "kind", "words"),
    [
        (["/does/not/exist"], {}, "missing", "/does/not/exist"),
        (["sleep", "1"], {"cwd": "/does/not/exist"}, "missing", "/does/not/exist"),
        (["sl\0eep"], {}, "launch", "null (byte|character)"),
    ],
)
def test_a_kernel_that_cannot_be_started(
    host: Host, argv: list[str], changes: dict[str, str], kind: str, words: str
) -> None:
    """The reason comes back, and the next launch may succeed."""
    with pytest.raises(CallFailed, match=words) as caught:
        host.launch(*argv, **changes)
    assert caught.value.kind == kind
    assert host.call("status")["running"] is False
    assert host.launch()["running"]


def test_there_is_one_kernel_at_a_time(host: Host) -> None:
    """A second launch is refused, not queued."""
    host.launch()
    with pytest.raises(CallFailed, match="a kernel is already running"):
        host.launch()


# --- the end


def _kernel_is_gone(pid: int) -> bool:
    return not _lives(pid)


def test_sigterm_ends_the_agent_and_its_kernel(host: Host) -> None:
    """Cleanly: nothing is left behind, not even the socket."""
    pid = host.launch()["pid"]
    host.agent.process.terminate()
    assert host.agent.process.wait(LIMIT) == 0
    host.driver.until(lambda: host.lost)
    host.driver.until(lambda: _kernel_is_gone(pid))
    assert not os.path.exists(os.path.join(host.agent.folder, "agent.sock"))


def test_shutdown_is_answered_and_then_done(host: Host) -> None:
    """The answer gets out before the agent ends."""
    pid = host.launch()["pid"]
    assert host.call("shutdown") == {}
    assert host.agent.process.wait(LIMIT) == 0
    assert _kernel_is_gone(pid)


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT])
def test_the_agent_outlives_the_terminal_that_started_it(host: Host, signum: int) -> None:
    """Only SIGTERM and its lease end it."""
    host.agent.process.send_signal(signum)
    assert host.call("info")["version"] == VERSION


def test_an_abandoned_agent_ends_with_its_lease(host: Host) -> None:
    """Counted from when the last host left; the kernel ends with it."""
    pid = host.launch()["pid"]
    host.call("lease", seconds=0.2)
    host.peer.detach()
    assert host.agent.process.wait(LIMIT) == 0
    assert "the lease is over" in host.agent.log.read_text()
    assert _kernel_is_gone(pid)


def test_an_agent_that_nobody_ever_used_ends_too(guest_driver: Driver) -> None:
    """The host may have died before it could say HELLO."""
    agent = AgentProcess(lease=0.1)
    assert agent.process.wait(LIMIT) == 0
    agent.close()


# --- the program


def test_a_connector_without_an_agent_says_so(tmp_path: Path) -> None:
    """In words on stderr, and with an exit code of its own."""
    code = (
        "import sys; from sandbox_kernel.guest import connector; connector.AGENT_TIMEOUT = 0.1; "
        f"sys.exit(connector.main({str(tmp_path)!r}, 'raw'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=LIMIT)
    assert done.returncode == 69
    assert b"no agent answers" in done.stderr
    assert done.stdout == b""


def test_a_command_that_is_not_known() -> None:
    """Usage, and code 2."""
    for arguments in ([], ["dance"], ["agent"], ["connect", "here", "morse"]):
        done = subprocess.run([*FROM_PACKAGE, *arguments], capture_output=True, timeout=LIMIT)
        assert done.returncode == 2
        assert done.stderr


def test_the_program_is_small_and_reproducible() -> None:
    """It travels through the exec stream: the same sources give the same bytes."""
    program = zipapp()
    assert len(program) < 115_000
    zipapp.cache_clear()
    assert zipapp() == program


def _interpreters() -> list[str]:
    """The system's Python, and the oldest that is supported, if it is here."""
    found = [shutil.which("python3", path="/usr/bin:/bin"), shutil.which("python3.9")]
    found += glob.glob(os.path.expanduser("~/.pyenv/versions/3.9.*/bin/python3.9"))[:1]
    working = []
    for path in filter(None, found):
        check = [path, "-c", "import sys; print(sys.version_info >= (3, 9))"]
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        if done.stdout.strip() == "True" and path not in working:
            working.append(path)
    return working


@pytest.mark.parametrize("python", _interpreters())
def test_the_packed_program_runs_on_a_bare_interpreter(
    guest_driver: Driver, tmp_path: Path, python: str
) -> None:
    """Without this package, without its dependencies, on any Python from 3.9."""
    program = tmp_path / "guest.pyz"
    program.write_bytes(zipapp())
    with zipfile.ZipFile(program) as archive:
        assert archive.testzip() is None
    agent = AgentProcess([python, "-I", "-S", str(program)])
    host = Host(guest_driver, agent)
    assert isinstance(host.connect("pipes"), Welcome)
    assert isinstance(host.call("info")["python"], str)
    host.launch()
    host.open("kernel:shell").expect(b"shell\n")
    host.peer.detach()
    host.connect("socket", "base64")
    assert host.call("status")["running"]
    host.close()
    agent.close()


def test_a_kernel_that_dies_before_its_pid_is_known(tmp_path: Path) -> None:
    """The warm interpreter forks a kernel, which ends at once. The agent hears of the end first,
    and only then of the number of the process that has ended: it still knows how that was."""
    agent = Agent(str(tmp_path), 60.0)
    launching: list[Callable[[int], object]] = []
    warm: Any = agent.kernel.warm
    warm.launch = lambda *args, **options: launching.append(args[-1])
    agent.kernel.launch(["python"], {}, "/", {}, "ipc", lambda failure: None)
    child = os.fork()
    if not child:
        os._exit(3)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    agent._reap()
    launching[0](child)
    assert agent.kernel.exit_code == 3


def test_a_warm_interpreter_has_no_descriptor_of_the_link(host: Host, tmp_path: Path) -> None:
    """It becomes the next kernel, whose code must not reach the host's link."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nls -l /proc/self/fd > {tmp_path}/$$.new\n")
    with python.open("a") as script:
        script.write(f"mv {tmp_path}/$$.new {tmp_path}/$$.fds\nexec sleep 60\n")
    python.chmod(0o755)
    host.launch(str(python), "-m", "ipykernel_launcher", "{connection_file}")
    host.driver.until(lambda: len(list(tmp_path.glob("*.fds"))) == 2, "no warm interpreter")
    sockets = sorted(path.read_text().count("socket:") for path in tmp_path.glob("*.fds"))
    assert sockets == [0, 1]  # the kernel has none, the warm one that of its requests
