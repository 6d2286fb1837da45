"""A warm interpreter that ends beside a spare that waits: with a real kernel."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.agents import FROM_PACKAGE, LIMIT, AgentProcess, Host
from tests.helpers.waiting import wait_until

KERNEL = (sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentProcess]:
    """With a shorter rest than in earnest."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shorter = "import sandbox_kernel.guest.spares as s; s.REST = s._MEMORY_INTERVAL = 0.2; "
    agent = AgentProcess([sys.executable, "-c", shorter + FROM_PACKAGE[2]])
    yield agent
    agent.close()


def spare_alone(host: Host) -> int:
    """The pid of the spare, when it is the only process that the agent has beside the kernel."""

    def beside() -> set[int]:
        agent, kernel = host.agent.process.pid, host.call("status")["pid"]
        return {int(p) for p in _children(agent)} - {kernel}

    spare = int(wait_until(lambda: host.call("status")["spare"], "a spare", LIMIT))
    wait_until(lambda: beside() == {spare}, "the end of the warm interpreter", LIMIT)
    return spare


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def launch_again(host: Host) -> int:
    host.call("kill")
    assert host.event()["event"] == "kernel_exited"
    return int(host.launch(*KERNEL)["pid"])


def test_restarts_go_on_as_before(host: Host) -> None:
    """The spare is the next kernel, and that one has a spare, too, which another warm interpreter
    has made. Without either, a kernel is started plainly."""
    host.launch(*KERNEL)
    for _ in range(2):
        spare = spare_alone(host)
        assert launch_again(host) == spare
    spare = spare_alone(host)
    os.kill(spare, signal.SIGKILL)
    wait_until(lambda: host.call("status")["spare"] is None, "its end", LIMIT)
    assert launch_again(host) != spare
    assert host.call("status")["running"]
    assert spare_alone(host) != spare
