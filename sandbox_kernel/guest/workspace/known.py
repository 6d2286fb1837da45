"""What a scan knows about files and folders, for the next scan."""

import os
import struct
from typing import Any, Dict, Iterable, Optional, Sequence, Set, Tuple

from .layout import encode_entry

Signature = Tuple[int, int, int, int, int]
_PACK = struct.Struct("<qqqQQ").pack


class Item:
    """What is known about a file, symlink or hard link."""

    __slots__ = ("chunks", "data", "encoded", "link", "multiple", "signature")

    def __init__(self, signature: Optional[Signature], entry: Sequence[Any], data: int) -> None:
        self.signature = signature
        self.encoded = encode_entry(entry)
        self.chunks: Sequence[Any] = entry[5] if entry[1] == "f" else ()
        self.data = data
        self.multiple: Optional[Tuple[int, int]] = None
        self.link: Optional[str] = entry[2] if entry[1] == "h" else None


class Folder:
    """What is known about a folder."""

    __slots__ = (
        "data",
        "files",
        "fingerprint",
        "folders",
        "hash",
        "ignored",
        "items",
        "listed",
        "objects",
        "own",
        "rules",
        "signature",
        "subtree",
    )

    def __init__(self) -> None:
        self.items: Dict[str, Item] = {}
        self.folders: Dict[str, Folder] = {}
        self.ignored: Dict[str, bool] = {}
        self.rules: object = None
        self.listed: Optional[Signature] = None
        """Of the folder itself, when its names were read; None if they must be read again."""
        self.fingerprint: Optional[bytes] = None
        """Signatures of all files; None if they are not all settled."""
        self.own = 0
        """Bytes of its files, without those of folders within it."""
        self.hash = b""
        self.objects: Set[bytes] = set()
        self.signature = (0, 0)
        self.files = self.subtree = self.data = 0

    def settle(self, listed: Optional[Signature]) -> None:
        """All that is known is up to date. ``listed`` is None if the names in the folder may
        change without a sign of it."""
        self.listed = listed
        self.own = sum(item.data for item in self.items.values())
        signatures = [
            item.signature
            for item in self.items.values()
            # Which of several names of a file is the first, only a whole scan can tell.
            if item.signature is not None and item.multiple is None
        ]
        self.fingerprint = None
        if listed is not None and len(signatures) == len(self.items):
            try:
                self.fingerprint = b"".join(_PACK(*s) for s in signatures)
            except struct.error:
                pass  # a time that is out of this world; the folder is looked at anew each time

    def is_unchanged(self, fd: int) -> bool:
        """Whether the folder ``fd`` has the files that it had, and no others, and all are as they
        were. What is in folders within it may have changed."""
        if self.fingerprint is None:
            return False
        try:
            if self.listed != signature_of(os.fstat(fd)):
                return False
            return self.fingerprint == _fingerprint(self.items, fd)
        except (OSError, struct.error):
            return False  # not there any more, or with a time that cannot be compared

    def find(self, parts: Sequence[str]) -> "Optional[Folder]":
        folder: Optional[Folder] = self
        for part in parts:
            if folder is None:
                return None
            folder = folder.folders.get(part)
        return folder


def time_of(status: os.stat_result) -> int:
    """The modification time, as far as it can be saved: some file systems take any."""
    return min(max(status.st_mtime_ns, -(2**63)), 2**63 - 1)


def signature_of(status: os.stat_result) -> Signature:
    return (
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_size,
        status.st_ino,
        status.st_mode,
    )


def _fingerprint(names: Iterable[str], fd: int) -> bytes:
    """Signatures of files in a folder, in one piece: to compare it touches little memory. Most of
    the time of a scan is spent here."""
    look = os.stat
    statuses = (look(name, dir_fd=fd, follow_symlinks=False) for name in names)
    return b"".join(
        [_PACK(s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino, s.st_mode) for s in statuses]
    )
