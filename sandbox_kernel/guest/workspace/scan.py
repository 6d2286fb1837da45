"""Scans a folder into a tree, without reading unchanged files again.

A file is unchanged if its inode, size, mode, mtime and ctime are the same as when it was read, and
it had not been changed just before: a change within the clock's granularity would not show. The
same holds for the names in a folder. So scanning an unchanged folder costs one stat a file, and no
hash. ``mapped_files`` handles files that are mapped into memory.
"""

import os
import stat
import time
from typing import Any, Dict, Iterable, Iterator, List, Optional, Protocol, Set, Tuple

from .cut import is_zeros, length_of_chunk
from .ignore_file import Rules
from .mapped_files import Mapped
from .nofollow import FOLDER, READ, next_data, pread_exactly
from .parallel_stat import ParallelStat
from .scan_cache import Folder, Item, signature_of, time_of
from .survey import TooMuch, survey
from .tree_format import (
    CHUNK,
    CHUNK_KIND,
    MAX_DEPTH,
    MAX_ENTRY,
    MAX_PATH,
    MAX_SIZE,
    RESERVED,
    TREE_KIND,
    build_tree,
    chunk_text,
    digest,
    encode_entry,
    name_bytes,
    name_text,
    pieces,
)

_JUST_NOW = 100_000_000
_ATTEMPTS = 3
_MOST_PROBLEMS = 200
_SPECIAL = {"p": "named pipe", "s": "socket", "c": "character device", "b": "block device"}


class Sink(Protocol):
    """Takes the objects that a scan finds, children before parents. Without ``data`` it is a known
    chunk, at ``place`` (offset and length) of the file ``path``: only a ``full`` scan has such."""

    def add(
        self,
        kind: int,
        hash_: bytes,
        data: Optional[bytes],
        path: str = "",
        place: Tuple[int, int] = (0, 0),
    ) -> None: ...
    def progress(self, files: int, size: int) -> None: ...


class Scan:
    """One scan of a folder. Updates the ``cache``; ``full``: known objects go to the sink, too."""

    def __init__(
        self,
        cache: Folder,
        rules: Rules,
        sink: Sink,
        *,
        full: bool = False,
        max_files: int = 2**60,
        max_bytes: int = 2**60,
        prune: bool = False,
        mapped: "Optional[Mapped]" = None,
    ) -> None:
        self.problems: List[str] = []
        self.problem_count = 0
        self._cache = cache
        self._rules = rules
        self._sink = sink
        self._full = full
        self._prune = prune  # leave out folders without files
        self._max_files, self._max_bytes = max_files, max_bytes
        self._files = self._bytes = 0
        self._links: Dict[Tuple[int, int], str] = {}
        self._helpers = ParallelStat()
        self._mapped = mapped

    def run(self, path: str) -> bytes:
        """The hash of the tree. TooMuch if it exceeds the limits."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._mapped is not None:
                self._mapped.distrust(self._cache)
            if not self._cache.hash:
                self._survey(fd)  # before reading any file
            elif self._cache.rules is self._rules:
                self._helpers.start(fd, self._cache)
            self._folder(self._cache, fd, "", 0)
        except _Exceeded:
            self._survey(fd)
            raise TooMuch("more files or bytes than allowed", []) from None
        finally:
            self._helpers.close()
            os.close(fd)
        return self._cache.hash

    def problem(self, path: str, what: object) -> None:
        self.problem_count += 1
        if len(self.problems) < _MOST_PROBLEMS:
            reason = what.strerror if isinstance(what, OSError) and what.strerror else what
            self.problems.append("%s: %s" % (path, reason))

    def _folder(self, folder: Folder, fd: int, prefix: str, depth: int) -> bool:
        """Update the cache of a folder; whether its tree has changed."""
        old, ignored = folder.items, folder.ignored
        look_again = folder.rules is not self._rules
        if look_again:
            ignored.clear()
            folder.rules, folder.fingerprint = self._rules, None
        changed = not folder.hash
        inner: List[Tuple[str, os.stat_result]] = []
        multiple: List[Tuple[str, os.stat_result]] = []
        now, here, problems = time.time_ns(), signature_of(os.fstat(fd)), self.problem_count
        entries: Iterable[Tuple[str, os.stat_result]]
        same = self._helpers.says_unchanged(folder) or folder.is_unchanged(fd)
        if same:
            entries, gone = self._folders_in(folder, fd), set()
        else:
            entries, gone = self._listed(folder, fd, prefix), set(old)
        for name, status in entries:
            item = None if look_again else old.get(name)
            if (
                item is not None
                and item.multiple is None
                and item.signature == signature_of(status)
            ):
                gone.discard(name)
                continue
            is_folder = stat.S_ISDIR(status.st_mode)
            if item is None and self.is_ignored(prefix, name, is_folder):
                ignored[name] = is_folder
            elif is_folder:
                inner.append((name, status))
            elif status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                multiple.append((name, status))
            else:
                made = self._item(fd, prefix, name, status, old.get(name))
                changed = self._take(old, gone, name, made) or changed
        for name, status in sorted(multiple):
            made = self._multiple(fd, prefix, name, status, old.get(name))
            changed = self._take(old, gone, name, made) or changed
        for name in gone:
            changed = True
            del old[name]
        if self._full:
            self._offer_known(old, prefix)
        changed = self._inner(folder, fd, inner, prefix, depth) or changed
        if changed or self._full:
            self._rebuild(folder)
        settled = max(here[:2]) < now - _JUST_NOW
        complete = self.problem_count == problems and len(folder.folders) == len(inner)
        if not same or not complete:
            folder.settle(here if settled and complete else None)
        self._count(folder)
        return changed

    @staticmethod
    def _take(old: Dict[str, Item], gone: Set[str], name: str, made: Optional[Item]) -> bool:
        """Update the cache of a file; whether it has changed."""
        item = old.get(name)
        if made is None:
            if item is not None:
                gone.add(name)
            return False
        gone.discard(name)
        old[name] = made
        return item is None or made.encoded != item.encoded

    @staticmethod
    def _folders_in(folder: Folder, fd: int) -> "Iterator[Tuple[str, os.stat_result]]":
        """The subfolders of a folder whose names have not changed."""
        for name in folder.folders:
            try:
                yield name, os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted just now

    def _listed(
        self, folder: Folder, fd: int, prefix: str
    ) -> "Iterator[Tuple[str, os.stat_result]]":
        """All entries of a folder, except for known ignored ones."""
        ignored = folder.ignored
        with os.scandir(fd) as entries:
            for entry in entries:
                name = entry.name
                if name in ignored and ignored[name] == entry.is_dir(follow_symlinks=False):
                    continue
                try:
                    yield name, entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.problem(prefix + name, error)

    def _inner(
        self,
        folder: Folder,
        fd: int,
        inner: "List[Tuple[str, os.stat_result]]",
        prefix: str,
        depth: int,
    ) -> bool:
        changed = False
        present: Set[str] = set()
        for name, status in sorted(inner):
            path = prefix + name
            sub = folder.folders.get(name)
            if sub is not None and self._is_leaf_unchanged(sub):
                self._count(sub)
                changed = self._sign(sub, status) or changed
                present.add(name)
                continue
            if depth >= MAX_DEPTH or len(path) > MAX_PATH - 256:
                self.problem(path, "too deep; not saved")
                continue
            try:
                sub_fd = os.open(name_bytes(name), FOLDER, dir_fd=fd)
            except OSError as error:
                self.problem(path, error)
                continue
            if sub is None:
                sub = folder.folders[name] = Folder()
                changed = True
            try:
                changed = self._folder(sub, sub_fd, path + "/", depth + 1) or changed
            finally:
                os.close(sub_fd)
            if self._prune and not sub.items and not sub.folders:
                continue
            changed = self._sign(sub, status) or changed
            present.add(name)
        for name in [name for name in folder.folders if name not in present]:
            del folder.folders[name]
            changed = True
        return changed

    def _is_leaf_unchanged(self, folder: Folder) -> bool:
        """Whether a folder without subfolders need not even be opened."""
        return not folder.folders and not self._full and self._helpers.says_unchanged(folder)

    @staticmethod
    def _sign(folder: Folder, status: os.stat_result) -> bool:
        """Update a folder's mode and time; whether they have changed."""
        before = folder.signature
        folder.signature = (stat.S_IMODE(status.st_mode), time_of(status))
        return folder.signature != before

    def _rebuild(self, folder: Folder) -> None:
        entries = [(name_bytes(name), item.encoded) for name, item in folder.items.items()]
        for name, sub in folder.folders.items():
            entry = [name, "d", sub.signature[0], sub.signature[1], sub.hash.hex()]
            entries.append((name_bytes(name), encode_entry(entry)))
        entries.sort()
        folder.hash, objects = build_tree(entries)
        for hash_, data in objects:
            if self._full or hash_ not in folder.objects:
                self._sink.add(TREE_KIND, hash_, data)
        folder.objects = {hash_ for hash_, _ in objects}
        subs = folder.folders.values()
        folder.files = len(folder.items) + sum(sub.files for sub in subs)
        folder.subtree = len(subs) + sum(sub.subtree for sub in subs)
        folder.data = sum(item.data for item in folder.items.values()) + sum(s.data for s in subs)

    def _offer_known(self, items: Dict[str, Item], prefix: str) -> None:
        for name, item in items.items():
            for offset, hash_, length in pieces(item.chunks, item.size):
                place = offset, length
                self._sink.add(CHUNK_KIND, bytes.fromhex(hash_), None, prefix + name, place)

    def is_ignored(self, prefix: str, name: str, is_folder: bool) -> bool:
        if name.startswith(RESERVED):
            return True
        return self._rules.ignored(prefix + name + ("/" if is_folder else ""))

    def _count(self, folder: Folder) -> None:
        self._files += len(folder.items) + len(folder.folders)
        self._bytes += folder.own
        if self._files > self._max_files or self._bytes > self._max_bytes:
            raise _Exceeded
        self._sink.progress(self._files, self._bytes)

    # --- one file

    def _multiple(
        self, fd: int, prefix: str, name: str, status: os.stat_result, known: Optional[Item]
    ) -> Optional[Item]:
        """A file with several names: the first is the file, the others are hard links to it."""
        key = (status.st_dev, status.st_ino)
        first = self._links.get(key)
        signature = signature_of(status)
        same = known is not None and known.signature == signature and known.link == first
        if first is None:
            self._links[key] = prefix + name
        if same:
            return known
        if first is not None:
            made: Optional[Item] = Item(signature, [name, "h", first], 0)
        else:
            made = self._item(fd, prefix, name, status, known)
        if made is not None:
            made.multiple = key
        elif first is None:
            del self._links[key]
        return made

    def _item(
        self, fd: int, prefix: str, name: str, status: os.stat_result, known: Optional[Item]
    ) -> Optional[Item]:
        try:
            if stat.S_ISREG(status.st_mode):
                return self._file(fd, prefix, name, known)
            if stat.S_ISLNK(status.st_mode):
                target = name_text(os.readlink(name_bytes(name), dir_fd=fd))
                return Item(signature_of(status), [name, "l", time_of(status), target], 0)
        except FileNotFoundError:
            return None  # deleted
        except OSError as error:
            self.problem(prefix + name, error)
            return None
        kind = _SPECIAL.get(stat.filemode(status.st_mode)[0], "special file")
        self.problem(prefix + name, "a %s; not saved" % kind)
        return None

    def _file(self, fd: int, prefix: str, name: str, known: Optional[Item]) -> Optional[Item]:
        had = set() if known is None or self._full else known.hashes()
        for _ in range(_ATTEMPTS):
            file = os.open(name_bytes(name), READ, dir_fd=fd)
            try:
                shows = self._mapped is None or self._mapped.shows_changes(file)
                now = time.time_ns()
                before = os.fstat(file)
                if not stat.S_ISREG(before.st_mode):
                    return None  # replaced
                if before.st_size > MAX_SIZE:
                    self.problem(prefix + name, "too large; not saved")
                    return None
                chunks, data = self._chunks(file, before, had)
                after = os.fstat(file)
            finally:
                os.close(file)
            stable = chunks is not None and signature_of(before) == signature_of(after)
            if stable:
                break
        else:
            self.problem(prefix + name, "kept changing while it was read; saved as it was read")
            if chunks is None:
                return known
        moved = max(before.st_ctime_ns, before.st_mtime_ns)
        settled = stable and shows and moved < now - _JUST_NOW
        mode = stat.S_IMODE(before.st_mode)
        entry = [name, "f", mode, time_of(before), before.st_size, chunks]
        made = Item(signature_of(before) if settled else None, entry, data)
        if len(made.encoded) > MAX_ENTRY:
            self.problem(prefix + name, "too large; not saved")
            return None
        return made

    def _chunks(
        self, file: int, status: os.stat_result, had: Set[str]
    ) -> "Tuple[Optional[List[Any]], int]":
        """The chunks of a file and their bytes; None if it got shorter."""
        size, total = status.st_size, 0
        chunks: List[Any] = []
        offset, sparse = 0, status.st_blocks * 512 < size

        def add_zeros(count: int) -> None:
            if chunks and isinstance(chunks[-1], int):
                chunks[-1] += count
            else:
                chunks.append(count)

        while offset < size:
            left = size - offset
            empty = next_data(file, offset, size) - offset if sparse else 0
            if empty >= min(CHUNK, left):
                count = -(-left // CHUNK) if empty >= left else empty // CHUNK
                add_zeros(count)
                offset += count * CHUNK
                continue
            data = pread_exactly(file, min(CHUNK, left), offset)
            if len(data) != min(CHUNK, left):
                return None, total
            if is_zeros(data):  # a hole, too: chunks follow from the contents alone
                add_zeros(1)
            else:
                data = data[: length_of_chunk(data, size)]
                hash_ = digest(data)
                chunks.append(chunk_text(hash_, len(data), left))
                if hash_.hex() not in had:
                    self._sink.add(CHUNK_KIND, hash_, data)
            offset += len(data)
            total += len(data)
            if self._bytes + total > self._max_bytes:
                raise _Exceeded
            self._sink.progress(self._files, self._bytes + total)
        return chunks, total

    def _survey(self, fd: int) -> None:
        survey(fd, self.is_ignored, self._max_files, self._max_bytes)


class _Exceeded(Exception):
    """The limits are exceeded; a survey finds the offenders."""
