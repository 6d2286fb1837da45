"""What befalls the machines at both ends: each ends in recovery, or in one clear error.

Never in a hang, and never in a loop that burns a core.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_kernel.errors import SessionRefused
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.tunnel.background import background_loop, submit
from sandbox_kernel.wire import session
from tests.helpers.rest import comes_to_rest
from tests.helpers.waiting import wait_until
from tests.kernels.conftest import KernelStarter
from tests.kernels.live import PATIENCE, Live

from .conftest import assert_idle
from .jail import agent_of, clients, kernel_of, path_of, processes_of
from .shaped import Shape, install
from .traffic import Traffic


@pytest.fixture
def live(start_kernel: KernelStarter) -> Live:
    return start_kernel()


# --- time stands still


@pytest.mark.slow
def test_the_hosts_loop_is_blocked(live: Live) -> None:
    """Whoever blocks the background loop for 10 s delays everything, and loses nothing."""
    traffic = Traffic(live, seed=1)
    background_loop().call_soon_threadsafe(time.sleep, 10)
    traffic.round()
    assert live.kernel.tunnel.reconnects == 0


class Pause:
    """Stops the agent alone, or the whole jail, as a laptop does that goes to sleep."""

    def __init__(self, live: Live, whole: bool) -> None:
        self._live = live
        self._whole = whole
        self._stopped: list[int] = []

    def begin(self) -> None:
        live = self._live
        # The jail's first process comes first: it lets the agent go on if that alone is stopped.
        first = Records().load("local", live.sandbox).data["init"][0]
        others = set(processes_of(live)) if self._whole else {agent_of(live)}
        self._stopped = [first]
        self._signal(signal.SIGSTOP)
        wait_until(lambda: _state(first) == "T", "the first process is stopped")
        self._stopped += others - {first}
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: int) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signum)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(params=["agent", "jail"])
def pause(request: pytest.FixtureRequest, live: Live) -> Iterator[Pause]:
    made = Pause(live, request.param == "jail")
    yield made
    made.end()


@pytest.mark.usefixtures("impatient")
def test_the_sandbox_is_paused(live: Live, pause: Pause) -> None:
    """A sandbox that stands still is waited for; when it goes on, so does everything else."""
    traffic = Traffic(live, seed=1)
    pause.begin()
    wait_until(lambda: not live.kernel.tunnel.connected, "the host gives the link up")
    assert_idle()
    pause.end()
    wait_until(lambda: live.kernel.tunnel.connected, "the host has a new link")
    traffic.round()


@pytest.mark.slow
@pytest.mark.long
def test_the_sandbox_is_paused_for_a_minute(live: Live, pause: Pause) -> None:
    """The same with the real limits: a dead link is found after half a minute of silence."""
    traffic = Traffic(live, seed=1)
    pause.begin()
    time.sleep(60)
    assert not live.kernel.tunnel.connected
    assert live.manager.is_alive()
    pause.end()
    traffic.round()


@pytest.mark.slow
@pytest.mark.long
def test_a_paused_sandbox_can_be_shut_down(live: Live, pause: Pause) -> None:
    """It is asked first; when it does not answer, it is killed."""
    pause.begin()
    live.client.stop_channels()
    live.manager.shutdown_kernel(now=True)
    assert not live.manager.has_kernel


# --- something is used up


FILL = """
import os
size = 2**20
with open(FOLDER + "/filler", "wb", buffering=0) as file:
    while size:
        try:
            file.write(bytes(size))
        except OSError as error:
            print(error)
            size //= 2
"""


def test_a_full_disk(start_kernel: KernelStarter) -> None:
    """The wire needs no disk, and a new kernel no more than the old one gives back."""
    live = start_kernel()
    folder = live.kernel.handle.agent_folder
    assert "No space left" in live.ok(FILL.replace("FOLDER", repr(folder))).text()
    traffic = Traffic(live, seed=1)
    live.cut()
    traffic.round()
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("6 * 7").value == "42"


def test_the_disk_quota_is_used_up(
    start_kernel: KernelStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes more than the sandbox may hold is stopped, in words, where its folders have no
    file system of their own; the sandbox lives on."""
    monkeypatch.setenv("SANDBOX_KERNEL_NO_DISK_IMAGE", "1")
    live = start_kernel(disk_mib=64)
    live.client.execute(
        "for n in range(99):\n"
        "    with open(f'/workspace/{n}', 'wb') as file: file.write(bytes(8 * 2**20))\n"
        "import time; time.sleep(60)"
    )
    wait_until(lambda: not live.manager.is_alive(), "the kernel is stopped")
    assert "disk full" in live.provisioner.death
    assert submit(live.kernel.handle.shell("rm /workspace/*")).result(30).ok
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    Traffic(live, seed=1).round()


def test_no_descriptor_is_left_in_the_sandbox(start_kernel: KernelStarter) -> None:
    """A kernel that stands still, and clients without end: the agent turns some away, lets others
    wait, and can still be talked to."""
    live = start_kernel(open_files=128)
    agent = agent_of(live)
    os.kill(kernel_of(live), signal.SIGSTOP)
    crowd = clients(live, 180)
    for number, sock in enumerate(crowd):
        sock.connect(path_of(live, ("shell", "control")[number % 2]))
        sock.setblocking(False)
    wait_until(lambda: any(_turned_away(sock) for sock in crowd), "somebody is turned away")
    comes_to_rest(agent)
    live.cut()
    assert submit(live.kernel.tunnel.control.call("status")).result(60)["running"]
    for sock in crowd:
        sock.close()
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    Traffic(live, seed=1).round()


def test_a_stopped_kernel_does_not_stop_its_agent(live: Live) -> None:
    """More clients than the kernel's sockets have room for wait, without keeping the agent busy."""
    agent, kernel = agent_of(live), kernel_of(live)
    os.kill(kernel, signal.SIGSTOP)
    crowd = clients(live, 200)
    for sock in crowd:
        sock.connect(path_of(live))
    assert submit(live.kernel.tunnel.control.call("status")).result(60)["running"]
    comes_to_rest(agent)
    for sock in crowd:
        sock.close()
    os.kill(kernel, signal.SIGCONT)
    Traffic(live, seed=1).round()


def _turned_away(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


STARVED = """
    import logging, os, resource, socket, sys, time
    from sandbox_kernel.sandboxes.local.handle import LocalHandle
    from tests.faults.conftest import assert_idle
    from tests.faults.jail import clients, path_of
    from tests.faults.traffic import Traffic
    from tests.kernels.conftest import KernelStarter
    from tests.helpers.waiting import wait_until

    warnings = []
    handler = logging.Handler()
    handler.emit = warnings.append
    logging.getLogger().addHandler(handler)
    LocalHandle.takes_connections = False
    start = KernelStarter()
    live = start()
    traffic = Traffic(live, 1)
    crowd = clients(live, 5)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)  # all numbers below it are in use
    holes = []
    while (fd := os.dup(lowest)) < max(map(int, os.listdir("/proc/self/fd"))) - 1:
        holes.append(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, limits[1]))
    for sock in crowd:
        sock.connect(path_of(live))
    live.cut()
    time.sleep(4)  # many attempts, of which few are worth a warning
    assert_idle()
    assert 1 <= len(warnings) < 30, warnings
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: live.kernel.tunnel.connected, "there is a link again")
    (endpoint,) = [e for e in live.kernel.tunnel._endpoints if e.target == "kernel:shell"]
    wait_until(lambda: len(endpoint.pumps) >= 6, "those who waited are let in")
    traffic.round()
    start.shut_down()
    print("recovered")
"""


def test_no_descriptor_is_left_on_the_host(folder: Path) -> None:
    """New clients and new links wait until there are some again, without burning a core."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STARVED)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout == "recovered\n", result.stdout + result.stderr


def test_clients_come_and_go_while_the_sandbox_is_out_of_reach(
    start_kernel: KernelStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for the sandbox until it is back has a bound; then clients must wait."""
    monkeypatch.setattr(session, "MAX_UNACKED_FRAMES", 500)
    with install(Shape()) as faults:
        live = start_kernel()
        traffic = Traffic(live, seed=1)
        faults.refused_until = float("inf")
        faults.cut()
        wait_until(lambda: not live.kernel.tunnel.connected, "the link is cut")
        for sock in clients(live, 300):
            with sock:
                sock.setblocking(False)
                try:
                    sock.connect(path_of(live))
                except BlockingIOError:
                    break  # the backlog is full: the endpoint accepts no more
        kept = live.kernel.tunnel._peer.session._replay
        wait_until(lambda: len(kept) >= 200, "they are kept")
        assert_idle()
        assert len(kept) < 450
        faults.refused_until = 0.0
        traffic.round()


# --- something is taken away


def test_the_hosts_runtime_folder_is_deleted(live: Live, folder: Path) -> None:
    """What is connected stays so. A cut cannot be mended: the kernel counts as lost, in words."""
    traffic = Traffic(live, seed=1)
    shutil.rmtree(folder / "run")
    traffic.round()
    live.cut()
    wait_until(lambda: not live.manager.is_alive(), "the kernel is known to be lost")
    assert "sandbox" in live.provisioner.death.lower()
    assert_idle()


def test_the_sandbox_is_killed(live: Live) -> None:
    """With all its processes at once, as a provider would: the kernel counts as lost, in words."""
    submit(live.kernel.handle.kill()).result(30)
    wait_until(lambda: not live.manager.is_alive(), "the kernel is known to be lost")
    assert "has ended: it was killed" in live.provisioner.death
    assert_idle()


# --- somebody else wants it


def attach(live: Live) -> SandboxedKernel:
    """What another process does that has found the sandbox's record."""
    log = logging.getLogger("another process")
    return submit(SandboxedKernel.attach(LocalClient(), live.sandbox, log)).result(60)


def test_another_process_takes_the_kernel_over(live: Live) -> None:
    """The newest wins; the old one is told who has it, and does not try to get it back."""
    live.ok("kept = 42")
    other = attach(live)
    wait_until(lambda: not live.manager.is_alive(), "the old owner knows")
    assert "another host process has taken this sandbox over" in live.provisioner.death
    assert other.exit_code is None
    assert submit(other.tunnel.control.call("status")).result(30)["running"]
    submit(other.remove()).result(30)


def test_a_wrong_token_gets_nothing(live: Live) -> None:
    """Who does not know the sandbox's token is refused, and its owner does not notice."""
    record = Records().load("local", live.sandbox)
    Records().save(replace(record, kernel={"token": "0" * 64}))
    with pytest.raises(SessionRefused, match="token"):
        attach(live)
    Records().save(record)
    Traffic(live, seed=1).round()
    assert live.kernel.tunnel.reconnects == 0
