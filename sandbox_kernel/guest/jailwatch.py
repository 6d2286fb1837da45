"""What jailinit watches where the kernel of the host does not enforce a limit by itself.

Used by ``jailinit`` only. Memory and process count are watched where the host has no cgroup to
give; the size of the workspace and home folders is always watched. A watch is late by nature: it
sees an excess after the fact, so it looks more often the closer a limit is.
"""

from __future__ import annotations

import os
import signal
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

SHORTEST, LONGEST = 0.05, 1.0
"""Seconds between two checks."""
LONGEST_UNCAPPED = 0.1
"""The same where nothing else slows a fork bomb down."""
MEMORY_RATE = 4 * 2**30
"""Bytes a second that one CPU may touch at most; decides how soon to look again."""
DISK_RATE = 2 * 2**30
WALK_SLICE = 2000
"""Directory entries looked at before other work gets its turn."""
WALK_EVERY = 120.0
"""Seconds after which the folders are measured even if free space shows no reason to."""
ENTRY_BYTES = 1024
"""The least that a file counts, so that a flood of empty files counts, too."""
WRITER_BYTES = 2**20
"""Who wrote less since the last look is no writer."""
DYING_TIME = 3.0
"""Seconds that a killed process may take to end before it counts again."""
FORK_BOMB_PASSES = 20
MEMORY_FOLDERS = ("/tmp", "/dev/shm", "/run")  # noqa: S108  (a path inside the sandbox)
PAGE = os.sysconf("SC_PAGE_SIZE")


class Process:
    """One line of /proc/<pid>/stat, as far as it is of use here."""

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
    """All processes of the jail but jailinit. Zombies are left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            text = _read(f"/proc/{name}/stat")
            if text:
                process = Process(text)
                if process.state not in "ZX":
                    found.append(process)
    return found


def memory_in_use(found: list[Process], limit: int | None = None) -> int:
    """Bytes that the processes and the in-memory folders hold.

    Resident sizes count shared pages once a process, which is cheap and too much; only if that
    passes ``limit`` are the shared pages divided up (PSS).
    """
    shared = 0
    for folder in MEMORY_FOLDERS:
        try:
            space = os.statvfs(folder)
        except OSError:
            continue
        shared += (space.f_blocks - space.f_bfree) * space.f_frsize
    total = shared + sum(process.rss for process in found)
    if limit is None or total <= limit:
        return total
    return shared + sum(_proportional(process) for process in found)


def _proportional(process: Process) -> int:
    for line in _read(f"/proc/{process.pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return process.rss


def _read(path: str) -> str:
    """The first piece of a small file; empty if its process has gone or may not be looked at."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 8192).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


class Folders:
    """How much some folders hold: measured by walking them, in slices, and only when the drop in
    the file system's free space says that the limit may have been passed."""

    def __init__(
        self,
        roots: list[str],
        limit: int,
        is_keeper: Callable[[int], bool] = lambda pid: False,
    ) -> None:
        self._roots = roots
        self._is_keeper = is_keeper
        self._limit = limit
        self._walk: Iterator[None] | None = None
        self._counted = 0
        self._blind = False
        self._walk_free = 0
        self._walk_started = 0.0
        self._next_walk = 0.0
        self._measured_at = 0.0
        self._free = self._free_space()
        self.used = 0

    def _free_space(self) -> int:
        free = {}
        for root in self._roots:
            space = os.statvfs(root)
            free[os.stat(root).st_dev] = space.f_bfree * space.f_frsize
        return sum(free.values())

    def estimate(self) -> int:
        """At most what the folders hold now, if nobody else freed space."""
        return self.used + max(0, self._free - self._free_space())

    def measure(self, now: float) -> bool:
        """Measure a slice if there is reason to. True when a measurement has been completed."""
        if self._walk is None:
            due = self.estimate() > self._limit or now - self._measured_at > WALK_EVERY
            if not due or now < self._next_walk:
                return False
            self._walk = self._entries()
            self._counted, self._blind = 0, False
            self._walk_free, self._walk_started = self._free_space(), now
        for _ in range(WALK_SLICE):
            # Far over the limit, how far makes no difference.
            if self._counted > 2 * self._limit or next(self._walk, self) is self:
                break
        else:
            return False
        self._count_deleted()
        # What could not be looked into is judged by the drop in free space.
        self.used = max(self._counted, self.estimate()) if self._blind else self._counted
        self._free, self._walk = self._walk_free, None
        self._measured_at = time.monotonic()
        self._next_walk = self._measured_at + 10 * (self._measured_at - self._walk_started)
        return True

    @property
    def measuring(self) -> bool:
        return self._walk is not None

    def _entries(self) -> Iterator[None]:
        seen = set()
        pending = list(self._roots)
        while pending:
            folder = pending.pop()
            try:
                entries = os.scandir(folder)
            except OSError:
                self._blind = True
                continue
            with entries:
                for entry in entries:
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue  # deleted in the meantime
                    if stat.S_ISDIR(found.st_mode):
                        pending.append(entry.path)
                    elif found.st_nlink > 1:
                        if found.st_ino in seen:
                            continue
                        seen.add(found.st_ino)
                    self._counted += max(found.st_blocks * 512, ENTRY_BYTES)
                    yield

    def _count_deleted(self) -> None:
        """Files that are held open after they were deleted take up space, too. A process that
        does not let itself be looked into (but for our own) hides what it holds."""
        devices = {os.stat(root).st_dev for root in self._roots}
        seen = set()
        for process in processes():
            folder = f"/proc/{process.pid}/fd"
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                continue  # it has ended
            except OSError:
                self._blind = self._blind or not self._is_keeper(process.pid)
                continue
            for name in names:
                try:
                    found = os.stat(f"{folder}/{name}")
                except FileNotFoundError:
                    continue
                except OSError:
                    self._blind = self._blind or not self._is_keeper(process.pid)
                    break
                if not found.st_nlink and found.st_dev in devices and found.st_ino not in seen:
                    seen.add(found.st_ino)
                    self._counted += found.st_blocks * 512


class Watch:
    """Checks the limits, kills what is over, and reports each kill.

    ``report`` gets a dictionary a kill (kind, pid, name, used, limit, text); ``is_main`` tells
    the processes that are killed last, ``is_keeper`` those that run our own code.
    """

    def __init__(
        self,
        *,
        memory: int | None,
        process_limit: int | None,
        disk: int | None,
        folders: list[str],
        cpus: int,
        report: Callable[[dict[str, Any]], None],
        is_main: Callable[[int], bool],
        is_keeper: Callable[[int], bool],
    ) -> None:
        self._memory = memory
        self._process_limit = process_limit
        self._disk = disk
        self._folders = Folders(folders, disk, is_keeper) if disk else None
        self._cpus = cpus
        self._report = report
        self._is_main = is_main
        self._killed: dict[tuple[int, int], float] = {}
        self._written: dict[int, int] = {}
        self._last_used = 0

    def check(self) -> float:
        """Look once. Returns the seconds until the next look."""
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
        self._report(
            {
                "kind": kind,
                "pid": process.pid,
                "name": process.name,
                "used": used,
                "limit": limit,
                "text": text,
                "time": time.time(),
            }
        )

    def _living(self) -> tuple[list[Process], bool]:
        """The processes that were not killed from here, and whether one of those still ends:
        freeing its memory takes a big process a while, in which nobody else must pay for it."""
        now = time.monotonic()
        self._killed = {key: at for key, at in self._killed.items() if now - at < DYING_TIME}
        found = processes()
        living = [process for process in found if (process.pid, process.start) not in self._killed]
        return living, len(living) < len(found)

    def _check_memory(self, limit: int) -> float:
        found, ending = self._living()
        used = memory_in_use(found, limit)
        if ending:
            return SHORTEST
        if used > limit and found:
            biggest = max(found, key=lambda process: process.rss)
            text = f"out of memory: {biggest.name!r} used {_mib(biggest.rss)} of {_mib(limit)}"
            if used - biggest.rss > limit // 10:
                text += f" ({_mib(used)} in the whole sandbox)"
            self._kill("memory", biggest, biggest.rss, limit, text)
            return SHORTEST
        headroom = (limit - used) / (MEMORY_RATE * self._cpus)
        return min(max(headroom, SHORTEST), LONGEST)

    def _check_processes(self, limit: int) -> None:
        for _ in range(FORK_BOMB_PASSES):
            found, _ending = self._living()
            count = sum(process.threads for process in found)
            if count <= limit:
                return
            # The newest first: what was there before the limit was passed keeps running.
            found.sort(key=lambda process: (self._is_main(process.pid), -process.start))
            text = f"too many processes: {count} of {limit}, so the newest were killed"
            excess = count - limit
            for process in found:
                if excess <= 0:
                    break
                self._kill("processes", process, count, limit, text)
                excess -= process.threads
        # They fork faster than they can be counted; this call reaches all of them at once.
        os.kill(-1, signal.SIGKILL)

    def _check_disk(self, folders: Folders, limit: int) -> float:
        if folders.measure(time.monotonic()) and folders.used > limit:
            self._stop_writers(folders.used, limit)
        if folders.measuring:
            return 0.0
        left = limit - folders.estimate()
        if 0 < left < limit // 4:
            self._written = {process.pid: _bytes_written(process.pid) for process in processes()}
        return min(max(left / DISK_RATE, SHORTEST), LONGEST)

    def _stop_writers(self, used: int, limit: int) -> None:
        """Kill who wrote most since the last look; if nobody shows and yet the folders grow, all
        but the main process; if only that is left, it. A sandbox that is over its limit but
        writes no more is left alone: its user may want to delete files."""
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
