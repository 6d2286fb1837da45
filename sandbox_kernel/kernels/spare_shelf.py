"""Spares between processes: where a holder offers its spare, and how one process gets it.

A program that has started a kernel leaves a holder behind (``spare_holder.py``): a process that has
inherited everything from it, makes one spare for the next kernel of the same kind, and offers it on
the kind's shelf. The shelf is a few files in ``<runtime dir>/spares``, which only this user can
enter, named by the kind:

    KIND.spare   the offer: which sandbox it is. Who renames it has the sandbox, and nobody else;
                 the holder, too, before it removes it
    KIND.lock    locked while there is a holder, which is named in it. Touched by each start

There is no server to ask, so nobody waits for one. All of it blocks, for microseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.host_processes import ProcessId, adopt
from sandbox_kernel.host_programs import host_environment, own_python
from sandbox_kernel.kernels.spare_plan import LEAST_MEMORY, SparePlan
from sandbox_kernel.paths import data_dir, private_dir, runtime_dir
from sandbox_kernel.sandboxes.local.cgroup import NO_CGROUP, memory_left
from sandbox_kernel.wire import VERSION

MOST_HOLDERS = 4
"""Of one user: how many kinds of kernels may have a spare at the same time."""
_LOG = "holder.log"
_HOLDER = "sandbox_kernel.kernels.spare_holder"
_END_TIMEOUT = 20.0
_MAX_LOG = 2**20
_MAX_FILE = 64 * 1024
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_VARIABLES = (
    *("HOME", "LANG", "TERM", "TMPDIR", "TZ", "PYTHONUSERBASE", "PYTHONNOUSERSITE", NO_CGROUP),
    *("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"),
)
_STATUS = ("Uid:", "Gid:", "Groups:", "Umask:", "Cap", "NoNewPrivs:", "Seccomp:", "Cpus_allowed:")


@dataclass(frozen=True)
class Offer:
    """A spare on a shelf."""

    backend: str
    name: str
    id: str
    likeness: str


class Shelf:
    """Of one kind of kernel, for processes in the same surroundings."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._folder = runtime_dir() / "spares"
        self._offer, self._lock = (self._folder / f"{key}.{end}" for end in ("spare", "lock"))

    @classmethod
    def of(cls, plan: SparePlan) -> Shelf:
        return cls(plan.key(_surroundings()))

    # --- for a process that starts a kernel

    def take(self) -> Offer | None:
        """The spare that is offered, or None. The caller has it, and nobody else gets it: it
        attaches to the sandbox before the short lease is over, or removes it."""
        taken = self._folder / f"{self.key}.taken-{secrets.token_hex(8)}"
        try:
            os.rename(self._offer, taken)  # atomic: one of two processes finds nothing
            content = taken.read_bytes()[:_MAX_FILE]
            os.unlink(taken)
            return Offer(**json.loads(content))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # of another version, whose spare ends with its lease
            return None

    def ask_for_one(self, plan: SparePlan) -> None:
        """A kernel of this kind was started: let a holder have a spare for the next one. It is a
        process of its own, for which nobody waits."""
        private_dir(self._folder)
        lock = self._acquired()
        if lock is None:
            with contextlib.suppress(FileNotFoundError):  # it is just ending
                os.utime(self._lock)
            return
        try:
            if len(_holders()) < MOST_HOLDERS and memory_left() >= LEAST_MEMORY:
                self._start_holder(plan, lock)
            else:
                self._lock.unlink(missing_ok=True)
        finally:
            os.close(lock)  # the holder has it, too

    def _acquired(self) -> int | None:
        """The lock, if there is no holder."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(self._lock).st_ino == os.fstat(fd).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass  # there is one, or one has ended since the file was opened
        os.close(fd)
        return None

    def _start_holder(self, plan: SparePlan, lock: int) -> None:
        log = self._folder / _LOG
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > _MAX_LOG:
                log.unlink()
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as errors:
            process = subprocess.Popen(
                own_python("-m", _HOLDER, self.key, str(lock)),
                env=host_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(lock,),
                start_new_session=True,
                cwd="/",
            )
        adopt(process)
        if (holder := ProcessId.of(process.pid)) is not None:
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps([holder.pid, holder.start]).encode(), 0)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended; its log says why
            process.stdin.write(json.dumps(plan.to_dict()).encode())

    # --- for the holder

    def offer(self, offer: Offer) -> None:
        write_atomically(self._offer, json.dumps(asdict(offer)), lasting=False)

    @property
    def offered(self) -> bool:
        return self._offer.exists()

    def last_use(self) -> float | None:
        """When a kernel of this kind was started last; None if nobody can find the shelf."""
        try:
            return self._lock.stat().st_mtime
        except FileNotFoundError:
            return None

    def end(self) -> None:
        """Leave nothing. The lock itself is free when this process has ended."""
        for path in self._folder.glob(f"{self.key}.*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: of another kind
            if not list(self._folder.glob("*.lock")):
                (self._folder / _LOG).unlink(missing_ok=True)
                self._folder.rmdir()


def end_holders() -> None:
    """End all holders of this user, with their spares. Blocks until they have ended."""
    holders = _holders()
    for holder in holders:
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGTERM)
    for holder in holders:
        if not holder.wait(_END_TIMEOUT):
            holder.kill(_END_TIMEOUT)


def _holders() -> list[ProcessId]:
    """Those that live. One that was killed has left its lock's file."""
    found = []
    for lock in (runtime_dir() / "spares").glob("*.lock"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # it has ended, or is not begun
            holder = ProcessId(*json.loads(lock.read_bytes()[:_MAX_FILE]))
            found += [holder] if holder.alive else []
    return found


def _surroundings() -> dict[str, object]:
    """What a process gives to its children, and a sandbox would have of it: two processes that
    differ in it share no spare."""
    status = Path("/proc/self/status").read_text()
    return {
        "program": [VERSION, sys.executable, str(data_dir())],
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "status": [line for line in status.splitlines() if line.startswith(_STATUS)],
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES],
        "files": [
            Path(f"/proc/self/{name}").read_text() for name in ("cgroup", "oom_score_adj", "limits")
        ],
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
    }
