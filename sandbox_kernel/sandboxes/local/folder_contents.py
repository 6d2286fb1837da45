"""What a folder that a jail is shown holds, and which of it the jail must not see.

``shared_folder`` asks when a jail starts. The folder may be writable for another sandbox, which is
hostile: it moves files while this looks, and gives folders names and permissions that hide them.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from sandbox_kernel.errors import SpecError
from sandbox_kernel.guest.workspace.ignore_file import (
    IGNORE_FILE,
    IgnoreRefused,
    Rules,
    read_ignore,
)
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.private_names import HIDDEN, KEYS
from sandbox_kernel.sandboxes.local.hidden_paths import ENVIRONMENT_MARKS, contains
from sandbox_kernel.sandboxes.local.nested_mounts import never_shown

MOST_ENTRIES = 500_000
_LONGEST_PATH = 2000
"""Bytes. Below a folder with a longer path, files could be too deep to be found or covered."""
_TRIES, _PAUSE = 50, 0.02
_TICK = 10_000_000
"""Nanoseconds; more than the granularity of a file system's clock."""

_PRIVATE = re.compile("|".join(map(fnmatch.translate, (HIDDEN, *KEYS))))

Identity = tuple[int, int]
"""Device and inode."""


@dataclass
class Contents:
    """Paths are relative to the folder."""

    covered: list[tuple[str, bool]] = field(default_factory=list)
    """What the jail must not see, and whether it is a folder; that counts as one."""
    fixed: set[str] = field(default_factory=set)
    """Folders on the way to what is covered because of its path, not of its name: if one had
    another name, it would not be covered next time."""
    environments: list[str] = field(default_factory=list)
    """Python environments."""
    folders: dict[str, Identity] = field(default_factory=dict)
    """All that were looked through; the folder itself is the empty path."""


def look_through(top: str, *, contested: bool = False) -> Contents:
    """``contested``: another sandbox may write to the folder. SpecError."""
    for _ in range(_TRIES):
        search = _Search(top)
        search.run()
        if not contested or search.is_still_true():
            return search.found
        time.sleep(_PAUSE)
    raise SpecError(
        f"Files in {top} are moved all the time, by a sandbox that may write there, so it cannot "
        f"be said what must be covered. Try again later, or shut the other kernel down."
    )


class _Search:
    def __init__(self, top: str) -> None:
        self.found = Contents()
        self._top = top
        self._rules = _Ignored(top)
        self._left = MOST_ENTRIES
        self._began = time.time_ns()
        self._changed: dict[str, int] = {}
        """When each folder's list of files last changed."""

    def run(self) -> None:
        waiting = [""]
        while waiting:
            waiting += self._look_into(waiting.pop())

    def is_still_true(self) -> bool:
        """Whether nothing was moved meanwhile from where it was not seen yet to where nobody
        looked again."""
        for path, changed in self._changed.items():
            try:
                now = os.lstat(os.path.join(self._top, path))
            except OSError:
                return False
            same = (now.st_dev, now.st_ino) == self.found.folders[path]
            if not same or now.st_ctime_ns != changed or changed > self._began - _TICK:
                return False
        return True

    def _look_into(self, folder: str) -> Iterator[str]:
        """The folders in a folder that must be looked into, too."""
        place = os.path.join(self._top, folder)
        try:
            before = os.lstat(place)
            with os.scandir(place) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
            if _is_closed(place, before):
                raise PermissionError(errno.EACCES, "the sandbox could not look into it")
        except FileNotFoundError:
            return
        except OSError as error:
            if not folder:
                raise SpecError(f"{self._top} cannot be shown: {error.strerror}.") from error
            # Its owner could open it in the jail, or open files in it by their names.
            self.found.covered.append((folder, True))
            return
        self.found.folders[folder] = before.st_dev, before.st_ino
        self._changed[folder] = before.st_ctime_ns
        self._left -= len(listed)
        if self._left < 0:
            raise SpecError(
                f"{self._top} has more than {MOST_ENTRIES} files, too many to look for what must "
                f"be covered. Name folders that the notebook does not need in {IGNORE_FILE}."
            )
        if folder and ENVIRONMENT_MARKS & {entry.name for entry in listed}:
            self.found.environments.append(folder)
        for entry in listed:
            if entry.is_symlink():
                continue  # leads to what the jail sees anyway, or nowhere
            path = f"{folder}/{entry.name}" if folder else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            # Whoever opens a socket or a pipe reaches a process of the host.
            special = not is_folder and not entry.is_file(follow_symlinks=False)
            if special or (is_folder and len(os.fsencode(path)) > _LONGEST_PATH):
                self.found.covered.append((path, is_folder))
            elif why := self._rules.why(path, is_folder=is_folder):
                self.found.covered.append((path, is_folder))
                if why == "path":
                    self.found.fixed.update(_above(path))
            elif is_folder:
                yield path


def _is_closed(place: str, found: os.stat_result) -> bool:
    """Whether the jail could not look into a folder now. It has no rights of root's."""
    if os.geteuid() != 0:
        return not os.access(place, os.R_OK | os.X_OK)
    return (found.st_mode >> (6 if found.st_uid == 0 else 0)) & 5 != 5


def _above(path: str) -> Iterator[str]:
    while path := os.path.dirname(path):
        yield path


class _Ignored:
    """Names and paths that are covered."""

    def __init__(self, top: str) -> None:
        from pathspec import GitIgnoreSpec  # lazy: start-up time

        try:
            lines = read_ignore(top).decode(errors="surrogateescape").splitlines()
            patterns = GitIgnoreSpec.from_lines(lines).patterns
        except IgnoreRefused as error:
            raise SpecError(str(error)) from error
        except ValueError as error:
            raise SpecError(f"{IGNORE_FILE} in {top} has an invalid pattern: {error}") from error
        self._named = Rules(
            [
                (pattern.regex.pattern, bool(pattern.include))
                for pattern in patterns
                if pattern.include is not None and pattern.regex is not None
            ]
        )
        self._by_path = any("/" in line.strip().rstrip("/") or line[:1] == "!" for line in lines)
        self._own = _inside(top, {str(data_dir()), str(runtime_dir())})
        self._mounts = _inside(top, never_shown(top))

    def why(self, path: str, *, is_folder: bool) -> str:
        """``name`` or ``path``, if what is there is covered; else empty."""
        if _PRIVATE.match(path.rpartition("/")[2].lower()) or path in self._mounts:
            return "name"
        if path in self._own:
            return "path"
        if self._named.ignored(f"{path}/" if is_folder else path):
            return "path" if self._by_path else "name"
        return ""


def _inside(top: str, places: Set[str]) -> set[str]:
    """Those in a folder, relative to it."""
    real = map(os.path.realpath, places)
    return {os.path.relpath(place, top) for place in real if contains(top, place)}
