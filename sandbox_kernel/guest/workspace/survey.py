"""Counts files and bytes before a scan reads them, and names the biggest if there are too many."""

import heapq
import os
from typing import Callable, List, Tuple

from .nofollow import FOLDER, closing_fd
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
    files = size = 0
    fullest: List[Sized] = []
    biggest: List[Sized] = []

    def look(fd: int, prefix: str, depth: int) -> None:
        nonlocal files, size
        here, folders = 0, []
        with os.scandir(fd) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_ignored(prefix, entry.name, is_folder):
                    continue
                here += 1
                try:
                    if is_folder:
                        folders.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        found = min(status.st_size, status.st_blocks * 512 + 4096)
                        size += found
                        _keep_biggest(biggest, (found, prefix + entry.name))
                except OSError:
                    continue  # the scan reports it
        files += here
        _keep_biggest(fullest, (here, prefix or "."))
        for name in folders if depth < MAX_DEPTH else ():
            try:
                inner = os.open(name_bytes(name), FOLDER, dir_fd=fd)
            except OSError:
                continue  # the scan reports it
            with closing_fd(inner):
                look(inner, prefix + name + "/", depth + 1)

    look(fd, "", 0)
    if files > max_files:
        raise TooMuch("%d files and folders" % files, sorted(fullest, reverse=True))
    if size > max_bytes:
        raise TooMuch("%d bytes" % size, sorted(biggest, reverse=True))


def _keep_biggest(heap: List[Sized], item: Sized) -> None:
    heapq.heappush(heap, item)
    if len(heap) > _OFFENDERS:
        heapq.heappop(heap)
