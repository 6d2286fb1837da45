"""Files of the store: in a local folder, or on any file system that fsspec knows.

Every write is of a whole file, so a write can be repeated when its answer is lost.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sandbox_kernel.atomic_write import written_aside
from sandbox_kernel.errors import SandboxUnavailable, StoreError
from sandbox_kernel.guest.workspace.nofollow import closing_fd
from sandbox_kernel.paths import private_dir

T = TypeVar("T")
ATTEMPTS = 6
FIRST_PAUSE = 0.1
_TEMPORARY = "tmp"
_OLD = 24 * 3600
_RACES = 5


class LocalBlobs:
    """A folder of this machine. Paths are relative; reads raise FileNotFoundError, and a missing
    folder is empty. A file is written under a temporary name, synced and renamed: even after a
    power cut it is complete or missing, and files appear in the order of their writes."""

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        try:
            self._root = private_dir(root)
            self._temporary = private_dir(root / _TEMPORARY)
        except OSError as error:
            raise StoreError(f"The store {root} cannot be used: {error}") from error
        self._made: set[Path] = set()

    def get(self, path: str) -> bytes:
        with _named(self.url):
            return (self._root / path).read_bytes()

    def get_range(self, path: str, start: int, length: int) -> bytes:
        with _named(self.url), (self._root / path).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length, start)

    def size(self, path: str) -> int:
        with _named(self.url):
            return (self._root / path).stat().st_size

    def put(self, path: str, *parts: bytes | memoryview, lasting: bool = True) -> None:
        """``lasting``: survive a power cut."""
        target = self._root / path
        with _named(self.url):
            if target.parent not in self._made:
                _make_folder(target.parent)
                self._made.add(target.parent)
            if not self._temporary.exists():  # the store has been deleted
                private_dir(self._root)
                private_dir(self._temporary)
            with written_aside(self._temporary, *parts, lasting=lasting) as temporary:
                for attempt in range(_RACES):
                    try:
                        temporary.rename(target)
                        break
                    except FileNotFoundError:  # the folder has been deleted
                        if attempt == _RACES - 1 or not temporary.exists():
                            raise
                        _make_folder(target.parent)
            if lasting:
                _sync_folder(target.parent)

    def files(self, folder: str) -> dict[str, int]:
        """Names of files in a folder, with their sizes."""
        found = {}
        for entry in self._entries(folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def names(self, folder: str) -> list[str]:
        return [e.name for e in self._entries(folder) if e.is_file(follow_symlinks=False)]

    def folders(self, folder: str) -> list[str]:
        return sorted(e.name for e in self._entries(folder) if e.is_dir(follow_symlinks=False))

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with _named(self.url), os.scandir(self._root / folder) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def delete(self, path: str, *, tidy: bool = True) -> None:
        """No error if the file is missing. ``tidy``: delete its folder, too, if empty."""
        with _named(self.url):
            target = self._root / path
            target.unlink(missing_ok=True)
            if not tidy:
                return
            with contextlib.suppress(OSError):  # not empty
                target.parent.rmdir()
                target.parent.parent.rmdir()
            self._made.clear()

    def tidy(self) -> None:
        """Delete old temporary files, which killed writers left."""
        for path in list(self._temporary.iterdir()) if self._temporary.exists() else ():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _OLD:
                    path.unlink()


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        _make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Sync the names in a folder: after a power cut no save may lack its packs."""
    with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


@contextlib.contextmanager
def _named(url: str) -> Any:
    """Turn errors into StoreError, except for a missing file, which the caller explains."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"The store {url} failed: {error}") from error


class FsspecBlobs:
    """Any file system that fsspec knows. Retries failed calls a few times."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise SandboxUnavailable(
                f"The store {url} needs fsspec. Install it with: pip install 'sandbox-kernel[s3]'"
            ) from None
        self.url = url
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise SandboxUnavailable(
                f"The store {url} needs a package that is not installed: {error}"
            ) from error
        except ValueError as error:
            raise StoreError(f"The store {url} cannot be opened: {error}") from error
        self._root = root.rstrip("/")

    def _path(self, path: str) -> str:
        return posixpath.join(self._root, path)

    def _try(self, what: str, call: Callable[[], T]) -> T:
        pause = FIRST_PAUSE
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except FileNotFoundError:
                raise
            except Exception as error:  # each file system has its own errors
                if attempt == ATTEMPTS - 1 or isinstance(error, PermissionError):
                    raise StoreError(
                        f"The store {self.url} failed to {what}: {type(error).__name__}: {error}"
                    ) from error
            time.sleep(pause)
            pause *= 2
        raise AssertionError

    def get(self, path: str) -> bytes:
        return bytes(self._try(f"read {path}", lambda: self._fs.cat_file(self._path(path))))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        span = {"start": start, "end": start + length}
        return bytes(self._try(f"read {path}", lambda: self._fs.cat_file(self._path(path), **span)))

    def size(self, path: str) -> int:
        def look() -> int:
            self._fs.invalidate_cache()
            return int(self._fs.info(self._path(path))["size"])

        return self._try(f"look at {path}", look)

    def put(self, path: str, *parts: bytes | memoryview, lasting: bool = True) -> None:
        target, data = self._path(path), b"".join(parts)

        def write() -> None:
            self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
            self._fs.pipe_file(target, data)

        self._try(f"write {path}", write)

    def files(self, folder: str, kind: str = "file") -> dict[str, int]:
        def look() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            return list(self._fs.ls(self._path(folder), detail=True))

        found: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):
            found = self._try(f"list {folder}", look)
        return {
            posixpath.basename(one["name"].rstrip("/")): int(one.get("size") or 0)
            for one in found
            if one["type"] == kind
        }

    def names(self, folder: str) -> list[str]:
        return list(self.files(folder))

    def folders(self, folder: str) -> list[str]:
        return sorted(self.files(folder, "directory"))

    def delete(self, path: str, *, tidy: bool = True) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._try(f"delete {path}", lambda: self._fs.rm_file(self._path(path)))

    def tidy(self) -> None:
        """Nothing to do: these file systems write whole files."""


Blobs = LocalBlobs | FsspecBlobs


def open_blobs(url: str) -> Blobs:
    """A local folder for a plain path or ``file://``, else an fsspec file system."""
    url = url.removeprefix("file://")
    if "://" in url:
        return FsspecBlobs(url)
    return LocalBlobs(Path(url).expanduser().absolute())
