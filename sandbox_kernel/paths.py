"""Where sandbox-kernel keeps its files on the host.

All folders are made with mode 0700 and must belong to this user: they hold session tokens and
sockets through which code can be run in the sandboxes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel.errors import SandboxError


def data_dir() -> Path:
    """Lasting files: records of live sandboxes, their folders, workspaces.

    ``$SANDBOX_KERNEL_DATA_DIR``, else a folder in Jupyter's data directory.
    """
    override = os.environ.get("SANDBOX_KERNEL_DATA_DIR")
    if override:
        return private_dir(Path(override).absolute())
    from jupyter_core.paths import jupyter_data_dir

    return private_dir(Path(jupyter_data_dir()) / "sandbox-kernel")


def runtime_dir() -> Path:
    """Sockets. Short, because a Unix socket's path has at most 107 bytes.

    ``$SANDBOX_KERNEL_RUNTIME_DIR``, else a folder of this user's in the system's temporary
    directory. Not in ``$XDG_RUNTIME_DIR``, which is deleted when the user logs out, while servers
    in tmux and sandboxes go on; unless somebody else has that name in the temporary directory.
    """
    override = os.environ.get("SANDBOX_KERNEL_RUNTIME_DIR")
    if override:
        return private_dir(Path(override).absolute())
    usual = Path(tempfile.gettempdir()) / f"sandbox-kernel-{os.getuid()}"
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    try:
        return private_dir(usual)
    except (SandboxError, FileExistsError):
        if xdg and os.access(xdg, os.W_OK):
            return private_dir(Path(xdg) / "sandbox-kernel")
        raise


def private_dir(path: Path) -> Path:
    """Make sure that ``path`` is a folder that only this user can use."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SandboxError(
            f"{path} is not a folder of this user's, so it cannot be trusted with sockets and "
            f"tokens. Remove it, or set SANDBOX_KERNEL_DATA_DIR or SANDBOX_KERNEL_RUNTIME_DIR "
            f"to another place."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


@contextlib.contextmanager
def beside(path: Path, content: str) -> Iterator[str]:
    """A temporary file (mode 0600) with this content in the folder of ``path``, to become it."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(fd, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_atomically(path: Path, content: str) -> None:
    """Replace a file: whoever reads it, also after a crash, finds the old one or the new one."""
    with beside(path, content) as temporary:
        os.replace(temporary, path)
