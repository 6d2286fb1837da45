"""Processes that help a scan of a large known tree to find unchanged folders.

That is most of the work of a scan, and threads would wait for the GIL. One process for each further
CPU checks the folders that the scan reaches last. A process that cannot start, or dies, only costs
time.
"""

import os
import signal
from contextlib import closing
from typing import BinaryIO, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from .nofollow import Root
from .scan_cache import Folder
from .tree_format import name_bytes

_WORTH = 2000
"""Files. With fewer, the scan alone is as fast."""
_MOST_PROCESSES = 4

_ended: List[int] = []
"""Processes to reap at the next scan: their end takes time."""

Place = Tuple[Sequence[bytes], Folder]


class ParallelStat:
    """The helper processes of one scan. Close it in the end."""

    def __init__(self) -> None:
        self._share: Dict[Folder, _Share] = {}

    def start(self, root: int, cache: Folder) -> None:
        """Start to check folders below the descriptor ``root``, if there are enough files."""
        count = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        if cache.files < _WORTH or count < 2:
            return
        while _ended:
            os.waitpid(_ended.pop(), 0)
        for places in filter(None, _split(list(_places(cache, ())), count)[1:]):
            share = _Share(root, places)
            self._share.update((folder, share) for _, folder in places)

    def says_unchanged(self, folder: Folder) -> bool:
        """Whether a process found ``Folder.is_unchanged``. May wait for it."""
        share = self._share.get(folder)
        return share is not None and folder in share.answers()

    def close(self) -> None:
        for share in self._share.values():
            share.close()


class _Share:
    """The folders that one process checks."""

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
            os.kill(self._child, signal.SIGKILL)  # its answers may be unread
            _ended.append(self._child)


def _places(folder: Folder, path: Sequence[bytes]) -> Iterator[Place]:
    """All folders, in scan order."""
    yield path, folder
    for name, inner in sorted(folder.folders.items()):
        yield from _places(inner, (*path, name_bytes(name)))


def _split(places: Sequence[Place], count: int) -> List[List[Place]]:
    """Split into contiguous parts with about equally many files."""
    total = sum(len(folder.items) for _, folder in places)
    parts: List[List[Place]] = [[] for _ in range(count)]
    before = 0
    for place in places:
        parts[min(count * before // max(1, total), count - 1)].append(place)
        before += len(place[1].items)
    return parts


def _look(root: int, places: Sequence[Place]) -> Iterator[bool]:
    with closing(Root(os.dup(root))) as below:
        for path, folder in places:
            try:
                yield folder.is_unchanged(below.folder(path))
            except OSError:
                yield False  # deleted
