"""A save becomes a host folder, with care: what is written was made by hostile code.

Every path is opened component by component without following symlinks. Files are put together
under another name and then renamed. Of modes only what is harmless is kept, and of symlinks only
those that stay in the folder. Names that begin with a dot are left out: programs of the host run or
obey what is in .git/hooks, .bashrc or .ssh.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_kernel.errors import (
    ExportConflict,
    QuotaExceeded,
    WorkspaceError,
    WorkspaceRefused,
)
from sandbox_kernel.guest.workspace.folders import CREATE, Root, pread_exactly, pwrite_all
from sandbox_kernel.guest.workspace.layout import CHUNK, RESERVED, chunk_length, digest, name_bytes
from sandbox_kernel.text import printable
from sandbox_kernel.workspace.reports import (
    ExportReport,
    Limits,
    OnProgress,
    Progress,
    SaveInfo,
)
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.trees import Entry, Totals, walk

_MODES = 0o755
_MOST_LISTED = 20
Parts = list[bytes]


def export(
    store: Store,
    name: str,
    folder: str | Path,
    *,
    at: str = "",
    overwrite: bool = False,
    delete: bool = False,
    mirror: bool = False,
    hidden: bool = False,
    limits: Limits | None = None,
    progress: OnProgress = lambda progress: None,
) -> ExportReport:
    """Write a save (the latest, or ``at``) into a folder of the host. Blocks: call it in a thread.

    Only what differs from the folder's baseline (its last import or export) is written. A file
    that has changed on the host since then is never written over: ExportConflict lists those, and
    nothing is written at all, unless ``overwrite`` is given. ``mirror``: conflicting files are left
    alone and listed in ``skipped``, and all others are written (for a write-back after every save).
    ``delete`` also removes host files that the sandbox deleted since the baseline, if the host has
    not changed them. ``hidden`` also writes what is hidden, for who trusts the code that ran.
    More than ``limits`` allow is refused (QuotaExceeded). No file outside ``folder`` is touched,
    whatever symlinks are there.
    """
    save = store.find(name, at)
    _check_size(save, store.check(save), limits or Limits())
    path = os.path.realpath(folder)
    try:
        os.makedirs(path, exist_ok=True)
        root = Root(path)
    except OSError as error:
        raise WorkspaceError(f"The folder {path} cannot be used: {error}") from error
    try:
        work = _Export(store, save, path, root)
        work.compare(overwrite=overwrite, delete=delete, hidden=hidden)
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
    conflicts: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    _write: list[tuple[str, Entry]] = field(default_factory=list)
    _links: list[tuple[str, Entry]] = field(default_factory=list)
    _folders: list[tuple[str, Entry]] = field(default_factory=list)
    _delete: list[str] = field(default_factory=list)
    _hidden: list[str] = field(default_factory=list)
    _unchanged: int = 0

    # --- what is to be done

    def compare(self, *, overwrite: bool, delete: bool, hidden: bool) -> None:
        base, apart = self.store.baseline(self.save.workspace, self.path)
        before = dict(walk(self.store.read, base)) if base else {}
        for name in apart:
            before.pop(name, None)
        after = dict(walk(self.store.read, bytes.fromhex(self.save.root)))
        if folds_names(self.root):
            _refuse_collisions(after)
        files = {path: _file_of(after, path) for path in after}
        for path, entry in after.items():
            if not hidden and _hidden_part(path):
                if entry.kind != "d" and entry != before.get(path):
                    self._hidden.append(path)
            elif entry.kind == "d":
                self._check_folder(path, entry)
            elif entry.kind == "l":
                self._compare_link(path, entry, before.get(path), overwrite)
            else:
                self._compare_file(path, files[path], _file_of(before, path), overwrite)
        tops = dict.fromkeys(_hidden_part(path) for path in self._hidden)
        self.skipped += [f"{printable(top)}: hidden; programs here could obey it" for top in tops]
        if delete:
            for path, entry in before.items():
                if path not in after and entry.kind in "fh" and (hidden or not _hidden_part(path)):
                    known = _file_of(before, path)
                    if known is not None and self._same_on_host(path, known):
                        self._delete.append(path)

    def _check_folder(self, path: str, entry: Entry) -> None:
        status = self._status(path)
        if status is None:
            self._folders.append((path, entry))
        elif not stat.S_ISDIR(status.st_mode):
            raise WorkspaceRefused(
                f"{printable(path)} is a folder in the save, but something else (a file, a "
                f"symlink) in {self.path}. Nothing was written. Move it away."
            )

    def _compare_file(
        self, path: str, entry: Entry | None, before: Entry | None, overwrite: bool
    ) -> None:
        if entry is None:
            self.skipped.append(f"{printable(path)}: a hard link to what is not there")
            return
        if before is not None and _contents(before) == _contents(entry):
            self._unchanged += 1  # the sandbox has not touched it
            return
        status = self._status(path)
        if status is not None and self._same_on_host(path, entry):
            self._unchanged += 1
        elif status is not None and stat.S_ISDIR(status.st_mode):
            self.conflicts.append(path)
        elif status is None or overwrite or (before and self._same_on_host(path, before)):
            self._write.append((path, entry))
        else:
            self.conflicts.append(path)

    def _compare_link(self, path: str, entry: Entry, before: Entry | None, overwrite: bool) -> None:
        if not stays_inside(path, entry.target):
            self.skipped.append(f"{printable(path)}: a symlink that leads out of the folder")
            return
        if before is not None and before.kind == "l" and before.target == entry.target:
            self._unchanged += 1
            return
        status = self._status(path)
        if status is None:
            self._links.append((path, entry))
        elif stat.S_ISLNK(status.st_mode):
            *parents, name = parts_of(path)
            here = os.readlink(name, dir_fd=self.root.folder(parents))
            if here == name_bytes(entry.target):
                self._unchanged += 1
            elif overwrite or (before is not None and name_bytes(before.target) == here):
                self._links.append((path, entry))
            else:
                self.conflicts.append(path)
        else:
            self.conflicts.append(path)

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return self.root.status(parts_of(path))
        except (NotADirectoryError, OSError) as error:
            raise WorkspaceRefused(
                f"{printable(path)} cannot be written in {self.path}: something that is no folder "
                f"(a symlink?) is in the way ({error}). Nothing was written."
            ) from None

    def _same_on_host(self, path: str, entry: Entry) -> bool:
        try:
            fd = self.root.read(parts_of(path))
        except OSError:
            return False
        try:
            if os.fstat(fd).st_size != entry.size:
                return False
            index = 0
            for chunk in entry.chunks:
                for _ in range(chunk if isinstance(chunk, int) else 1):
                    length = chunk_length(entry.size, index)
                    data = pread_exactly(fd, length, index * CHUNK)
                    if isinstance(chunk, int):
                        if data.strip(b"\0") or len(data) != length:
                            return False
                    elif digest(data).hex() != chunk:
                        return False
                    index += 1
            return True
        finally:
            os.close(fd)

    # --- doing it

    def write(self, progress: OnProgress) -> ExportReport:
        for path, _ in self._folders:
            *parents, name = parts_of(path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.root.folder(parents))
        total = sum(entry.size for _, entry in self._write)
        done = 0
        for number, (path, entry) in enumerate(self._write, 1):
            self._write_file(path, entry)
            done += entry.size
            progress(Progress("write", number, done, total))
        for path, entry in self._links:
            with self._temporary(path) as (folder, temporary, name):
                os.symlink(name_bytes(entry.target), temporary, dir_fd=folder)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        for path in self._delete:
            *parents, name = parts_of(path)
            os.unlink(name, dir_fd=self.root.folder(parents))
        for path, entry in reversed(self._folders):
            fd = self.root.folder(parts_of(path))
            os.fchmod(fd, entry.mode & _MODES | 0o700)
            os.utime(fd, ns=(entry.mtime, entry.mtime))
        root = bytes.fromhex(self.save.root)
        apart = [*self.conflicts, *self._hidden]
        self.store.set_baseline(self.save.workspace, self.path, root, apart)
        return ExportReport(
            self.save,
            [path for path, _ in (*self._write, *self._links)],
            self._delete,
            self._unchanged,
            [*self.skipped, *(f"{printable(p)}: changed on the host" for p in self.conflicts)],
        )

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


def _hidden_part(path: str) -> str:
    """The path up to its first name that begins with a dot; empty if there is none."""
    parts = path.split("/")
    for number, part in enumerate(parts, 1):
        if part.startswith("."):
            return "/".join(parts[:number])
    return ""


def stays_inside(path: str, target: str) -> bool:
    """Whether a symlink at ``path`` leads to somewhere in the same folder. ``..`` counts only at
    the beginning of its target: behind a name that is a symlink itself, it would lead anywhere."""
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return up <= path.count("/") and ".." not in parts[up:]


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


def _file_of(entries: dict[str, Entry], path: str) -> Entry | None:
    """The entry with the contents of a file: its own, or that which it is a hard link to."""
    entry = entries.get(path)
    if entry is not None and entry.kind == "h":
        entry = entries.get(entry.target)
    return entry if entry is not None and entry.kind == "f" else None


def _contents(entry: Entry) -> tuple[int, Sequence[str | int]]:
    return entry.size, entry.chunks
