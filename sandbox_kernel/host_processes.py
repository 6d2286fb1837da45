"""Host processes, named so that a later one with the same number is not mistaken for them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The monitors of jails that this process started. They end with their jails and are reaped here,
# without a thread or an event loop of their own.
_started: dict[int, subprocess.Popen[bytes]] = {}


def adopt(process: subprocess.Popen[bytes]) -> None:
    """Reap this child at a later ``reap``, after it has ended."""
    _started[process.pid] = process


def reap() -> None:
    """Reap all adopted children that have ended."""
    for pid, process in list(_started.items()):
        if process.poll() is not None:
            _started.pop(pid, None)


@dataclass(frozen=True)
class ProcessId:
    """A process: its number and the time it started, in clock ticks since the host did."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """None if there is no such process, or if it has ended and waits to be reaped."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def kill(self, timeout: float) -> bool:
        """SIGKILL it, and wait until it has ended. True if it has."""
        with contextlib.suppress(ProcessLookupError), _handle(self.pid) as fd:
            if self.alive:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        return self.wait(timeout)

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended. True if it has."""
        with contextlib.suppress(ProcessLookupError), _handle(self.pid) as fd:
            if self.alive:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                return bool(poll.poll(timeout * 1000))
        return True


def find_processes(wanted: Callable[[list[bytes]], bool]) -> list[ProcessId]:
    """The processes whose command lines, as words, are ``wanted``."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            if wanted(words) and (process := ProcessId.of(int(pid))):
                found.append(process)
    return found


@contextlib.contextmanager
def _handle(pid: int) -> Iterator[int]:
    """A pidfd: it names this very process, even when its number is used again."""
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)
