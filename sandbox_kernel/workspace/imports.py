"""A host folder becomes a save."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sandbox_kernel.errors import QuotaExceeded, WorkspaceError
from sandbox_kernel.guest.workspace.ignore_file import (
    IGNORE_FILE,
    IgnoreRefused,
    Rules,
    read_ignore,
)
from sandbox_kernel.guest.workspace.scan import Scan
from sandbox_kernel.guest.workspace.scan_cache import Folder, Item, time_of
from sandbox_kernel.guest.workspace.survey import TooMuch
from sandbox_kernel.guest.workspace.tree_format import TREE_KIND, pack
from sandbox_kernel.private_names import HIDDEN, KEYS
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.workspace import ignore
from sandbox_kernel.workspace.host_folder import own_folders
from sandbox_kernel.workspace.packs import PackWriter
from sandbox_kernel.workspace.reports import (
    Baseline,
    OnProgress,
    Progress,
    Quota,
    SaveInfo,
    SaveReport,
    UploadPolicy,
)
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, build

_GRANULARITY = 2.0
"""Seconds; the coarsest time stamps of a file system."""
_HIDDEN = f"{HIDDEN}\n!{IGNORE_FILE}\n".encode()
_KEYS = re.sub(
    "[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", "\n".join(("", *KEYS))
).encode()
"""In upper case, too, which gitignore's syntax has no other way to say."""


def import_folder(
    store: Store,
    name: str,
    folder: str | Path,
    *,
    policy: UploadPolicy | None = None,
    notebook: str = "",
    quota: Quota | None = None,
    progress: OnProgress = lambda progress: None,
) -> SaveReport:
    """Make a save of workspace ``name`` from a folder of the host. Blocks: call it in a thread.

    The files become the folder's baseline, by which a later ``export`` to the same folder sees
    which files have changed on the host.
    """
    with store.saving():
        started, taken = time.monotonic(), time.time()
        path = os.path.realpath(folder)
        base, hints = store.begin(name)
        found = scan_folder(store, path, policy, quota, progress)
        save = SaveInfo.planned(
            name,
            kind="import",
            parent=base.id if base is not None else "",
            notebook=notebook,
            problems=found.problems,
        )
        if base is None or base.root != found.root.hex():
            save, new = publish_tree(store, save, found.root, [*hints, *found.packs]), True
        else:
            save, new = replace(base, problems=found.problems), False
        store.set_baseline(name, path, Baseline(found.root, taken=taken))
        return SaveReport(save, new, 0, found.new_bytes, time.monotonic() - started)


def publish_tree(store: Store, save: SaveInfo, root: bytes, packs: Sequence[str]) -> SaveInfo:
    """Publish a save of a tree that was made on the host."""
    save = replace(save, root=root.hex(), packs=packs)
    totals = store.check(save)
    return store.publish(replace(save, files=totals.files, bytes=totals.bytes))


@dataclass(frozen=True)
class Scanned:
    """The tree of a host folder; its objects are in the store."""

    root: bytes
    problems: Sequence[str]
    packs: Sequence[str]
    new_bytes: int


def scan_folder(
    store: Store,
    path: str,
    policy: UploadPolicy | None,
    quota: Quota | None = None,
    progress: OnProgress = lambda progress: None,
    *,
    before: Mapping[str, Entry] | None = None,
    taken: float = 0.0,
) -> Scanned:
    """Store the files of a host folder that a policy selects (default: all). Skips reading a file
    whose size and time equal its entry in ``before``, which was ``taken`` then."""
    quota = quota or Quota()
    policy = policy or UploadPolicy("folder", hidden=True)
    with store.writer() as writer:
        scan = _HostScan(
            Folder(),
            _rules(path, policy),
            _StoreSink(writer, progress),
            max_files=quota.max_files,
            max_bytes=quota.max_bytes,
            prune=policy.mode == "globs",
        )
        scan.own = own_folders(path, store.url)
        scan.before, scan.settled = before or {}, int((taken - _GRANULARITY) * 1e9)
        try:
            root = scan.run(path)
        except TooMuch as error:
            biggest = ", ".join(f"{printable(what)} ({size})" for size, what in error.offenders)
            raise QuotaExceeded(
                f"The folder {path} has {error}; {quota.max_files} files and {quota.max_bytes} "
                f"bytes are allowed. Biggest: {biggest}. List unneeded files in {IGNORE_FILE}, "
                f"choose files by globs, or raise the quota."
            ) from None
        except OSError as error:
            raise WorkspaceError(f"The folder {path} cannot be read: {error}") from error
    packs = [*writer.elsewhere, *writer.names]
    return Scanned(root, scan.problems, packs, writer.plain_bytes)


def add_tree(store: Store, entries: Mapping[str, Entry]) -> tuple[bytes, list[str]]:
    """Store a tree of entries whose contents the store has: its hash, and its objects' packs."""
    store.packs.refresh()
    with store.writer() as writer:
        root = build(entries, partial(_StoreSink(writer).add, TREE_KIND))
    return root, [*writer.elsewhere, *writer.names]


class _StoreSink:
    """A ``Sink`` that stores the objects which the store lacks."""

    def __init__(self, writer: PackWriter, progress: OnProgress = lambda progress: None) -> None:
        self._writer = writer
        self._seen: set[bytes] = set()
        self._progress = progress

    def add(self, kind: int, hash_: bytes, data: bytes | None, *_: object) -> None:
        assert data is not None  # a scan of the host starts with an empty cache
        if hash_ not in self._seen:
            self._seen.add(hash_)
            if not self._writer.need_not(hash_):
                self._writer.add(kind, hash_, *pack(data), len(data))

    def progress(self, files: int, size: int) -> None:
        self._progress(Progress("scan", files, size))


class _HostScan(Scan):
    """Skips this package's folders, and does not read files with unchanged size and time."""

    own: set[str]
    before: Mapping[str, Entry]
    settled = 0
    """Nanoseconds; a later time stamp may hide a second change."""

    def is_ignored(self, prefix: str, name: str, is_folder: bool) -> bool:
        return prefix + name in self.own or super().is_ignored(prefix, name, is_folder)

    def _item(
        self, fd: int, prefix: str, name: str, status: os.stat_result, known: Item | None
    ) -> Item | None:
        was = self.before.get(prefix + name)
        if (
            was is not None
            and was.kind == "f"
            and stat.S_ISREG(status.st_mode)
            and (was.size, was.mtime) == (status.st_size, time_of(status))
            and was.mtime < self.settled
        ):
            entry = was._replace(name=name, mode=stat.S_IMODE(status.st_mode))
            return Item(None, entry.encoded(), entry.data)
        return super()._item(fd, prefix, name, status, known)


def _rules(folder: str, policy: UploadPolicy) -> Rules:
    if policy.mode == "globs":
        return Rules(ignore.only(policy.globs))
    try:
        text = read_ignore(folder)
    except IgnoreRefused as error:
        raise WorkspaceError(str(error)) from error
    return Rules(ignore.rules(text if policy.hidden else _HIDDEN + text + _KEYS))
