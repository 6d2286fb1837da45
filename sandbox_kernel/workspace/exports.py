"""A save becomes a host folder, with care: what is written was made by hostile code.

Every path is opened component by component without following symlinks. Files are put together
under another name and then renamed. Of modes only what is harmless is kept, and of symlinks only
those that stay in the folder. Names that begin with a dot are left out: programs of the host run or
obey what is in .git/hooks, .bashrc or .ssh. So are Python environments, whose interpreters run what
is in them as soon as they are started, and new modules in a folder that this process imports from.
What is taken away goes to a trash folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_kernel.errors import (
    ExportConflict,
    QuotaExceeded,
    WorkspaceError,
    WorkspaceRefused,
)
from sandbox_kernel.guest.workspace.folders import CREATE, Root, pwrite_all
from sandbox_kernel.guest.workspace.known import Signature, signature_of
from sandbox_kernel.guest.workspace.layout import (
    CHUNK,
    RESERVED,
    chunk_length,
    name_bytes,
    name_text,
)
from sandbox_kernel.text import printable
from sandbox_kernel.workspace.claims import claiming
from sandbox_kernel.workspace.links import environment_part, hidden_part, module_name, why_not
from sandbox_kernel.workspace.objects import add_tree
from sandbox_kernel.workspace.onhost import has_contents, own_folders
from sandbox_kernel.workspace.reports import (
    Baseline,
    ExportReport,
    Limits,
    OnProgress,
    Progress,
    SaveInfo,
)
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trash import Trash
from sandbox_kernel.workspace.trees import Entry, Totals, plain, same_contents, walk

_MODES = 0o755
_MARKS = ("pyvenv.cfg", "conda-meta", "bin/python", "bin/python3")
_MOST_LISTED = 20
Parts = list[bytes]


@claiming
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
    limits: Limits | None = None,
    progress: OnProgress = lambda progress: None,
) -> ExportReport:
    """Write a save (the latest, or ``at``) into a folder of the host. Blocks: call it in a thread.

    Only what differs from the folder's baseline (its last import or export) is written. A file
    that has changed on the host since then is never written over: ExportConflict lists those, and
    nothing is written at all, unless ``overwrite`` is given. ``mirror``: conflicting files are left
    alone and listed in ``skipped``, and all others are written (for a write-back after every save).
    ``delete`` also removes host files that the sandbox has deleted, of those that an earlier export
    had made there; ``delete_imported`` also of those that came from the folder. What the host has
    changed is not deleted. What is deleted, and what of the host's own is written over, is in the
    trash folder afterwards (``ExportReport.trash``). ``hidden`` also writes what is hidden,
    Python environments and modules for this process, for who trusts the code that ran. The file
    ``notebook`` is neither written nor deleted.
    More than ``limits`` allow is refused (QuotaExceeded), holes included; a mirror leaves out what
    is too large because of them. Nothing outside ``folder`` is touched, whatever symlinks it has.
    """
    save = store.find(name, at)
    limits = limits or Limits()
    _check_size(save, store.check(save), limits)
    path = os.path.realpath(folder)
    try:
        os.makedirs(path, exist_ok=True)
        root = Root(path)
    except OSError as error:
        raise WorkspaceError(f"The folder {path} cannot be used: {error}") from error
    trash = Trash(root.fd, path)
    try:
        kept = os.path.relpath(os.path.realpath(notebook), path) if notebook else ""
        work = _Export(store, save, path, root, trash, kept, mirror, overwrite, hidden, limits)
        work.find_our_own()
        work.compare()
        if delete:
            work.find_deleted(imported=delete_imported)
        if work.conflicts and not mirror:
            listed = ", ".join(printable(p) for p in work.conflicts[:_MOST_LISTED])
            raise ExportConflict(
                f"{len(work.conflicts)} files in {path} have changed there, or are not from this "
                f"workspace, and would be written over: {listed}. Nothing was written. Move them "
                f"away, or export with --overwrite."
            )
        return work.write(progress)
    except OSError as error:
        raise WorkspaceError(f"Exporting {name!r} to {path} failed: {error}") from error
    finally:
        trash.close()
        root.close()


def _check_size(save: SaveInfo, totals: Totals, limits: Limits) -> None:
    if totals.bytes > limits.max_bytes or totals.files + totals.folders > limits.max_files:
        raise QuotaExceeded(
            f"The save {save.id} of {save.workspace!r} would be {totals.files + totals.folders} "
            f"files and folders with {totals.bytes} bytes; {limits.max_files} and "
            f"{limits.max_bytes} are allowed. Nothing was written. If that is what you want, raise "
            f"the limits (--max-files, --max-bytes)."
        )


@dataclass
class _Export:
    store: Store
    save: SaveInfo
    path: str
    root: Root
    trash: Trash
    notebook: str
    mirror: bool
    overwrite: bool
    hidden: bool
    limits: Limits
    conflicts: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    _before: dict[str, Entry] = field(default_factory=dict)
    _after: dict[str, Entry] = field(default_factory=dict)
    _now: dict[str, Entry] = field(default_factory=dict)
    """What the folder has in the end, as far as that is known: the next baseline."""
    _made: set[str] = field(default_factory=set)
    _replaced: set[str] = field(default_factory=set)
    _write: list[tuple[str, Entry]] = field(default_factory=list)
    _links: list[tuple[str, Entry]] = field(default_factory=list)
    _folders: list[tuple[str, Entry]] = field(default_factory=list)
    _delete: list[str] = field(default_factory=list)
    _keep: set[str] = field(default_factory=set)
    """What is the host's own, and will be written over."""
    _seen: dict[str, Signature | None] = field(default_factory=dict)
    """What was compared, as it was then."""
    _own: set[str] = field(default_factory=set)
    """Folders of this package's in here."""
    _environments: dict[str, bool] = field(default_factory=dict)
    _imported_from: set[str] = field(default_factory=set)
    """Folders in here that this process imports from, "" being the first."""
    _unchanged: int = 0
    _started: float = field(default_factory=time.time)

    # --- what is to be done

    def find_our_own(self) -> None:
        self._own = own_folders(self.path, self.store.url)
        for place in map(os.path.realpath, sys.path):
            if place == self.path or place.startswith(f"{self.path}/"):
                self._imported_from.add(place[len(self.path) + 1 :])

    def compare(self) -> None:
        known = self.store.baseline(self.save.workspace, self.path)
        self._before = plain(walk(self.store.read, known.root)) if known.root else {}
        for name in known.apart:
            self._before.pop(name, None)
        self._now = dict(self._before)
        self._made, self._replaced = set(known.made), set(known.replaced)
        after = dict(walk(self.store.read, bytes.fromhex(self.save.root)))
        if folds_names(self.root):
            _refuse_collisions(after)
        self._after = plain(after.items())
        lost = [path for path in after if path not in self._after]
        self.skipped += [f"{printable(p)}: a hard link to what is not there" for p in lost]
        too_big = self._too_big()
        guarded: dict[str, None] = {}
        blocked = ""
        for path, entry in self._after.items():
            before = self._before.get(path)
            if path in too_big or (blocked and path.startswith(blocked)):
                continue
            if part := self._guarded(path):
                if entry.kind != "d" and not same_contents(entry, before):
                    guarded[part] = None
            elif path == self.notebook:
                if not same_contents(entry, before):
                    self.skipped.append(f"{printable(path)}: the notebook itself is never written")
            elif entry.kind == "d":
                if not self._check_folder(path, entry):
                    blocked = path + "/"
            elif entry.kind == "l":
                self._compare_link(path, entry, before)
            else:
                self._compare_file(path, entry, before)
        for part in guarded:
            what = "a part of a Python environment"
            if part in self._own:
                what = "sandbox-kernel's own"
            elif hidden_part(part):
                what = "hidden"
            elif self._new_module(part):
                what = "a new module, in a folder that this Python process imports from"
            self.skipped.append(f"{printable(part)}: {what}; programs here could obey it")

    def _guarded(self, path: str) -> str:
        """The path up to what programs of the host may obey unasked; empty if it is harmless."""
        for own in self._own:
            if path == own or path.startswith(f"{own}/"):
                return own
        if self.hidden:
            return ""
        return (
            hidden_part(path)
            or self._new_module(path)
            or environment_part(path, self._is_environment)
        )

    def _new_module(self, path: str) -> str:
        """The path up to a module or package that this process would find, and the host has not;
        empty if there is none. (``python -m jupyterlab`` imports from the folder it is started in,
        whatever it has not imported yet.)"""
        parts = path.split("/")
        for number in range(len(parts)) if self._imported_from else ():
            part = "/".join(parts[: number + 1])
            if "/".join(parts[:number]) in self._imported_from:
                entry = self._after.get(part)
                folder = entry is not None and entry.kind == "d"
                module = f"{part}/__init__.py" in self._after if folder else module_name(part)
                if module and self._signature(part) is None:
                    return part
        return ""

    def _is_environment(self, folder: str) -> bool:
        """Whether it is a Python environment: on the host, or in the save."""
        if folder not in self._environments:
            marks = [f"{folder}/{mark}".lstrip("/") for mark in _MARKS]
            self._environments[folder] = any(
                mark in self._after or self._signature(mark) is not None for mark in marks
            )
        return self._environments[folder]

    def _too_big(self) -> set[str]:
        """Files to leave out, because with their holes all would be more than is allowed: whoever
        reads or copies them here may have to do with so many zeros."""
        files = [(path, entry) for path, entry in self._after.items() if entry.kind == "f"]
        seeming = sum(entry.size for _, entry in files)
        files.sort(key=lambda file: file[1].size - file[1].data)
        left_out: set[str] = set()
        while seeming > self.limits.max_bytes and files:
            path, entry = files.pop()
            if not self.mirror or entry.size == entry.data:
                raise QuotaExceeded(
                    f"The files of save {self.save.id} of {self.save.workspace!r} seem to hold "
                    f"{seeming} bytes, holes included ({printable(path)}: {entry.size}); "
                    f"{self.limits.max_bytes} are allowed. Nothing was written. If that is what "
                    f"you want, raise the limit (--max-bytes)."
                )
            seeming -= entry.size
            left_out.add(path)
            self.skipped.append(f"{printable(path)}: too large with its holes ({entry.size} bytes)")
        return left_out

    def find_deleted(self, *, imported: bool) -> None:
        for path, entry in self._before.items():
            if path in self._after or entry.kind != "f" or path == self.notebook:
                continue
            if self._guarded(path):
                continue
            if imported or path in self._made:
                self._seen[path] = self._signature(path)
                if self._same_on_host(path, entry):
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
                f"{printable(path)} is a folder in the save, but something else (a file, a "
                f"symlink) in {self.path}. Nothing was written. Move it away."
            )
        self._now[path] = entry
        return True

    def _compare_file(self, path: str, entry: Entry, before: Entry | None) -> None:
        if same_contents(entry, before):
            self._unchanged += 1  # the sandbox has not touched it
            return
        self._seen[path] = self._signature(path)
        status = self._status(path)
        if status is not None and self._same_on_host(path, entry):
            self._unchanged += 1
            self._now[path] = entry
        elif status is not None and stat.S_ISDIR(status.st_mode):
            self.conflicts.append(path)
        elif status is None:
            self._made.add(path)
            self._replaced.discard(path)
            self._write.append((path, entry))
        else:
            as_known = before is not None and self._same_on_host(path, before)
            if not (as_known or self.overwrite):
                self.conflicts.append(path)
                return
            if not as_known or path not in self._made | self._replaced:
                self._keep.add(path)
                self._made.discard(path)
                self._replaced.add(path)
            self._write.append((path, entry))

    def _compare_link(self, path: str, entry: Entry, before: Entry | None) -> None:
        if same_contents(entry, before):
            self._unchanged += 1
            return
        reason = why_not(path, entry.target, self._targets, self._guarded)
        if reason:
            self.skipped.append(f"{printable(path)}: {reason}")
            return
        status = self._status(path)
        if status is None:
            self._links.append((path, entry))
        elif stat.S_ISLNK(status.st_mode):
            here = self._link_on_host(path)
            if here == entry.target:
                self._unchanged += 1
                self._now[path] = entry
            elif self.overwrite or (before is not None and before.target == here):
                self._links.append((path, entry))
            else:
                self.conflicts.append(path)
        else:
            self.conflicts.append(path)

    def _targets(self, path: str) -> list[str]:
        """Where a path may lead: as a symlink of the save, and as one that is here."""
        found = []
        entry = self._after.get(path)
        if entry is not None and entry.kind == "l":
            found.append(entry.target)
        with contextlib.suppress(OSError):  # there is no folder: a symlink before it counts
            found.append(self._link_on_host(path))
        return found

    def _link_on_host(self, path: str) -> str:
        *parents, name = parts_of(path)
        return name_text(os.readlink(name, dir_fd=self.root.folder(parents)))

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return self.root.status(parts_of(path))
        except (NotADirectoryError, OSError) as error:
            raise WorkspaceRefused(
                f"{printable(path)} cannot be written in {self.path}: something that is no folder "
                f"(a symlink?) is in the way ({error}). Nothing was written."
            ) from None

    def _signature(self, path: str) -> Signature | None:
        """What changes when somebody writes a file; None if there is none."""
        with contextlib.suppress(OSError):
            status = self.root.status(parts_of(path))
            return signature_of(status) if status is not None else None
        return None

    def _is_as_seen(self, path: str) -> bool:
        """False if the host has changed a file since it was compared, which takes time if there is
        much: then it is left alone."""
        if self._signature(path) == self._seen[path]:
            return True
        self.conflicts.append(path)
        self._made.discard(path)
        self._replaced.discard(path)
        return False

    def _same_on_host(self, path: str, entry: Entry) -> bool:
        if entry.kind != "f":
            return False
        try:
            fd = self.root.read(parts_of(path))
        except OSError:
            return False
        try:
            return has_contents(fd, entry)
        finally:
            os.close(fd)

    # --- doing it

    def write(self, progress: OnProgress) -> ExportReport:
        made: list[tuple[str, Entry]] = []
        for path, entry in self._folders:
            *parents, name = parts_of(path)
            with self._each(path), contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.root.folder(parents))
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
            with self._each(path), self._temporary(path) as (folder, temporary, name):
                os.symlink(name_bytes(entry.target), temporary, dir_fd=folder)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                written.append((path, entry))
        deleted = []
        for path in self._delete:
            if self._is_as_seen(path):
                with self._each(path):
                    parts = parts_of(path)
                    self.trash.take(self.root.folder(parts[:-1]), parts)
                    del self._now[path]
                    deleted.append(path)
        self.trash.tidy()
        for path, entry in reversed(made):
            fd = self.root.folder(parts_of(path))
            os.fchmod(fd, entry.mode & _MODES | 0o700)
            os.utime(fd, ns=(entry.mtime, entry.mtime))
        self._now.update(written)
        self._set_baseline()
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
        """A mirror leaves out what cannot be written, and goes on with the rest: what it has done
        by then must be in the next baseline."""
        try:
            yield
        except OSError as error:
            if not self.mirror:
                raise
            self.skipped.append(f"{printable(path)}: {error.strerror or error}")
            self._replaced.discard(path)

    def _set_baseline(self) -> None:
        """What is here now is the next baseline."""
        root = bytes.fromhex(self.save.root)
        if self._now != self._after:
            root, _ = add_tree(self.store, self._now)
        made, replaced = (
            sorted(paths & self._now.keys()) for paths in (self._made, self._replaced)
        )
        baseline = Baseline(root, made=made, replaced=replaced, taken=self._started)
        self.store.set_baseline(self.save.workspace, self.path, baseline)

    def _write_file(self, path: str, entry: Entry) -> None:
        with self._temporary(path) as (folder, temporary, name):
            fd = os.open(temporary, CREATE, 0o600, dir_fd=folder)
            try:
                places: dict[bytes, list[int]] = {}
                for index, hash_, _ in entry.pieces():
                    places.setdefault(hash_, []).append(index)
                for stored in self.store.packs.read_many(places):
                    for index in places[stored.hash]:
                        if len(stored.plain) != chunk_length(entry.size, index):
                            raise WorkspaceRefused(
                                f"The save {self.save.id} has a chunk of the wrong length in "
                                f"{printable(path)}."
                            )
                        pwrite_all(fd, stored.plain, index * CHUNK)
                os.ftruncate(fd, entry.size)
                os.fchmod(fd, entry.mode & _MODES | 0o600)
                os.utime(fd, ns=(entry.mtime, entry.mtime))
            finally:
                os.close(fd)
            if path in self._keep:
                self.trash.keep(folder, parts_of(path))
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    @contextlib.contextmanager
    def _temporary(self, path: str) -> Iterator[tuple[int, bytes, bytes]]:
        *parents, name = parts_of(path)
        folder = self.root.folder(parents)
        temporary = f"{RESERVED}export-{secrets.token_hex(8)}".encode()
        try:
            yield folder, temporary, name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


def parts_of(path: str) -> Parts:
    return [name_bytes(part) for part in path.split("/")]


def folds_names(root: Root) -> bool:
    """Whether the file system takes two different names for the same (case, normalization)."""
    token = secrets.token_hex(8)
    probe = f"{RESERVED}{token}-\u00e9".encode()
    os.close(os.open(probe, CREATE, 0o600, dir_fd=root.fd))
    try:
        others = (f"{RESERVED}{token}-\u00c9".encode(), f"{RESERVED}{token}-e\u0301".encode())
        for other in others:
            with contextlib.suppress(OSError):
                os.stat(other, dir_fd=root.fd, follow_symlinks=False)
                return True
        return False
    finally:
        os.unlink(probe, dir_fd=root.fd)


def _refuse_collisions(entries: dict[str, Entry]) -> None:
    seen: dict[str, str] = {}
    for path in entries:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
        other = seen.setdefault(key, path)
        if other != path:
            raise WorkspaceRefused(
                f"{printable(other)} and {printable(path)} are the same file on this file system, "
                f"so one would overwrite the other. Nothing was written."
            )
