"""Files that tell a jail its own size where Linux would tell the host's.

Used by ``Launch``. ``free`` and psutil read /proc/meminfo; ``lscpu`` and others /proc/cpuinfo; and
libc counts CPUs (``os.cpu_count()``) by /sys/devices/system/cpu/online.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from sandbox_kernel.guest.jail.meminfo import meminfo
from sandbox_kernel.sandboxes.local.mounts import Bind

MEMINFO = "meminfo"
_CPUS_ONLINE = "/sys/devices/system/cpu/online"


def write(folder: Path, memory: int, cpus: Collection[int] | None) -> tuple[Path, list[Bind]]:
    """Write the files to ``folder``. The one for memory, which jailinit keeps up to date, and where
    in the jail each is seen. ``cpus`` of None: all, so the host's figures are right."""
    shown = {"/proc/meminfo": (MEMINFO, meminfo(memory, 0))}
    if cpus is not None:
        shown["/proc/cpuinfo"] = ("cpuinfo", "\n".join(_blocks(cpus)).encode())
        shown[_CPUS_ONLINE] = ("online", ",".join(map(str, sorted(cpus))).encode() + b"\n")
    binds = []
    for target, (name, content) in shown.items():
        (folder / name).write_bytes(content)
        binds.append(Bind(str(folder / name), target))
    return folder / MEMINFO, binds


def _blocks(cpus: Collection[int]) -> Iterator[str]:
    """The host's /proc/cpuinfo without the CPUs that are none of ``cpus``."""
    for block in Path("/proc/cpuinfo").read_text().rstrip("\n").split("\n\n"):
        name, _, number = block.partition("\n")[0].partition(":")
        if name.strip() != "processor" or int(number) in cpus:
            yield f"{block}\n"
