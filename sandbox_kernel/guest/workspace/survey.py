"""Counts files and bytes before a scan reads them, and names the biggest if there are too many."""

import heapq
import os
from typing import Callable, List, Tuple

from .nofollow import FOLDER
from .tree_format import MAX_DEPTH, name_bytes

_OFFENDERS = 10
Sized = Tuple[int, str]


class TooMuch(Exception):
    """More files or bytes than allowed. ``offenders`` are the biggest files and folders."""

    def __init__(self, message: str, offenders: List[Sized]) -> None:
        super().__init__(message)
        self.offenders = offenders


def survey(
    fd: int, is_ignored: Callable[[str, str, bool], bool], max_files: int, max_bytes: int
) -> None:
    """Raise TooMuch if the folder ``fd`` has too many files or bytes."""
    found = _Survey(is_ignored)
    found.folder(os.dup(fd), "", 0)
    if found.files > max_files:
        raise TooMuch("%d files and folders" % found.files, sorted(found.counts, reverse=True))
    if found.bytes > max_bytes:
        raise TooMuch("%d bytes" % found.bytes, sorted(found.biggest, reverse=True))


class _Survey:
    def __init__(self, is_ignored: Callable[[str, str, bool], bool]) -> None:
        self.files = self.bytes = 0
        self.counts: List[Sized] = []
        self.biggest: List[Sized] = []
        self._is_ignored = is_ignored

    def folder(self, fd: int, prefix: str, depth: int) -> None:
        folders = []
        try:
            with os.scandir(fd) as entries:
                here = 0
                for entry in entries:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if self._is_ignored(prefix, entry.name, is_folder):
                        continue
                    here += 1
                    if is_folder:
                        folders.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        self._file(entry, prefix)
            self.files += here
            _keep_biggest(self.counts, (here, prefix or "."))
            for name in folders if depth < MAX_DEPTH else ():
                try:
                    inner = os.open(name_bytes(name), FOLDER, dir_fd=fd)
                except OSError:
                    continue  # the scan reports it
                self.folder(inner, prefix + name + "/", depth + 1)
        finally:
            os.close(fd)

    def _file(self, entry: "os.DirEntry[str]", prefix: str) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return  # the scan reports it
        size = min(status.st_size, status.st_blocks * 512 + 4096)
        self.bytes += size
        _keep_biggest(self.biggest, (size, prefix + entry.name))


def _keep_biggest(heap: List[Sized], item: Sized) -> None:
    heapq.heappush(heap, item)
    if len(heap) > _OFFENDERS:
        heapq.heappop(heap)
