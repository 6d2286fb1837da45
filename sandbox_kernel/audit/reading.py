"""Events of audits: as they were, and as they come."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sandbox_kernel.audit.event_log import Event, numbered

SUFFIX = ".jsonl"
_MOST_ROTATED = 99


def is_denied(event: Event) -> bool:
    """Whether it is about something that was refused."""
    return event.get("action") == "deny"


def read(
    path: str | Path, *, since: datetime | None = None, denied: bool = False
) -> Iterator[Event]:
    """The events of an audit, oldest first, with those of its rotated files. Lines that are none,
    such as one that is being written, are left out."""
    path = Path(path)
    numbers = [n for n in range(1, _MOST_ROTATED) if numbered(path, n).exists()]
    for file in (*(numbered(path, n) for n in reversed(numbers)), path):
        with contextlib.suppress(FileNotFoundError), open(file, "rb") as lines:
            for line in lines:
                event = _event(line)
                if event is not None and _is_wanted(event, since, denied):
                    yield event


def merged(
    paths: Iterable[Path], *, since: datetime | None = None, denied: bool = False
) -> Iterator[Event]:
    """The events of several audits, oldest first. Holds one event of each in memory."""
    streams = [read(path, since=since, denied=denied) for path in paths]
    return heapq.merge(*streams, key=lambda event: str(event.get("time", "")))


def audits(folder: Path) -> list[Path]:
    """The audits in a folder; each path stands for its rotated files, too."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(folder / name for name in names if name.endswith(SUFFIX))


@dataclass
class _Place:
    """How far a file was read."""

    inode: int = 0
    offset: int = 0


class Follower:
    """New events of audits, also of those that begin later, and across rotations."""

    def __init__(self, folder: Path, wanted: Callable[[Path], bool]) -> None:
        """From now on. ``wanted`` says which audits count."""
        self._folder = folder
        self._wanted = wanted
        self._places: dict[Path, _Place] = {}
        for path in filter(wanted, audits(folder)):
            found = _stat(path)
            if found is not None:
                self._places[path] = _Place(found.st_ino, found.st_size)

    def new(self) -> list[Event]:
        """The events since the last call, oldest first. Blocks for reading only."""
        events: list[Event] = []
        for path in filter(self._wanted, audits(self._folder)):
            events += self._new_in(path, self._places.setdefault(path, _Place()))
        return sorted(events, key=lambda event: str(event.get("time", "")))

    def _new_in(self, path: Path, place: _Place) -> Iterator[Event]:
        found = _stat(path)
        if found is None:
            return
        if place.inode and found.st_ino != place.inode:
            yield from self._rest_of_rotated(path, place)
        if found.st_ino != place.inode:
            place.inode, place.offset = found.st_ino, 0
        yield from _events_from(path, place)

    @staticmethod
    def _rest_of_rotated(path: Path, place: _Place) -> Iterator[Event]:
        """What was appended to the file before it got another name, and to those that followed."""
        rotated = [(n, _stat(numbered(path, n))) for n in range(1, _MOST_ROTATED)]
        inodes = {n: found.st_ino for n, found in rotated if found is not None}
        last = next(
            (n for n, inode in inodes.items() if inode == place.inode), max(inodes, default=0)
        )
        for number in range(last, 0, -1):
            inode = inodes.get(number, 0)
            there = _Place(inode, place.offset if inode == place.inode else 0)
            yield from _events_from(numbered(path, number), there)


def _events_from(path: Path, place: _Place) -> Iterator[Event]:
    """The events from a place to the file's last whole line; the place moves on."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_ino != place.inode:
            return  # rotated just now: the next call finds it
        file.seek(place.offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            place.offset += len(line)
            event = _event(line)
            if event is not None:
                yield event


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _is_wanted(event: Event, since: datetime | None, denied: bool) -> bool:
    return (not denied or is_denied(event)) and (since is None or _is_since(event, since))


def _is_since(event: Event, since: datetime) -> bool:
    try:
        return datetime.fromisoformat(event["time"]) >= since
    except (KeyError, TypeError, ValueError):
        return False
