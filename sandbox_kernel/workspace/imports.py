"""A host folder becomes a save."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sandbox_kernel.errors import QuotaExceeded, WorkspaceError
from sandbox_kernel.guest.workspace.helper import IGNORE_FILE, IgnoreRefused, read_ignore
from sandbox_kernel.guest.workspace.known import Folder, Item, time_of
from sandbox_kernel.guest.workspace.scan import Rules, Scan, TooMuch
from sandbox_kernel.text import printable
from sandbox_kernel.workspace import ignore
from sandbox_kernel.workspace.claims import claiming
from sandbox_kernel.workspace.objects import Sink
from sandbox_kernel.workspace.onhost import own_folders
from sandbox_kernel.workspace.reports import (
    Baseline,
    Limits,
    OnProgress,
    SaveInfo,
    SaveReport,
    UploadPolicy,
)
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry

_GRANULARITY = 2.0
"""Seconds; file systems may be as coarse as that."""
_HIDDEN = f".*\n!{IGNORE_FILE}\n".encode()


@claiming
def import_folder(
    store: Store,
    name: str,
    folder: str | Path,
    *,
    policy: UploadPolicy | None = None,
    notebook: str = "",
    limits: Limits | None = None,
    progress: OnProgress = lambda progress: None,
) -> SaveReport:
    """Make a save of workspace ``name`` from a folder of the host. Blocks: call it in a thread.

    What was read is remembered as the folder's baseline, so that a later ``export`` to the same
    folder can tell which files have changed on the host since.
    """
    started, taken = time.monotonic(), time.time()
    path = os.path.realpath(folder)
    base, hints = store.begin(name)
    found = scan_folder(store, path, policy, limits, progress)
    save = SaveInfo(
        id="",
        workspace=name,
        root=found.root.hex(),
        created=0.0,
        kind="import",
        parent=base.id if base is not None else "",
        notebook=notebook,
        problems=found.problems,
        packs=[*hints, *found.packs],
    )
    totals = store.check(save)
    new = base is None or base.root != save.root
    if new or base is None:
        save = store.publish(replace(save, files=totals.files, bytes=totals.bytes))
    else:
        save = base
    store.set_baseline(name, path, Baseline(found.root, taken=taken))
    return SaveReport(save, new, 0, found.new_bytes, time.monotonic() - started)


@dataclass(frozen=True)
class Scanned:
    """What is in a host folder; its objects are in the store."""

    root: bytes
    problems: Sequence[str]
    packs: Sequence[str]
    new_bytes: int


def scan_folder(
    store: Store,
    path: str,
    policy: UploadPolicy | None = None,
    limits: Limits | None = None,
    progress: OnProgress = lambda progress: None,
    *,
    before: Mapping[str, Entry] | None = None,
    taken: float = 0.0,
) -> Scanned:
    """Read what a policy lets through of a host folder (all, if there is none). A file is not read
    if its size and time are those that it had ``before``, when that was ``taken``."""
    limits = limits or Limits()
    policy = policy or UploadPolicy("folder", hidden=True)
    writer = store.writer()
    sink = Sink(store, writer, progress)
    scan = _Scan(
        Folder(),
        _rules(path, policy),
        sink,
        full=False,
        max_files=limits.max_files,
        max_bytes=limits.max_bytes,
        prune=policy.mode == "globs",
    )
    scan.own = own_folders(path, store.url)
    scan.before, scan.settled = before or {}, int((taken - _GRANULARITY) * 1e9)
    try:
        root = scan.run(path)
    except TooMuch as error:
        writer.abandon()
        biggest = ", ".join(f"{printable(what)} ({size})" for size, what in error.offenders)
        raise QuotaExceeded(
            f"The folder {path} has {error}; {limits.max_files} files and {limits.max_bytes} bytes "
            f"are allowed. Biggest: {biggest}. List what is not needed in {IGNORE_FILE}, choose "
            f"files by globs, or raise the quota."
        ) from None
    except OSError as error:
        writer.abandon()
        raise WorkspaceError(f"The folder {path} cannot be read: {error}") from error
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    packs = [*sink.elsewhere, *writer.names]
    return Scanned(root, scan.problems, packs, writer.plain_bytes)


class _Scan(Scan):
    """Of the host's own files: those with the size and time that they had are not read again, and
    those of this package not at all."""

    own: set[str]
    before: Mapping[str, Entry]
    settled = 0
    """Nanoseconds: what was changed later may have been changed again without a sign of it."""

    def _is_ignored(self, prefix: str, name: str, is_folder: bool) -> bool:
        return prefix + name in self.own or super()._is_ignored(prefix, name, is_folder)

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
    return Rules(ignore.rules(text if policy.hidden else _HIDDEN + text))
