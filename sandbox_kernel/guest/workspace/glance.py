"""Other processes that help a scan of a large tree which is known already: in which of its folders
has nothing changed?

That question is most of the work of a scan, and threads would wait for each other. So the folders
that the scan comes to last are looked at by processes, one for each further CPU, while it begins
with the others. A process that cannot be made, or that dies, costs time and nothing else.
"""

import os
import signal
from typing import BinaryIO, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from .folders import Root
from .known import Folder
from .layout import name_bytes

_WORTH = 2000
"""Files. With fewer, the scan alone is as fast."""
_MOST_PROCESSES = 4

_ended: List[int] = []
"""Processes that have done their work. Their end takes time, so they are waited for next time."""

Place = Tuple[Sequence[bytes], Folder]


class Glance:
    """For one scan. Close it in the end."""

    def __init__(self) -> None:
        self._share: Dict[Folder, _Share] = {}
        self._shares: List[_Share] = []

    def start(self, root: int, cache: Folder) -> None:
        """Begin to look at folders below the descriptor ``root``, if that is worth it."""
        count = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        if cache.files < _WORTH or count < 2:
            return
        while _ended:
            os.waitpid(_ended.pop(), 0)
        for places in _split(list(_places(cache, ())), count)[1:]:
            share = _Share(root, places)
            self._shares.append(share)
            self._share.update((folder, share) for _, folder in places)

    def says_unchanged(self, folder: Folder) -> bool:
        """``Folder.is_unchanged``, if another process has found that. May wait for it."""
        share = self._share.get(folder)
        return share is not None and folder in share.answers()

    def close(self) -> None:
        for share in self._shares:
            share.close()


class _Share:
    """Folders that another process looks at."""

    def __init__(self, root: int, places: Sequence[Place]) -> None:
        self._places = places
        self._unchanged: Set[Folder] = set()
        self._pipe: Optional[BinaryIO] = None
        self._child = 0
        ours, theirs = os.pipe()
        try:
            child = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            return
        if not child:
            try:
                with open(theirs, "wb") as answers:
                    answers.write(bytes(_look(root, places)))
            finally:
                os._exit(0)
        os.close(theirs)
        self._child = child
        self._pipe = open(ours, "rb")  # noqa: SIM115  (``close`` does)

    def answers(self) -> Set[Folder]:
        if self._pipe is not None:
            answers = self._pipe.read()
            self.close()
            self._unchanged = {f for (_, f), same in zip(self._places, answers) if same}
        return self._unchanged

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            os.kill(self._child, signal.SIGKILL)  # also if nobody wants its answers any more
            _ended.append(self._child)


def _places(folder: Folder, path: Sequence[bytes]) -> Iterator[Place]:
    """All folders, in the order of a scan."""
    yield path, folder
    for name, inner in sorted(folder.folders.items()):
        yield from _places(inner, (*path, name_bytes(name)))


def _split(places: Sequence[Place], count: int) -> List[List[Place]]:
    """Neighbours stay together, and each part has about as many files."""
    total = sum(len(folder.items) for _, folder in places)
    parts: List[List[Place]] = [[] for _ in range(count)]
    before = 0
    for place in places:
        parts[min(count * before // max(1, total), count - 1)].append(place)
        before += len(place[1].items)
    return parts


def _look(root: int, places: Sequence[Place]) -> Iterator[bool]:
    below = Root(os.dup(root))
    try:
        for path, folder in places:
            try:
                yield folder.is_unchanged(below.folder(path))
            except OSError:
                yield False  # it is gone
    finally:
        below.close()
