"""The trash folder of an export: host files that it replaced or deleted.

    .sandbox-kernel-trash/<time>/replaced/<path>    files that were overwritten
    .sandbox-kernel-trash/<time>/deleted/<path>     files that the sandbox had made and deleted

The name is reserved, so the folder is never uploaded and no sandbox can write it. Replaced files
stay until the user deletes them. Deleted files are also in the workspace's history, so only the
newest are kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time

from sandbox_kernel.guest.workspace.nofollow import CREATE, FOLDER, Root, closing_fd, remove
from sandbox_kernel.guest.workspace.tree_format import RESERVED, path_parts

TRASH = f"{RESERVED}trash"
REPLACED, DELETED = b"replaced", b"deleted"
MOST_DELETED = 2**30
"""Bytes; the newest batch is always kept."""
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)


class Trash:
    """The trash of one export. Not thread-safe; ``close`` it."""

    def __init__(self, folder: int, path: str) -> None:
        """``folder`` is a descriptor of the export's folder, ``path`` its name."""
        self._root = Root(os.dup(folder))
        self._path = path
        stamp = time.strftime("%Y%m%dt%H%M%S", time.gmtime())
        self._batch = [TRASH.encode(), f"{stamp}-{secrets.token_hex(3)}".encode()]
        self.used = False

    @property
    def path(self) -> str:
        """The folder of this batch; empty if nothing was moved."""
        return os.path.join(self._path, *map(os.fsdecode, self._batch)) if self.used else ""

    def close(self) -> None:
        self._root.close()

    def put(self, kind: bytes, folder: int, path: str) -> None:
        """Move a file here from the descriptor ``folder``. One to be REPLACED stays in its place
        until it is overwritten, if hard links are possible."""
        *parents, name = path_parts(path)
        here = self._root.folder([*self._batch, kind, *parents], make=0o700)
        if not self.used:
            self.used = True
            self._hide_from_git()
            here = self._root.folder([*self._batch, kind, *parents])
        try:
            _move(folder, name, here, leave=kind == REPLACED)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            beside = Root(os.dup(folder))  # another file system: use a trash folder on it
            try:
                here = beside.folder([*self._batch, kind], make=0o700)
                _move(folder, name, here, leave=kind == REPLACED)
            finally:
                beside.close()

    def _hide_from_git(self) -> None:
        with contextlib.suppress(FileExistsError):
            parent = self._root.folder(self._batch[:1])
            fd = os.open(b".gitignore", CREATE, 0o600, dir_fd=parent)
            with os.fdopen(fd, "w") as file:
                file.write("*\n")

    def tidy(self) -> None:
        """Delete the oldest deleted files beyond the limit."""
        if not self.used:
            return
        top = self._root.folder(self._batch[:1])
        left = MOST_DELETED
        for number, batch in enumerate(sorted(os.listdir(top), reverse=True)):
            try:
                fd = os.open(batch, FOLDER, dir_fd=top)
            except NotADirectoryError:
                continue
            with closing_fd(fd):
                left -= _allocated(fd, DELETED)
                if left < 0 and number > 0:
                    remove(fd, DELETED)
            with contextlib.suppress(OSError):
                os.rmdir(batch, dir_fd=top)  # if empty


def _move(source: int, name: bytes, target: int, *, leave: bool) -> None:
    if leave:
        try:
            os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)


def _allocated(folder: int, name: bytes) -> int:
    """Bytes on disk below an entry of a folder; 0 if it is missing."""
    try:
        fd = os.open(name, FOLDER, dir_fd=folder)
    except FileNotFoundError:
        return 0
    total = 0
    with closing_fd(fd):
        for _, _, files, here in os.fwalk(b".", dir_fd=fd, follow_symlinks=False):
            for file in files:
                total += os.stat(file, dir_fd=here, follow_symlinks=False).st_blocks * 512
    return total
