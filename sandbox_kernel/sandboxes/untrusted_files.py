"""Files that a sandbox had a hand in: reading them with bounds, and deleting them."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
from pathlib import Path

from sandbox_kernel.untrusted_text import printable

_MAX_READ = 2**20


def read_tail(path: Path, limit: int = _MAX_READ) -> str:
    """The end of a file that the sandbox had a hand in, without what could drive a terminal."""
    return printable(read_end(path, limit))


def read_end(path: Path, limit: int = _MAX_READ) -> str:
    """The end of such a file as it stands there. Empty if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            return file.read(limit).decode(errors="replace")
    except FileNotFoundError:
        return ""


def remove_tree(root: Path) -> None:
    """Delete a folder that hostile code has filled; its processes must have ended.

    No symlink is followed, folders without permissions are opened up, and any depth works: sub-
    folders are moved to the top before they are emptied, so two descriptors are enough.
    """
    try:
        top = _open_folder(root)
    except FileNotFoundError:
        return
    token = secrets.token_hex(8)
    names = (f".{token}-{number}" for number in itertools.count())
    try:
        while pending := _empty(top):
            for name in pending:
                # Missing if another process deletes the same folder.
                with contextlib.suppress(FileNotFoundError):
                    inner = _open_folder(name, top)
                    try:
                        for sub in _empty(inner):
                            os.chmod(sub, stat.S_IRWXU, dir_fd=inner)
                            os.rename(sub, next(names), src_dir_fd=inner, dst_dir_fd=top)
                    finally:
                        os.close(inner)
                    os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(root)


def _open_folder(path: str | Path, parent: int | None = None) -> int:
    os.chmod(path, stat.S_IRWXU, dir_fd=parent)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, dir_fd=parent)


def _empty(folder: int) -> list[str]:
    """Delete all but the folders in a folder, and name those."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=folder)
    return folders
