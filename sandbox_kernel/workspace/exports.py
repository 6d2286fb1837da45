"""A save becomes a host folder. Hostile code made its files, so exports are careful.

Every path is opened component by component, without following symlinks. Files are written under a
temporary name and renamed. Modes are reduced to harmless bits, and only symlinks that stay in the
folder are made. ``export_guard`` lists the paths that are not written at all. Replaced and deleted
files go to a trash folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_kernel.errors import ExportConflict, QuotaExceeded, WorkspaceError, WorkspaceRefused
from sandbox_kernel.guest.workspace.nofollow import CREATE, closing_fd, pwrite_all
from sandbox_kernel.guest.workspace.scan_cache import Signature
from sandbox_kernel.guest.workspace.tree_format import name_bytes, path_parts
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.workspace.export_guard import Guard, why_not_link
from sandbox_kernel.workspace.host_folder import HostFolder, refuse_collisions
from sandbox_kernel.workspace.imports import add_tree
from sandbox_kernel.workspace.reports import (
    Baseline,
    ExportReport,
    OnProgress,
    Progress,
    Quota,
    SaveInfo,
)
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trash import DELETED, REPLACED, Trash
from sandbox_kernel.workspace.trees import Entry, plain, same_contents, walk

HARMLESS_MODES = 0o755
_MOST_LISTED = 20


def export(
    store: Store,
    name: str,
    folder: str | Path,
    *,
    at: str = "",
    overwrite: bool = False,
    delete: bool = False,
    delete_imported: bool = False,
    mirror: bool = False,
    hidden: bool = False,
    notebook: str = "",
    quota: Quota | None = None,
    progress: OnProgress = lambda progress: None,
) -> ExportReport:
    """Write a save (the latest, or ``at``) into a folder of the host. Blocks: call it in a thread.

    Only files that differ from the folder's baseline (its last import or export) are written.
    ExportConflict lists files that have changed on the host since then, and nothing is written,
    unless ``overwrite`` is given. ``mirror``, for a write-back after every save, skips conflicting
    files instead and writes all others.

    ``delete`` also deletes files that the sandbox has deleted, if an earlier export made them and
    the host has not changed them; ``delete_imported`` includes files that came from the folder.
    Replaced and deleted files go to the trash folder (``ExportReport.trash``).

    ``hidden`` writes guarded paths, too, for users who trust the code that ran. The file
    ``notebook`` is never written or deleted. QuotaExceeded if the files, holes included, exceed
    the quota; a mirror leaves out sparse files instead.
    """
    with store.saving():
        save = store.find(name, at)
        quota = quota or Quota()
        totals = store.check(save)
        count = totals.files + totals.folders
        if totals.bytes > quota.max_bytes or count > quota.max_files:
            raise QuotaExceeded(
                f"The save {save.id} of {save.workspace!r} has {count} files and folders with "
                f"{totals.bytes} bytes; {quota.max_files} and {quota.max_bytes} are allowed. "
                f"Nothing was written. Raise the limits with --max-files and --max-bytes."
            )
        target = HostFolder(os.path.realpath(folder))
        trash = Trash(target.root.fd, target.path)
        try:
            kept = os.path.relpath(os.path.realpath(notebook), target.path) if notebook else ""
            work = _Export(store, save, target, trash, kept, mirror, overwrite, hidden, quota)
            work.compare()
            if delete:
                work.find_deleted(imported=delete_imported)
            if work.conflicts and not mirror:
                listed = ", ".join(printable(p) for p in work.conflicts[:_MOST_LISTED])
                raise ExportConflict(
                    f"{len(work.conflicts)} files in {target.path} have changed there, or are not "
                    f"from this workspace, and would be overwritten: {listed}. Nothing was "
                    f"written. Move them away, or export with --overwrite."
                )
            return work.write(progress)
        except OSError as error:
            raise WorkspaceError(f"Exporting {name!r} to {target.path} failed: {error}") from error
        finally:
            trash.close()
            target.root.close()


@dataclass
class _Export:
    store: Store
    save: SaveInfo
    target: HostFolder
    trash: Trash
    notebook: str
    mirror: bool
    overwrite: bool
    hidden: bool
    quota: Quota
    conflicts: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    _before: dict[str, Entry] = field(default_factory=dict)
    _after: dict[str, Entry] = field(default_factory=dict)
    _now: dict[str, Entry] = field(default_factory=dict)
    """The folder after the export: the next baseline."""
    _made: set[str] = field(default_factory=set)
    _replaced: set[str] = field(default_factory=set)
    _write: list[tuple[str, Entry]] = field(default_factory=list)
    _links: list[tuple[str, Entry]] = field(default_factory=list)
    _folders: list[tuple[str, Entry]] = field(default_factory=list)
    _delete: list[str] = field(default_factory=list)
    _keep: set[str] = field(default_factory=set)
    """The host's own files that will be overwritten."""
    _seen: dict[str, Signature | None] = field(default_factory=dict)
    """Signatures of files when they were compared."""
    _unchanged: int = 0
    _started: float = field(default_factory=time.time)

    # --- comparing

    def compare(self) -> None:
        """Find out which files to write, and which conflict."""
        known = self.store.baseline(self.save.workspace, self.target.path)
        self._before = self.store.baseline_files(known)
        self._now = dict(self._before)
        self._made, self._replaced = set(known.made), set(known.replaced)
        after = dict(walk(self.store.read, self.save.tree))
        if self.target.folds_names():
            refuse_collisions(after)
        self._after = plain(after.items())
        self._guard = Guard(self.target, self._after, self.store.url, self.hidden)
        for path in after:
            if path not in self._after:
                self._skip(path, "a hard link to a missing file")
        too_big = self._too_big()
        guarded: dict[str, str] = {}
        blocked = ""
        for path, entry in self._after.items():
            before = self._before.get(path)
            if path in too_big or (blocked and path.startswith(blocked)):
                continue
            if found := self._guard.guarded(path):
                if entry.kind != "d" and not same_contents(entry, before):
                    guarded.setdefault(*found)
            elif path == self.notebook:
                if not same_contents(entry, before):
                    self._skip(path, "the notebook itself is never written")
            elif entry.kind == "d":
                if not self._check_folder(path, entry):
                    blocked = path + "/"
            elif same_contents(entry, before):
                self._unchanged += 1  # the sandbox has not touched it
            elif entry.kind == "l":
                self._compare_link(path, entry, before)
            else:
                self._compare_file(path, entry, before)
        for part, what in guarded.items():
            self._skip(part, f"{what}; programs here could obey it")

    def _skip(self, path: str, reason: object) -> None:
        self.skipped.append(f"{printable(path)}: {reason}")

    def _too_big(self) -> set[str]:
        """Sparse files to leave out, so that the apparent size of all stays within the quota."""
        files = [(path, entry) for path, entry in self._after.items() if entry.kind == "f"]
        apparent = sum(entry.size for _, entry in files)
        files.sort(key=lambda file: file[1].size - file[1].data)
        left_out: set[str] = set()
        while apparent > self.quota.max_bytes and files:
            path, entry = files.pop()
            if not self.mirror or entry.size == entry.data:
                raise QuotaExceeded(
                    f"The files of save {self.save.id} of {self.save.workspace!r} have {apparent} "
                    f"bytes with their holes ({printable(path)}: {entry.size}); "
                    f"{self.quota.max_bytes} are allowed. Nothing was written. Raise the limit "
                    f"with --max-bytes."
                )
            apparent -= entry.size
            left_out.add(path)
            self._skip(path, f"too large with its holes ({entry.size} bytes)")
        return left_out

    def find_deleted(self, *, imported: bool) -> None:
        """Find files that the sandbox has deleted and that may be deleted here."""
        for path, entry in self._before.items():
            if path in self._after or entry.kind != "f" or path == self.notebook:
                continue
            if self._guard.guarded(path) or not (imported or path in self._made):
                continue
            self._seen[path] = self.target.signature(path)
            if self.target.has_file(path, entry):
                self._delete.append(path)

    def _check_folder(self, path: str, entry: Entry) -> bool:
        status = self._status(path)
        if status is None:
            self._folders.append((path, entry))
        elif not stat.S_ISDIR(status.st_mode):
            if self.mirror:
                self.conflicts.append(path)
                return False
            raise WorkspaceRefused(
                f"{printable(path)} is a folder in the save, but a file or symlink in "
                f"{self.target.path}. Nothing was written. Move it away."
            )
        self._now[path] = entry
        return True

    def _compare_file(self, path: str, entry: Entry, before: Entry | None) -> None:
        self._seen[path] = self.target.signature(path)
        status = self._status(path)
        if status is None:
            self._made.add(path)
            self._replaced.discard(path)
            self._write.append((path, entry))
        elif self.target.has_file(path, entry):
            self._unchanged += 1
            self._now[path] = entry
        elif stat.S_ISDIR(status.st_mode):
            self.conflicts.append(path)
        else:
            as_known = before is not None and self.target.has_file(path, before)
            if not (as_known or self.overwrite):
                self.conflicts.append(path)
                return
            if not as_known or path not in self._made | self._replaced:
                self._keep.add(path)
                self._made.discard(path)
                self._replaced.add(path)
            self._write.append((path, entry))

    def _compare_link(self, path: str, entry: Entry, before: Entry | None) -> None:
        reason = why_not_link(path, entry.target, self._targets, self._guard.guarded)
        if reason:
            self._skip(path, reason)
            return
        status = self._status(path)
        is_link = status is not None and stat.S_ISLNK(status.st_mode)
        here = self.target.link_target(path) if is_link else ""
        as_known = self.overwrite or (before is not None and before.target == here)
        if here == entry.target:
            self._unchanged += 1
            self._now[path] = entry
        elif status is None or (is_link and as_known):
            self._links.append((path, entry))
        else:
            self.conflicts.append(path)

    def _targets(self, path: str) -> list[str]:
        """Where a path may lead: as a symlink of the save, and as one on the host."""
        found = []
        entry = self._after.get(path)
        if entry is not None and entry.kind == "l":
            found.append(entry.target)
        with contextlib.suppress(OSError):
            found.append(self.target.link_target(path))
        return found

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return self.target.root.status(path)
        except OSError as error:
            raise WorkspaceRefused(
                f"{printable(path)} cannot be written in {self.target.path}: a file or symlink is "
                f"in the place of a folder ({error}). Nothing was written."
            ) from None

    def _is_as_seen(self, path: str) -> bool:
        """False, and a conflict, if the host has changed a file since it was compared."""
        if self.target.signature(path) == self._seen[path]:
            return True
        self.conflicts.append(path)
        self._made.discard(path)
        self._replaced.discard(path)
        return False

    # --- writing

    def write(self, progress: OnProgress) -> ExportReport:
        """Write and delete, and set the next baseline."""
        made: list[tuple[str, Entry]] = []
        for path, entry in self._folders:
            with self._each(path), contextlib.suppress(FileExistsError):
                folder, name = self.target.root.parent(path)
                os.mkdir(name, 0o700, dir_fd=folder)
                made.append((path, entry))
        total = sum(entry.size for _, entry in self._write)
        done = 0
        written = []
        for number, (path, entry) in enumerate(self._write, 1):
            if self._is_as_seen(path):
                with self._each(path):
                    self._write_file(path, entry)
                    written.append((path, entry))
            done += entry.size
            progress(Progress("write", number, done, total))
        for path, entry in self._links:
            with self._each(path), self.target.temporary(path) as (folder, temporary, name):
                os.symlink(name_bytes(entry.target), temporary, dir_fd=folder)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                written.append((path, entry))
        deleted = []
        for path in self._delete:
            if self._is_as_seen(path):
                with self._each(path):
                    self.trash.put(DELETED, self.target.root.parent(path)[0], path)
                    del self._now[path]
                    deleted.append(path)
        for path, entry in reversed(made):
            fd = self.target.root.folder(path_parts(path))
            os.fchmod(fd, entry.mode & HARMLESS_MODES | 0o700)
            os.utime(fd, ns=(entry.mtime, entry.mtime))
        self._now.update(written)
        self._set_baseline()
        self.trash.tidy()
        return ExportReport(
            self.save,
            [path for path, _ in written],
            deleted,
            self._unchanged,
            [*self.skipped, *(f"{printable(p)}: changed on the host" for p in self.conflicts)],
            self.trash.path,
        )

    @contextlib.contextmanager
    def _each(self, path: str) -> Iterator[None]:
        """A mirror skips a file that it cannot write: the baseline must have those it wrote."""
        try:
            yield
        except OSError as error:
            if not self.mirror:
                raise
            self._skip(path, error.strerror or error)
            self._replaced.discard(path)

    def _set_baseline(self) -> None:
        root = self.save.tree
        if self._now != self._after:
            root, _ = add_tree(self.store, self._now)
        made, replaced = (
            sorted(paths & self._now.keys()) for paths in (self._made, self._replaced)
        )
        baseline = Baseline(root, made=made, replaced=replaced, taken=self._started)
        self.store.set_baseline(self.save.workspace, self.target.path, baseline)

    def _write_file(self, path: str, entry: Entry) -> None:
        with self.target.temporary(path) as (folder, temporary, name):
            with closing_fd(os.open(temporary, CREATE, 0o600, dir_fd=folder)) as fd:
                places: dict[bytes, list[tuple[int, int]]] = {}
                for offset, hash_, length in entry.pieces():
                    places.setdefault(hash_, []).append((offset, length))
                for stored in self.store.packs.read_many(places):
                    for offset, length in places[stored.hash]:
                        if len(stored.plain) != length:
                            raise WorkspaceRefused(
                                f"The save {self.save.id} has a chunk of the wrong length in "
                                f"{printable(path)}."
                            )
                        pwrite_all(fd, stored.plain, offset)
                os.ftruncate(fd, entry.size)
                os.fchmod(fd, entry.mode & HARMLESS_MODES | 0o600)
                os.utime(fd, ns=(entry.mtime, entry.mtime))
            if path in self._keep:
                self.trash.put(REPLACED, folder, path)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
