"""Limits that process 1 of the jail watches, because the host's Linux does not enforce them.

Memory and process count are watched where the host has no cgroup for the jail, the size of the
folders always. A watch sees an excess after the fact, so it checks more often near a limit.
"""

from __future__ import annotations

import os
import signal
import time

from ..commands.start import running_pids
from .disk_usage import MeasuredFolders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SHORTEST, LONGEST = 0.02, 1.0
"""Seconds between two checks."""
LONGEST_UNCAPPED = 0.1
"""The same for the process limit, which a fork bomb reaches quickly."""
MEMORY_RATE = 4 * 2**30
"""Bytes a second that one CPU touches at most; decides when the next check is due."""
DISK_RATE = 2 * 2**30
WRITER_BYTES = 2**20
"""A process that wrote less since the last check is not a writer."""
DYING_TIME = 3.0
"""Seconds that a killed process may take to end before it counts again."""
FORK_EXCESS, FORK_TIME = 96 * 2**20, 3.0
"""A process that hides its memory and forks, as a warm interpreter does, seems to use it twice. An
excess that may be just that has so many seconds to end."""
FORK_BOMB_PASSES = 20
MEMORY_FOLDERS = ("/tmp", "/dev/shm", "/run")  # noqa: S108  (a path inside the sandbox)
_MEMORY_PATHS = tuple(f"{folder}/" for folder in MEMORY_FOLDERS)
PAGE = os.sysconf("SC_PAGE_SIZE")


class Process:
    """The fields of /proc/PID/stat that are used here."""

    __slots__ = ("name", "pid", "rss", "start", "state", "threads")

    def __init__(self, text: str) -> None:
        head, _, tail = text.rpartition(")")
        number, _, self.name = head.partition(" (")
        fields = tail.split()
        self.pid = int(number)
        self.state = fields[0]
        self.threads = int(fields[17])
        self.start = int(fields[19])
        self.rss = int(fields[21]) * PAGE


def processes() -> list[Process]:
    """All processes of the jail except process 1 and zombies."""
    numbers = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    texts = [_read(f"/proc/{number}/stat") for number in numbers]
    found = [Process(text) for text in texts if text]
    return [process for process in found if process.state not in "ZX"]


def memory_in_use(found: list[Process]) -> int:
    """An upper bound of the bytes that processes, in-memory folders and shared segments hold:
    shared pages count for each process. Cheap."""
    shared = _memory_of_folders() + _unattached_segments()
    return shared + sum(process.rss for process in found)


def memory_exactly(found: list[Process]) -> tuple[int, dict[int, int], int]:
    """The same with shared pages divided among the processes (PSS), and each one's share. Last, how
    much of it may be shared pages after all: the resident sizes of processes that hide theirs."""
    folders = _memory_of_folders()
    sizes = {}
    hidden = 0
    for process in found:
        size, shared = proportional(process)
        if size is None:
            size = process.rss
            hidden += size
        elif folders and shared:
            # Mappings of files in those folders are in both figures.
            size -= min(shared, _mapped_from_folders(process))
        sizes[process.pid] = size
    return folders + _unattached_segments() + sum(sizes.values()), sizes, hidden


def _memory_of_folders() -> int:
    spaces = [os.statvfs(folder) for folder in MEMORY_FOLDERS]
    return sum((space.f_blocks - space.f_bfree) * space.f_frsize for space in spaces)


def _unattached_segments() -> int:
    """System V shared memory that no process has mapped. (Mapped, it counts for processes.)"""
    segments = map(str.split, _read("/proc/sysvipc/shm").splitlines()[1:])
    return sum(int(fields[14]) for fields in segments if len(fields) > 14 and fields[6] == "0")


def proportional(process: Process) -> tuple[int | None, int]:
    """The PSS of a process, None if it is not dumpable, and how much of it is in-memory files."""
    sizes = {}
    for line in _read(f"/proc/{process.pid}/smaps_rollup").splitlines():
        name, _, value = line.partition(":")
        if name in ("Pss", "Pss_Shmem"):
            sizes[name] = int(value.split()[0]) * 1024
    return sizes.get("Pss"), sizes.get("Pss_Shmem", 0)


def _mapped_from_folders(process: Process) -> int:
    total, counts = 0, False
    try:
        with open(f"/proc/{process.pid}/smaps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name == "Pss" and counts:
                    total += int(value.split()[0]) * 1024
                elif "-" in name.split(" ", 1)[0]:
                    path = line.split(None, 5)[5:]
                    counts = bool(path) and path[0].startswith(_MEMORY_PATHS)
    except (OSError, ValueError):
        pass  # it has ended, or is not dumpable
    return total


def _read(path: str) -> str:
    """The first bytes of a small file; empty if its process has ended or is not dumpable."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.read(fd, 8192).decode(errors="replace")
        finally:
            os.close(fd)
    except OSError:
        return ""


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


class Watch:
    """Checks the limits, kills the processes that exceed them, and reports each kill.

    ``report`` gets a dictionary for each kill; processes with ``is_main`` are killed last.
    """

    def __init__(
        self,
        *,
        memory: int | None,
        processes: int | None,
        disk: int | None,
        folders: list[str],
        report: Callable[[dict[str, Any]], None],
        is_main: Callable[[int], bool],
    ) -> None:
        self._memory = memory
        self._process_limit = processes
        self._disk = disk
        self._folders = MeasuredFolders(folders, disk, running_pids) if disk else None
        self._cpus = os.cpu_count() or 1
        self._report = report
        self._is_main = is_main
        self._killed: dict[tuple[int, int], float] = {}
        self._written: dict[int, int] = {}
        self._last_used = 0
        self._doubtful_since: float | None = None

    def check(self) -> float:
        """Check once. Returns the seconds until the next check."""
        wait = LONGEST
        if self._process_limit is not None:
            wait = LONGEST_UNCAPPED
            self._check_processes(self._process_limit)
        if self._memory is not None:
            wait = min(wait, self._check_memory(self._memory))
        if self._folders is not None and self._disk is not None:
            wait = min(wait, self._check_disk(self._folders, self._disk))
        return wait

    def _kill(self, kind: str, process: Process, used: int, limit: int, text: str) -> None:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._killed[process.pid, process.start] = time.monotonic()
        event = {"kind": kind, "pid": process.pid, "name": process.name, "used": used}
        self._report({**event, "limit": limit, "text": text, "time": time.time()})

    def _living(self) -> tuple[list[Process], bool]:
        """The processes that were not killed here, and whether a killed one is still ending: a
        big process needs a while to free its memory, and others must not be killed for that."""
        now = time.monotonic()
        self._killed = {key: at for key, at in self._killed.items() if now - at < DYING_TIME}
        found = processes()
        living = [process for process in found if (process.pid, process.start) not in self._killed]
        return living, len(living) < len(found)

    def _check_memory(self, limit: int) -> float:
        found, ending = self._living()
        used = memory_in_use(found)
        if used <= limit:
            self._doubtful_since = None
        else:
            used, sizes, hidden = memory_exactly(found)
            excess = used - limit
            if self._may_be_a_fork(excess, hidden):
                return SHORTEST
            if ending:
                # What is being freed may be in-memory files, but no other process's mapping.
                excess -= _memory_of_folders()
            # The largest, as many at once as it takes: while one dies, the others would grow.
            for process in sorted(found, key=lambda p: (self._is_main(p.pid), -p.rss)):
                if excess <= 0:
                    break
                text = f"out of memory: {process.name!r} used {_mib(process.rss)} of {_mib(limit)}"
                if used - process.rss > limit // 10:
                    text += f" ({_mib(used)} in the whole sandbox)"
                self._kill("memory", process, process.rss, limit, text)
                excess -= max(sizes[process.pid], PAGE)
        headroom = (limit - used) / (MEMORY_RATE * self._cpus)
        return min(max(headroom, SHORTEST), LONGEST)

    def _may_be_a_fork(self, excess: int, hidden: int) -> bool:
        """Whether an excess may be pages that processes share, and has not lasted for long."""
        if not 0 < excess <= min(hidden, FORK_EXCESS):
            self._doubtful_since = None
            return False
        now = time.monotonic()
        if self._doubtful_since is None:
            self._doubtful_since = now
        return now - self._doubtful_since < FORK_TIME

    def _check_processes(self, limit: int) -> None:
        for _ in range(FORK_BOMB_PASSES):
            found, _ending = self._living()
            count = sum(process.threads for process in found)
            if count <= limit:
                return
            # The newest first: processes from before the excess keep running.
            found.sort(key=lambda process: (self._is_main(process.pid), -process.start))
            text = f"too many processes: {count} of {limit}, so the newest were killed"
            excess = count - limit
            for process in found:
                if excess <= 0:
                    break
                self._kill("processes", process, count, limit, text)
                excess -= process.threads
        # They fork faster than they can be counted; this call reaches all at once.
        os.kill(-1, signal.SIGKILL)

    def _check_disk(self, folders: MeasuredFolders, limit: int) -> float:
        if folders.measure(time.monotonic()) and folders.used > limit:
            self._stop_writers(folders.used, limit)
        if folders.measuring:
            return 0.0
        left = limit - folders.estimate()
        if 0 < left < limit // 4:
            self._written = {process.pid: _bytes_written(process.pid) for process in processes()}
        return min(max(left / DISK_RATE, SHORTEST), LONGEST)

    def _stop_writers(self, used: int, limit: int) -> None:
        """Kill the process that wrote most since the last check. If none is seen to write and yet
        the folders grow, kill all except the main process; if only that is left, kill it. A
        sandbox over its limit that no longer writes is left alone: its user may delete files."""
        found, ending = self._living()
        written = {process.pid: _bytes_written(process.pid) for process in found}
        grew = {pid: n - self._written.get(pid, 0) for pid, n in written.items()}
        self._written = written
        known, self._last_used = self._last_used, used
        text = f"disk full: workspace and home hold {_mib(used)} of {_mib(limit)}"
        others = [process for process in found if not self._is_main(process.pid)]
        writers = [process for process in others if grew[process.pid] >= WRITER_BYTES]
        if writers:
            biggest = max(writers, key=lambda process: grew[process.pid])
            self._kill("disk", biggest, used, limit, f"{text}; {biggest.name!r} was writing")
            self._last_used = 0  # it may have written more before it ended
        elif known and used >= known + WRITER_BYTES and not ending:
            for process in others or found:
                self._kill("disk", process, used, limit, text)


def _bytes_written(pid: int) -> int:
    for line in _read(f"/proc/{pid}/io").splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    return 0
