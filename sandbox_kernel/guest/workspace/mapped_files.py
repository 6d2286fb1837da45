"""Files that processes have mapped into memory, and write without a system call.

The first store to a mapped page updates the file's mtime; later ones do not, until the page has
been written out and is write-protected again. So the dirty pages of a mapped file are written out
before its mtime is trusted. Other file systems (tmpfs, overlay, FUSE) do not protect pages: there a
mapped file is read every time.
"""

import ctypes
import os
from typing import Set

from .scan_cache import Folder

_PROTECTING = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs")
_MOST = 16 * 2**20
"""Bytes read of a process's /proc/PID/maps."""
_WAIT_BEFORE, _WRITE = 1, 2


class Mapped:
    """The files that processes of this user have mapped now, shared and writable."""

    def __init__(self, root: str) -> None:
        self._inodes = _mapped_inodes()
        self._protecting = bool(self._inodes) and file_system(root) in _PROTECTING

    def distrust(self, folder: Folder) -> None:
        """Before a scan: forget mapped files whose mtime does not show a write."""
        if self._protecting or not self._inodes:
            return
        for item in folder.items.values():
            if item.signature is not None and item.signature[3] in self._inodes:
                item.signature = folder.fingerprint = None
        for inner in folder.folders.values():
            self.distrust(inner)

    def shows_changes(self, file: int) -> bool:
        """Whether every later write to this file updates its mtime."""
        if os.fstat(file).st_ino not in self._inodes:
            return True  # the first write of a later mapping shows
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
            continue  # ended, or another user's
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[1][1:4:2] == b"ws" and fields[5].startswith(b"/"):
                found.add(int(fields[4]))
    return found


def _write_out(file: int) -> bool:
    """Start writing out the dirty pages of a file, which protects them."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call = libc.sync_file_range
    except AttributeError:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return bool(call(file, 0, 0, _WAIT_BEFORE | _WRITE) == 0)


def file_system(path: str) -> str:
    """Type of the file system of a path; empty if unknown."""
    path = os.path.realpath(path)
    longest, kind = 0, ""
    try:
        mounts, plain = "/proc/self/mountinfo", "surrogateescape"
        with open(mounts, encoding="utf-8", errors=plain, newline="\n") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                place = before.split(" ")[4].replace("\\040", " ")
                inside = place == "/" or path == place or path.startswith(place + "/")
                if inside and len(place) >= longest:  # the last of several is on top
                    longest, kind = len(place), after.split()[0]
    except (OSError, IndexError):
        return ""
    return kind
