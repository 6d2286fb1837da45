"""Trees: folders as objects. Reads and validates them, compares and builds them.

Hostile code may have written a tree, so names, sizes, modes and counts are checked when it is read,
and the totals of everything below it before it is walked: a few trees that refer to each other can
describe more files than there are atoms.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sandbox_kernel.errors import QuotaExceeded, WorkspaceRefused
from sandbox_kernel.guest.workspace.tree_format import (
    CHUNK,
    LEAST_CHUNK,
    MAX_DEPTH,
    MAX_LINK,
    MAX_NAME,
    MAX_PATH,
    MAX_SIZE,
    MAX_TREE,
    RESERVED,
    build_tree,
    encode_entry,
    name_bytes,
    name_text,
    pieces,
)
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.workspace.reports import Change

Read = Callable[[bytes], bytes]
"""The contents of the object with that hash."""
MOST_FILES = 10_000_000
MOST_BYTES = 2**50
MOST_APPARENT = 64
"""Times the quota: most bytes of all files, holes included. A copy or backup reads every hole."""
_HEX = frozenset("0123456789abcdef")


class Entry(NamedTuple):
    """One entry of a folder. ``kind`` is f, d, l or h (``guest/workspace/tree_format.py``)."""

    name: str
    kind: str
    mode: int = 0
    mtime: int = 0
    size: int = 0
    chunks: tuple[str | int, ...] = ()
    tree: bytes = b""
    target: str = ""

    def encoded(self) -> list[Any]:
        if self.kind == "f":
            return [self.name, "f", self.mode, self.mtime, self.size, list(self.chunks)]
        if self.kind == "d":
            return [self.name, "d", self.mode, self.mtime, self.tree.hex()]
        if self.kind == "l":
            return [self.name, "l", self.mtime, self.target]
        return [self.name, "h", self.target]

    def pieces(self) -> Iterator[tuple[int, bytes, int]]:
        """Offset, hash and length of each chunk that is not a hole."""
        for offset, hash_, length in pieces(self.chunks, self.size):
            yield offset, bytes.fromhex(hash_), length

    @property
    def data(self) -> int:
        """Bytes without holes."""
        return sum(length for _, _, length in self.pieces())


@dataclass(frozen=True)
class Totals:
    """Totals of everything below a folder."""

    files: int = 0
    folders: int = 0
    bytes: int = 0
    depth: int = 0
    longest: int = 0
    links: int = 0
    apparent: int = 0
    """Bytes, holes included."""


def parse_tree(data: bytes | memoryview) -> tuple[list[Entry], list[bytes]]:
    """The entries of a page, or the pages of an index. WorkspaceRefused if it is neither."""
    if len(data) > MAX_TREE:
        raise WorkspaceRefused(f"Invalid tree: {len(data)} bytes is too long.")
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise WorkspaceRefused(f"Invalid tree: {error}.") from None
    if isinstance(value, dict) and len(value) == 1:
        if isinstance(value.get("pages"), list):
            return [], [_hash(page) for page in value["pages"]]
        if isinstance(value.get("entries"), list):
            return [_entry(entry) for entry in value["entries"]], []
    raise WorkspaceRefused("Invalid tree: neither a page nor an index.")


def entries_of(read: Read, tree: bytes) -> list[Entry]:
    """All entries of a folder, sorted, each name once."""
    entries, pages = parse_tree(read(tree))
    _check_order(entries)
    for page in pages:
        found, inner = parse_tree(read(page))
        if inner:
            raise WorkspaceRefused("Invalid tree: an index of indexes.")
        _check_order([*entries[-1:], *found])  # at once: an index may name one page many times
        entries += found
    return entries


def _check_order(entries: list[Entry]) -> None:
    for before, name in itertools.pairwise(name_bytes(entry.name) for entry in entries):
        if name <= before:
            raise WorkspaceRefused(
                f"Invalid tree: names doubled or out of order ({printable(name_text(name))!r})."
            )


def totals_of(
    read: Read,
    tree: bytes,
    memory: MutableMapping[bytes, Totals],
    *,
    most_files: int = MOST_FILES,
    most_bytes: int = MOST_BYTES,
    on_entries: Callable[[Sequence[Entry]], object] = lambda entries: None,
) -> Totals:
    """Totals of a tree. ``memory`` holds known totals and gets the new ones; ``on_entries`` is
    called once for each folder that is not in it."""

    def total(tree: bytes, depth: int) -> Totals:
        known = memory.get(tree)
        if known is not None:
            return known
        if depth > MAX_DEPTH:
            raise WorkspaceRefused(f"Invalid tree: more than {MAX_DEPTH} folders deep.")
        entries = entries_of(read, tree)
        on_entries(entries)
        files = folders = size = deepest = longest = links = apparent = 0
        for entry in entries:
            here = len(name_bytes(entry.name))
            if entry.kind == "d":
                inner = total(entry.tree, depth + 1)
                folders += 1 + inner.folders
                files += inner.files
                size += inner.bytes
                links += inner.links
                apparent += inner.apparent
                deepest = max(deepest, inner.depth + 1)
                here += 1 + inner.longest
            else:
                files += 1
                size += entry.data
                apparent += entry.size
                links += entry.kind == "h"
            longest = max(longest, here)
        if files + folders > most_files or size > most_bytes:
            raise WorkspaceRefused(
                f"The tree is too large: {files + folders} files and folders, {size} bytes; "
                f"{most_files} and {most_bytes} are allowed."
            )
        if apparent > MOST_APPARENT * most_bytes:
            raise QuotaExceeded(
                f"The files have {apparent} bytes with their holes; at most {MOST_APPARENT} times "
                f"the quota of {most_bytes} bytes is allowed. Delete sparse files, list them in "
                f".sandboxignore, or raise the quota."
            )
        if longest > MAX_PATH or deepest > MAX_DEPTH:
            raise WorkspaceRefused("Invalid tree: paths are too long.")
        made = memory[tree] = Totals(files, folders, size, deepest, longest, links, apparent)
        return made

    return total(tree, 0)


def walk(read: Read, tree: bytes, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """Every path below a tree, folders before their contents. Check ``totals_of`` first."""
    for entry in entries_of(read, tree):
        path = prefix + entry.name
        yield path, entry
        if entry.kind == "d":
            yield from walk(read, entry.tree, path + "/")


def changes(read: Read, old: bytes, new: bytes, prefix: str = "") -> Iterator[Change]:
    """The changes from one tree to another (empty: no tree), by path."""
    if old == new:
        return
    before = {entry.name: entry for entry in entries_of(read, old)} if old else {}
    after = {entry.name: entry for entry in entries_of(read, new)} if new else {}
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        path = prefix + name
        inner_old = was.tree if was is not None and was.kind == "d" else b""
        inner_new = now.tree if now is not None and now.kind == "d" else b""
        if was is None or now is None or was.kind != now.kind:
            if was is not None:
                yield Change("removed", path + ("/" if inner_old else ""), was.size, 0)
            if now is not None:
                yield Change("added", path + ("/" if inner_new else ""), 0, now.size)
        elif now.kind == "d":
            if was.mode != now.mode:
                yield Change("meta", path + "/")
        else:
            kind = "meta" if same_contents(was, now) else "changed"
            yield Change(kind, path, was.size, now.size)
        yield from changes(read, inner_old, inner_new, path + "/")


def plain(entries: Iterable[tuple[str, Entry]]) -> dict[str, Entry]:
    """Entries by path, with hard links as separate files; dangling ones are dropped."""
    found = dict(entries)
    for path, entry in list(found.items()):
        if entry.kind == "h":
            file = found.get(entry.target)
            if file is not None and file.kind == "f":
                found[path] = file._replace(name=entry.name)
            else:
                del found[path]
    return found


def build(entries: Mapping[str, Entry], put: Callable[[bytes, bytes], object]) -> bytes:
    """Build a tree from entries by path, and return its hash; ``put`` gets the hash and contents of
    each object. Adds missing folders, and drops entries below a path that is not a folder."""
    inside: dict[str, dict[str, Entry]] = {"": {}}

    def folder(path: str) -> dict[str, Entry]:
        if path not in inside:
            inside[path] = {}
            parent, _, name = path.rpartition("/")
            entry = entries.get(path)
            if entry is None or entry.kind != "d":
                entry = Entry(name, "d", 0o755)
            folder(parent)[name] = entry
        return inside[path]

    for path, entry in entries.items():
        if is_blocked(entries, path):
            continue
        if entry.kind == "d":
            folder(path)
        else:
            parent, _, name = path.rpartition("/")
            folder(parent)[name] = entry

    def make(path: str) -> bytes:
        found = []
        for name, entry in inside[path].items():
            if entry.kind == "d":
                entry = entry._replace(tree=make(f"{path}/{name}" if path else name))
            found.append((name_bytes(name), encode_entry(entry.encoded())))
        hash_, objects = build_tree(sorted(found))
        for one in objects:
            put(*one)
        return hash_

    return make("")


def is_blocked(entries: Mapping[str, Entry], path: str) -> bool:
    """Whether a file or symlink is in the place of a parent folder."""
    above = itertools.accumulate(path.split("/")[:-1], "{}/{}".format)
    return any(up in entries and entries[up].kind != "d" for up in above)


def same_contents(one: Entry | None, other: Entry | None) -> bool:
    """Whether two entries are equal except for modes and times. All folders are."""
    if one is None or other is None:
        return one is other
    mine, theirs = ((e.kind, e.size, e.chunks, e.target) for e in (one, other))
    return mine == theirs


def _entry(value: Any) -> Entry:
    try:
        name, kind = _name(value[0]), value[1]
        if kind == "f" and len(value) == 6:
            size = checked_integer(value[4], 0, MAX_SIZE)
            chunks = _chunks(value[5], size)
            return Entry(name, "f", checked_mode(value[2]), checked_time(value[3]), size, chunks)
        if kind == "d" and len(value) == 5:
            mode, mtime = checked_mode(value[2]), checked_time(value[3])
            return Entry(name, "d", mode, mtime, tree=_hash(value[4]))
        if kind == "l" and len(value) == 4:
            return Entry(name, "l", mtime=checked_time(value[2]), target=checked_link(value[3]))
        if kind == "h" and len(value) == 3:
            return Entry(name, "h", target=checked_path(value[2]))
    except (TypeError, IndexError, KeyError, ValueError, UnicodeError) as error:
        raise WorkspaceRefused(
            f"Invalid entry: {printable(repr(value)[:200])} ({error})."
        ) from None
    raise WorkspaceRefused(f"Invalid entry: {printable(repr(value)[:200])} (unknown kind).")


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("the name is not text")
    raw = name_bytes(value)
    if not 0 < len(raw) <= MAX_NAME or name_text(raw) != value:
        raise ValueError("invalid name")
    if value in (".", "..") or "/" in value or "\0" in value or value.startswith(RESERVED):
        raise ValueError("forbidden name")
    return value


def checked_path(value: Any) -> str:
    """Validate a path below a folder. TypeError, ValueError or UnicodeError."""
    if not isinstance(value, str) or len(name_bytes(value)) > MAX_PATH:
        raise TypeError("not a path")
    for part in value.split("/"):
        _name(part)
    return value


def checked_link(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("the target is not text")
    raw = name_bytes(value)
    if not 0 < len(raw) <= MAX_LINK or b"\0" in raw or name_text(raw) != value:
        raise ValueError("invalid target")
    return value


def checked_integer(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError("invalid number")
    return value


def checked_mode(value: Any) -> int:
    return checked_integer(value, 0, 0o7777)


def checked_time(value: Any) -> int:
    return checked_integer(value, -(2**63), 2**63 - 1)


def _hash(value: Any) -> bytes:
    if not isinstance(value, str) or len(value) != 64 or not _HEX.issuperset(value):
        raise WorkspaceRefused("Invalid tree: not a SHA-256.")
    return bytes.fromhex(value)


def _chunks(value: Any, size: int) -> tuple[str | int, ...]:
    if not isinstance(value, list):
        raise TypeError("the chunks are not a list")
    left = size
    before: Any = None
    for chunk in value:
        if left <= 0:
            break
        if isinstance(chunk, str):
            hash_, length = chunk[:64], chunk[64:]
            if len(hash_) != 64 or not _HEX.issuperset(hash_):
                raise ValueError("a chunk is not a SHA-256")
            left -= _length(length, left) if length else min(CHUNK, left)
        else:
            if type(before) is int:
                raise ValueError("two adjacent holes")
            left -= checked_integer(chunk, 1, -(-left // CHUNK)) * CHUNK
        before = chunk
    else:
        if left <= 0:
            return tuple(value)
    raise ValueError("the chunks do not add up to the size")


def _length(value: str, left: int) -> int:
    """Of a chunk that is shorter than it could be, as ``chunk_text`` writes it."""
    digits = value[1:]
    if value[0] != ":" or len(digits) > 7 or not (digits.isascii() and digits.isdecimal()):
        raise ValueError("a chunk has an invalid length")
    length = checked_integer(int(digits), LEAST_CHUNK, min(CHUNK, left) - 1)
    if str(length) != digits:
        raise ValueError("a chunk has an invalid length")
    return length


@dataclass
class Catalog:
    """Objects that this process knows a workspace, or some trees, to have."""

    totals: dict[bytes, Totals] = field(default_factory=dict)
    """Of folders."""
    trees: set[bytes] = field(default_factory=set)
    """Folders, and the pages of large ones."""
    chunks: dict[bytes, int] = field(default_factory=dict)
    """Hash -> length."""

    def add(self, read: Read, tree: bytes) -> Totals:
        """Add a tree with all that is below it, except for folders whose totals are known."""

        def read_tree(hash_: bytes) -> bytes:
            self.trees.add(hash_)
            return read(hash_)

        def learn(entries: Sequence[Entry]) -> None:
            for entry in entries:
                self.chunks.update((hash_, length) for _, hash_, length in entry.pieces())

        return totals_of(read_tree, tree, self.totals, on_entries=learn)
