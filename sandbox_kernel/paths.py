"""Where sandbox-kernel keeps its files on the host.

All folders have mode 0700 and must belong to this user: they hold session tokens, and sockets
through which one can run code in the sandboxes.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from sandbox_kernel.errors import SandboxError


def data_dir() -> Path:
    """Permanent files: records of live sandboxes, their folders, workspaces.

    ``$SANDBOX_KERNEL_DATA_DIR``, else a folder in Jupyter's data directory.
    """
    override = os.environ.get("SANDBOX_KERNEL_DATA_DIR")
    if override:
        return private_dir(Path(override).absolute())
    from jupyter_core.paths import jupyter_data_dir

    return private_dir(Path(jupyter_data_dir()) / "sandbox-kernel")


def runtime_dir() -> Path:
    """Sockets. Short, because a Unix socket's path has at most 107 bytes.

    ``$SANDBOX_KERNEL_RUNTIME_DIR``, else a folder of this user in the system's temporary
    directory. ``$XDG_RUNTIME_DIR`` is the second choice, if another user has taken that name: it is
    deleted when the user logs out, while servers in tmux and sandboxes continue.
    """
    override = os.environ.get("SANDBOX_KERNEL_RUNTIME_DIR")
    if override:
        return private_dir(Path(override).absolute())
    usual = Path(tempfile.gettempdir()) / f"sandbox-kernel-{os.getuid()}"
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    try:
        return private_dir(usual)
    except SandboxError:
        if xdg and os.access(xdg, os.W_OK):
            return private_dir(Path(xdg) / "sandbox-kernel")
        raise


def private_dir(path: Path) -> Path:
    """Make ``path`` a folder that only this user can use. SandboxError if it cannot be, or is
    another's."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if _is_ours(found) and stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise SandboxError(
            f"{path} cannot be used: {error.strerror}. Set SANDBOX_KERNEL_DATA_DIR or "
            f"SANDBOX_KERNEL_RUNTIME_DIR to another folder."
        ) from error
    if not _is_ours(found):
        raise SandboxError(
            f"{path} is not a folder of this user's, so sockets and tokens are not safe in it. "
            f"Remove it, or set SANDBOX_KERNEL_DATA_DIR or SANDBOX_KERNEL_RUNTIME_DIR to another "
            f"folder."
        )
    return path


def _is_ours(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
