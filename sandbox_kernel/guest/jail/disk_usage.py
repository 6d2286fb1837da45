"""How much the folders of a local jail hold, counted from inside.

Used by ``watchdog`` where the jail has no file system of its own to limit it. Only files in the
folders, and deleted files that the jail's processes still hold, count. The free space of the
host's file system only decides when to count: others use it, too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

WALK_SLICE = 2000
"""Steps of a measurement in one turn of the loop."""
WALK_EVERY = 120.0
"""Seconds after which the folders are measured even if free space shows no reason to."""
WALK_EVERY_UNSEEN = 10.0
"""The same on file systems without a count of inodes (btrfs)."""
ENTRY_BYTES = 1024
"""The least that a file counts: a flood of empty files uses space, too."""
REST = 10
"""The pause after a measurement, as a multiple of its time; while over the limit, 1."""
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH_PIECE = 3000
"""Bytes of a path that are opened at once: Linux allows 4096, and folders can be deeper."""


class MeasuredFolders:
    """How much some folders hold: measured by walking them, in slices, and only when the file
    system has lost so much free space that the limit may have been passed."""

    def __init__(self, roots: list[str], limit: int, pids: Callable[[], list[int]]) -> None:
        self._roots = roots
        self._limit = limit
        self._pids = pids
        self._walk: Generator[None, None, None] | None = None
        self._counted = 0
        self._walk_started = 0.0
        self._next_walk = 0.0
        self._measured_at = 0.0
        self._dropped = 0
        self._files_known = True
        self._free = self._free_space()
        self.used = 0

    def _free_space(self) -> tuple[int, int]:
        """Free bytes and free inodes of the file systems that the folders are on."""
        free = {}
        for root in self._roots:
            space = os.statvfs(root)
            self._files_known = self._files_known and space.f_files > 0
            free[os.stat(root).st_dev] = (space.f_bfree * space.f_frsize, space.f_ffree)
        return sum(size for size, _ in free.values()), sum(files for _, files in free.values())

    def estimate(self) -> int:
        """An upper bound: as if all space that was used up since the last measurement were in
        the folders. It decides when to measure, never whether to kill."""
        size, files = self._free_space()
        known_size, known_files = self._free
        # Space that somebody frees must not hide space that is used a moment later.
        taken = max(0, known_size - size), max(0, known_files - files) * ENTRY_BYTES
        self._dropped += max(taken)
        self._free = (size, files)
        return self.used + self._dropped

    def measure(self, now: float) -> bool:
        """Measure a slice if there is reason to. True when a measurement has been completed."""
        if self._walk is None:
            every = WALK_EVERY if self._files_known else WALK_EVERY_UNSEEN
            due = self.estimate() > self._limit or now - self._measured_at > every
            if not due or now < self._next_walk:
                return False
            self._walk = self._steps()
            self._counted = self._dropped = 0
            self._walk_started = now
        for _ in range(WALK_SLICE):
            if next(self._walk, self) is self:
                break
        else:
            return False
        self.used, self._walk = self._counted, None
        self._measured_at = time.monotonic()
        rest = 1 if self.used > self._limit else REST
        self._next_walk = self._measured_at + rest * (self._measured_at - self._walk_started)
        return True

    @property
    def measuring(self) -> bool:
        return self._walk is not None

    def _steps(self) -> Generator[None, None, None]:
        seen: set[tuple[int, int]] = set()
        pending = list(self._roots)
        changed: list[tuple[str, int]] = []
        try:
            while pending:
                path = pending.pop()
                try:
                    fd = _open(path, changed)
                except OSError:
                    continue  # deleted in the meantime
                try:
                    if not os.access(".", os.X_OK, dir_fd=fd):
                        _unlock(path, changed)
                    with os.scandir(fd) as entries:
                        for entry in entries:
                            self._count(entry, path, pending, seen)
                            yield
                except OSError:
                    pass
                finally:
                    os.close(fd)
        finally:
            for path, mode in reversed(changed):
                # It may have been moved or deleted in the meantime.
                with contextlib.suppress(OSError), _reached(path) as (base, name):
                    os.chmod(name, mode, dir_fd=base)
        yield from self._deleted()

    def _count(
        self, entry: os.DirEntry[str], path: str, pending: list[str], seen: set[tuple[int, int]]
    ) -> None:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return  # deleted in the meantime
        if stat.S_ISDIR(found.st_mode):
            pending.append(f"{path}/{entry.name}")
        elif found.st_nlink > 1:
            key = (found.st_dev, found.st_ino)
            if key in seen:
                return
            seen.add(key)
        self._counted += max(found.st_blocks * 512, ENTRY_BYTES)

    def _deleted(self) -> Generator[None, None, None]:
        """Deleted files that are open or mapped use space, too. Those of processes that are not
        dumpable are invisible. Of a file that is only mapped, the end of the mapping counts."""
        devices = {os.stat(root).st_dev for root in self._roots}
        seen: set[tuple[int, int]] = set()
        for pid in self._pids():
            try:
                places = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
            except OSError:
                continue  # it has ended, or hides
            for place in places:
                yield
                try:
                    found = os.stat(place)
                except OSError:
                    continue
                key = (found.st_dev, found.st_ino)
                if not found.st_nlink and found.st_dev in devices and key not in seen:
                    seen.add(key)
                    self._counted += found.st_blocks * 512
        mapped: dict[str, int] = {}
        for pid in self._pids():
            try:
                with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
                    for line in lines:
                        yield
                        if line.endswith(" (deleted)\n"):
                            self._count_mapped(line, devices, seen, mapped)
            except (OSError, ValueError):
                pass  # it has ended, or hides

    def _count_mapped(
        self, line: str, devices: set[int], seen: set[tuple[int, int]], mapped: dict[str, int]
    ) -> None:
        addresses, _, offset, device, inode, path = line.split(None, 5)
        number = os.makedev(*(int(part, 16) for part in device.split(":")))
        # btrfs shows another device here than stat() does; then the path tells.
        ours = number in devices or path.startswith(tuple(f"{root}/" for root in self._roots))
        if ours and (number, int(inode)) not in seen:
            start, end = (int(part, 16) for part in addresses.split("-"))
            key, size = f"{device} {inode}", int(offset, 16) + end - start
            self._counted += max(0, size - mapped.get(key, 0))
            mapped[key] = max(size, mapped.get(key, 0))


def _open(path: str, changed: list[tuple[str, int]]) -> int:
    """Open a folder to list it, at any depth. One without permissions is opened up, which its
    owner may do; ``changed`` gets its path and its mode."""
    try:
        with _reached(path) as (base, name):
            return os.open(name, _LIST, dir_fd=base)
    except PermissionError:
        _unlock(path, changed)
    with _reached(path) as (base, name):
        return os.open(name, _LIST, dir_fd=base)


def _unlock(path: str, changed: list[tuple[str, int]]) -> None:
    """Add the permission to list a folder and to stat its entries."""
    with _reached(path) as (base, name):
        mode = stat.S_IMODE(os.stat(name, dir_fd=base, follow_symlinks=False).st_mode)
        os.chmod(name, mode | stat.S_IRWXU, dir_fd=base)
        changed.append((path, mode))


@contextlib.contextmanager
def _reached(path: str) -> Iterator[tuple[int, str]]:
    """A descriptor of a folder on the path, and the rest of the path, short enough for Linux."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd, rest = os.open("/", flags), path.lstrip("/")
    try:
        while len(os.fsencode(rest)) > _PATH_PIECE:
            cut = rest.rfind("/", 1, _PATH_PIECE // 4)
            if cut < 0:
                break
            further = os.open(rest[:cut], flags, dir_fd=fd)
            os.close(fd)
            fd, rest = further, rest[cut + 1 :]
        yield fd, rest
    finally:
        os.close(fd)
