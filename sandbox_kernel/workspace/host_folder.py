"""A folder of the host that imports read and exports write, without following symlinks."""

from __future__ import annotations

import contextlib
import os
import secrets
import unicodedata
from collections.abc import Iterable, Iterator

from sandbox_kernel.errors import WorkspaceError, WorkspaceRefused
from sandbox_kernel.guest.workspace.nofollow import CREATE, Root, next_data, pread_exactly
from sandbox_kernel.guest.workspace.scan_cache import Signature, signature_of
from sandbox_kernel.guest.workspace.tree_format import CHUNK, RESERVED, digest, name_text
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.workspace.trees import Entry

_ZEROS = bytes(CHUNK)


def own_folders(folder: str, store: str) -> set[str]:
    """The folders of this package (records, tokens, saves) below a user's folder: no sandbox may
    read or write them. ``folder`` is a real path, ``store`` a path or a URL."""
    own = (os.path.realpath(path) for path in (data_dir(), runtime_dir(), store))
    top = folder.rstrip("/") + "/"
    return {path[len(top) :] for path in own if path.startswith(top)}


class HostFolder:
    """Files below a folder, by path relative to it. Made if missing; WorkspaceError."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.makedirs(path, exist_ok=True)
            self.root = Root(path)
        except OSError as error:
            raise WorkspaceError(f"The folder {path} cannot be used: {error}") from error

    def signature(self, path: str) -> Signature | None:
        """Changes when the file does; None if there is none."""
        with contextlib.suppress(OSError):
            status = self.root.status(path)
            return signature_of(status) if status is not None else None
        return None

    def link_target(self, path: str) -> str:
        """The target of a symlink. OSError."""
        folder, name = self.root.parent(path)
        return name_text(os.readlink(name, dir_fd=folder))

    def has_file(self, path: str, entry: Entry) -> bool:
        """Whether a file is there with the contents of an entry. Does not read holes."""
        try:
            fd = self.root.read(path)
        except OSError:
            return False
        try:
            return entry.kind == "f" and _has_contents(fd, entry)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def temporary(self, path: str) -> Iterator[tuple[int, bytes, bytes]]:
        """The folder of a path, a temporary name in it, and its own name, to be renamed to."""
        folder, name = self.root.parent(path)
        temporary = f"{RESERVED}export-{secrets.token_hex(8)}".encode()
        try:
            yield folder, temporary, name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)

    def folds_names(self) -> bool:
        """Whether the file system ignores case or Unicode normalization in names."""
        token = f"{RESERVED}{secrets.token_hex(8)}-"
        probe = f"{token}\u00e9".encode()
        os.close(os.open(probe, CREATE, 0o600, dir_fd=self.root.fd))
        try:
            for other in (f"{token}\u00c9".encode(), f"{token}e\u0301".encode()):
                with contextlib.suppress(OSError):
                    os.stat(other, dir_fd=self.root.fd, follow_symlinks=False)
                    return True
            return False
        finally:
            os.unlink(probe, dir_fd=self.root.fd)


def refuse_collisions(paths: Iterable[str]) -> None:
    """WorkspaceRefused if two paths are one file on a file system that folds names."""
    seen: dict[str, str] = {}
    for path in paths:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
        other = seen.setdefault(key, path)
        if other != path:
            raise WorkspaceRefused(
                f"{printable(other)} and {printable(path)} are the same file on this file system, "
                f"so one would overwrite the other. Nothing was written."
            )


def _has_contents(fd: int, entry: Entry) -> bool:
    if os.fstat(fd).st_size != entry.size:
        return False
    end = 0
    for start, hash_, length in entry.pieces():
        if not _is_zero(fd, end, start) or digest(pread_exactly(fd, length, start)) != hash_:
            return False
        end = start + length
    return _is_zero(fd, end, entry.size)


def _is_zero(fd: int, start: int, end: int) -> bool:
    """Whether a range of a file holds only zeros."""
    while (start := next_data(fd, start, end)) < end:
        data = pread_exactly(fd, min(CHUNK, end - start), start)
        if not data or data != _ZEROS[: len(data)]:
            return False
        start += len(data)
    return os.fstat(fd).st_size >= end  # else it got shorter
