"""Events of audits: as they were, and as they come."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sandbox_kernel.audit.event_log import SUFFIX, Event, numbered

_MOST_ROTATED = 99
_BLOCK = 16 * 1024


def is_denied(event: Event) -> bool:
    """Whether it is about something that was refused."""
    return event.get("action") == "deny"


def read(
    path: str | Path, *, since: datetime | None = None, denied: bool = False
) -> Iterator[Event]:
    """The events of an audit, oldest first, with those of its rotated files. Lines that are none,
    such as one that is being written, are left out."""
    path = Path(path)
    for place in _files(path):
        for line in _lines(path, place):
            event = _event(line)
            if event is not None and _is_wanted(event, since, denied):
                yield event


@dataclass
class _Place:
    """How far a file was read. It may get another name at any time: its audit is rotated."""

    inode: int = 0
    offset: int = 0


def _present(path: Path) -> Iterator[tuple[Path, int]]:
    """The files of an audit and their inodes, newest first. While it is rotated, one is missing."""
    missing = 0
    for number in range(_MOST_ROTATED):
        found = _stat(numbered(path, number))
        if found is not None:
            yield numbered(path, number), found.st_ino
        else:
            missing += 1
            if missing > 1:
                return


def _files(path: Path) -> list[_Place]:
    """The files of an audit, oldest first."""
    return [_Place(inode) for _, inode in _present(path)][::-1]


def _lines(path: Path, place: _Place) -> Iterator[bytes]:
    """The whole lines of a file from a place on, which moves on with them. The file is not kept
    open between two blocks: there may be thousands of audits. None if it is gone."""
    while True:
        try:
            with open(_now_at(path, place.inode), "rb") as file:
                if os.fstat(file.fileno()).st_ino != place.inode:
                    continue  # rotated just now
                file.seek(place.offset)
                block = file.read(_BLOCK) + file.readline()
        except FileNotFoundError:
            return
        whole = block[: block.rfind(b"\n") + 1]
        if not whole:
            return
        place.offset += len(whole)
        yield from whole.splitlines()


def _now_at(path: Path, inode: int) -> Path:
    """Where a file of an audit is now. FileNotFoundError if it is gone."""
    for place, found in _present(path):
        if found == inode:
            return place
    raise FileNotFoundError(path)


def merged(
    paths: Iterable[Path], *, since: datetime | None = None, denied: bool = False
) -> Iterator[Event]:
    """The events of several audits, oldest first. Holds little of each in memory."""
    streams = [read(path, since=since, denied=denied) for path in paths]
    return heapq.merge(*streams, key=lambda event: str(event.get("time", "")))


def audits(folder: Path) -> list[Path]:
    """The audits in a folder; each path stands for its rotated files, too."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(folder / name for name in names if name.endswith(SUFFIX))


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

    @staticmethod
    def _new_in(path: Path, last: _Place) -> Iterator[Event]:
        """From the place of the last look on, in that file and those that came after it."""
        found = _stat(path)
        if found is not None and (found.st_ino, found.st_size) == (last.inode, last.offset):
            return
        files = _files(path)
        known = next((n for n, one in enumerate(files) if one.inode == last.inode), None)
        if known is not None:
            files = [last, *files[known + 1 :]]
        for place in files:
            for line in _lines(path, place):
                event = _event(line)
                if event is not None:
                    yield event
            last.inode, last.offset = place.inode, place.offset


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _is_wanted(event: Event, since: datetime | None, denied: bool) -> bool:
    return (not denied or is_denied(event)) and (since is None or _is_since(event, since))


def _is_since(event: Event, since: datetime) -> bool:
    try:
        return datetime.fromisoformat(event["time"]) >= since
    except (KeyError, TypeError, ValueError):
        return False
