"""What every jail sees of the host's system: programs, libraries and the settings they need."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import stat
from collections.abc import Iterator

from sandbox_kernel.sandboxes.local.hidden_paths import SETTINGS, STORES, SYSTEM_FOLDERS, covers
from sandbox_kernel.sandboxes.local.mounts import Bind, Mount, Symlink


def system_binds() -> list[Mount]:
    """The system's programs and libraries, and the settings that they need; no secrets."""
    mounts: list[Mount] = []
    for name in SYSTEM_FOLDERS:
        path = f"/{name}"
        if os.path.islink(path):
            mounts.append(Symlink(os.readlink(path), path))
        elif os.path.isdir(path):
            mounts.append(Bind(path, path))
    mounts += [Bind(store, store) for store in STORES if os.path.isdir(store)]
    mounts += [_setting(path) for path in _settings()]
    mounts += [c for place in ("/usr", "/usr/local") for c in covers(place, is_prefix=True)]
    return mounts


def _settings() -> Iterator[str]:
    try:
        names = sorted(os.listdir("/etc"))
    except OSError:
        return
    for pattern in " ".join(SETTINGS.values()).split():
        nested = "/" in pattern
        for name in (pattern,) if nested else fnmatch.filter(names, pattern):
            path = f"/etc/{name}"
            # A jail that root started could read what only root may read.
            with contextlib.suppress(OSError):
                if os.stat(path).st_mode & stat.S_IROTH:
                    yield path


def _setting(path: str) -> Mount:
    real = os.path.realpath(path)
    if os.path.islink(path) and real.startswith("/usr/"):
        return Symlink(real, path)
    return Bind(real, path)
