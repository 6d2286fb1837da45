"""The state of files and folders at a scan, for the next scan."""

import os
import struct
from typing import Any, Dict, Iterable, Optional, Sequence, Set, Tuple

from .tree_format import encode_entry, pieces

Signature = Tuple[int, int, int, int, int]
_PACK = struct.Struct("<qqqQQ").pack


class Item:
    """A file, symlink or hard link at the last scan."""

    __slots__ = ("chunks", "data", "encoded", "link", "multiple", "signature", "size")

    def __init__(self, signature: Optional[Signature], entry: Sequence[Any], data: int) -> None:
        self.signature = signature
        self.encoded = encode_entry(entry)
        self.size: int = entry[4] if entry[1] == "f" else 0
        self.chunks: Sequence[Any] = entry[5] if entry[1] == "f" else ()
        self.data = data
        self.multiple: Optional[Tuple[int, int]] = None
        self.link: Optional[str] = entry[2] if entry[1] == "h" else None

    def hashes(self) -> Set[str]:
        """Of its chunks, in hex digits."""
        return {hash_ for _, hash_, _ in pieces(self.chunks, self.size)}


class Folder:
    """A folder at the last scan."""

    def __init__(self) -> None:
        self.items: Dict[str, Item] = {}
        self.folders: Dict[str, Folder] = {}
        self.ignored: Dict[str, bool] = {}
        self.rules: object = None
        self.listed: Optional[Signature] = None
        """Signature of the folder when its names were read; None: read them again."""
        self.fingerprint: Optional[bytes] = None
        """Signatures of all files; None if some are not settled."""
        self.own = 0
        """Bytes of its files, without subfolders."""
        self.hash = b""
        self.objects: Set[bytes] = set()
        self.signature = (0, 0)
        self.files = self.subtree = self.data = 0

    def settle(self, listed: Optional[Signature]) -> None:
        """Mark as up to date. ``listed``: None if names can still change within a clock's tick."""
        self.listed = listed
        self.own = sum(item.data for item in self.items.values())
        signatures = [
            item.signature
            for item in self.items.values()
            # Only a whole scan knows which name of a hard-linked file is the first.
            if item.signature is not None and item.multiple is None
        ]
        self.fingerprint = None
        if listed is not None and len(signatures) == len(self.items):
            try:
                self.fingerprint = b"".join(_PACK(*s) for s in signatures)
            except struct.error:
                pass  # a time stamp out of range: check the folder each time

    def is_unchanged(self, fd: int) -> bool:
        """Whether the folder ``fd`` has the same files, unchanged; subfolders may have changed."""
        if self.fingerprint is None:
            return False
        try:
            if self.listed != signature_of(os.fstat(fd)):
                return False
            return self.fingerprint == _fingerprint(self.items, fd)
        except (OSError, struct.error):
            return False  # deleted, or a time stamp out of range


def time_of(status: os.stat_result) -> int:
    """The mtime, clamped to 64 bits: some file systems accept any."""
    return min(max(status.st_mtime_ns, -(2**63)), 2**63 - 1)


def signature_of(s: os.stat_result) -> Signature:
    return s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino, s.st_mode


def _fingerprint(names: Iterable[str], fd: int) -> bytes:
    """The files' signatures as one string, which compares fast: a scan spends most time here."""
    look = os.stat
    statuses = (look(name, dir_fd=fd, follow_symlinks=False) for name in names)
    return b"".join(
        [_PACK(s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino, s.st_mode) for s in statuses]
    )
