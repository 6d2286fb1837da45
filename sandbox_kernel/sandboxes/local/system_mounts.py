"""The system that every jail sees: the host's programs, libraries and the settings that they need,
and in place of the host's own files those that tell about the jail's user and size.

``free`` and psutil read /proc/meminfo; ``lscpu`` and others /proc/cpuinfo; and libc counts CPUs
(``os.cpu_count()``) by /sys/devices/system/cpu/online.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from sandbox_kernel.sandboxes.local.hidden_paths import SETTINGS, STORES, SYSTEM_FOLDERS, covers
from sandbox_kernel.sandboxes.local.mounts import Bind, Mount, Symlink

UID = GID = 1000
"""Who everything in the jail runs as, as seen from inside."""
USER = "sandbox"
HOME = "/home/sandbox"
_CPUS_ONLINE = "/sys/devices/system/cpu/online"


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


def write_identity(folder: Path, hostname: str, *, resolver: bool = False) -> list[Bind]:
    """Write the jail's own /etc/passwd, /etc/group and /etc/hosts into ``folder``, which the jail
    must not be able to write, and return their binds. ``resolver``: the agent answers for names."""
    files = {
        "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"{USER}:x:{UID}:{GID}:{USER}:{HOME}:/bin/sh\n"
        f"nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
        "group": f"root:x:0:\n{USER}:x:{GID}:\nnogroup:x:65534:\n",
        "hosts": f"127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost {hostname}\n",
    }
    if resolver:
        files["resolv.conf"] = "nameserver 127.0.0.1\noptions timeout:15 attempts:1\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [Bind(str(folder / name), f"/etc/{name}") for name in files]


def write_size(folder: Path, memory: int, cpus: Collection[int] | None) -> tuple[Path, list[Bind]]:
    """Write the files to ``folder``. The one for memory, which jailinit keeps up to date, and where
    in the jail each is seen. ``cpus`` of None: all, so the host's figures are right."""
    from sandbox_kernel.guest.jail.meminfo import meminfo  # lazy: start-up time

    shown = {"/proc/meminfo": ("meminfo", meminfo(memory, 0))}
    if cpus is not None:
        shown["/proc/cpuinfo"] = ("cpuinfo", "\n".join(_blocks(cpus)).encode())
        shown[_CPUS_ONLINE] = ("online", ",".join(map(str, sorted(cpus))).encode() + b"\n")
    binds = []
    for target, (name, content) in shown.items():
        (folder / name).write_bytes(content)
        binds.append(Bind(str(folder / name), target))
    return folder / "meminfo", binds


def _blocks(cpus: Collection[int]) -> Iterator[str]:
    """The host's /proc/cpuinfo without the CPUs that are none of ``cpus``."""
    for block in Path("/proc/cpuinfo").read_text().rstrip("\n").split("\n\n"):
        name, _, number = block.partition("\n")[0].partition(":")
        if name.strip() != "processor" or int(number) in cpus:
            yield f"{block}\n"
