"""Files that processes have mapped into their memory, and write to without a system call.

The first store to a page of such a mapping moves the file's modification time; further ones do not,
until the page has been written out: then it is protected again, and the next store shows. So before
a time is trusted, what is dirty of a mapped file is handed to the disk. File systems that do not
work so (tmpfs, overlay, FUSE) are told by their type: there a mapped file is read every time.
"""

import ctypes
import os
from typing import Optional, Set, Tuple

from .known import Folder

_PROTECTING = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs")
_MOST = 16 * 2**20
"""Bytes of a process's list of mappings that are read."""
_WAIT_BEFORE, _WRITE = 1, 2


class Mapped:
    """The files that are mapped now, shared and writable, by processes that this one may look at:
    those of the same user."""

    def __init__(self, root: str) -> None:
        self._inodes = _mapped_inodes()
        self._protecting = bool(self._inodes) and file_system(root) in _PROTECTING

    def distrust(self, folder: Folder) -> None:
        """Before a scan: read mapped files again whose times do not show a write."""
        if self._inodes and not self._protecting:
            self._distrust(folder)

    def _distrust(self, folder: Folder) -> None:
        for item in folder.items.values():
            if item.signature is not None and item.signature[3] in self._inodes:
                item.signature = folder.fingerprint = None
        for inner in folder.folders.values():
            self._distrust(inner)

    def shows_changes(self, file: int) -> bool:
        """Whether whatever is written to this file from now on moves its times."""
        if os.fstat(file).st_ino not in self._inodes:
            return True  # who maps it later is seen to write at first
        return self._protecting and _write_out(file)


def _mapped_inodes() -> Set[int]:
    found: Set[int] = set()
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            with open("/proc/%s/maps" % pid, "rb") as file:
                lines = file.read(_MOST).splitlines()
        except OSError:
            continue  # it has ended, or belongs to somebody else
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[1][1:4:2] == b"ws" and fields[5].startswith(b"/"):
                found.add(int(fields[4]))
    return found


def _write_out(file: int) -> bool:
    """Begin to write what is dirty of a file; it need not arrive for its pages to be protected."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call = libc.sync_file_range
    except AttributeError:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return bool(call(file, 0, 0, _WAIT_BEFORE | _WRITE) == 0)


def file_system(path: str) -> str:
    """Type of the file system that holds a path; empty if it is unknown."""
    path = os.path.realpath(path)
    best: Tuple[int, Optional[str]] = (-1, None)
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                place = before.split()[4].replace("\\040", " ")
                inside = place == "/" or path == place or path.startswith(place + "/")
                if inside and len(place) >= best[0]:  # the last of several is on top
                    best = len(place), after.split()[0]
    except (OSError, IndexError):
        return ""
    return best[1] or ""
