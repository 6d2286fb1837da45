"""A file system of its own for a jail's workspace and home, so that a full disk is an error there.

Used by ``Launch``. It lies in an image beside the jail's folders and is mounted in a namespace of
bubblewrap and the jail: it goes with them, and no mount or loop device is left behind. All of
its space is set aside at once: a sparse image would lose what is written when the host's disk is
full. It takes root, loop devices and e2fsprogs; without them, the jail sees plain folders, and the
watch in ``guest/jail/watchdog.py`` counts what they hold.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

NO_DISK_IMAGE = "SANDBOX_KERNEL_NO_DISK_IMAGE"
"""Environment variable: set to 1, no sandbox gets a file system of its own."""

MIB = 2**20
_SYS_ADMIN = 1 << 21
_TOOLS = ("unshare", "sh", "fallocate", "mke2fs", "mount", "rm")
_TOOL_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_LEFT_FREE = 1024 * MIB
"""What stays free on the host, at least; or a tenth of its free space, if that is more."""
_BYTES_PER_FILE = 4096
_JOURNAL_MIB = 4

# If any of it fails, the jail starts with the plain folders, which are what the image is made from.
_SCRIPT = f"""
image=$1 folder=$2 size=$3; shift 3
fallocate -l "$size" "$image" &&
mke2fs -q -F -t ext4 -b 4096 -i {_BYTES_PER_FILE} -m 0 -J size={_JOURNAL_MIB} -O ^resize_inode \\
  -E lazy_itable_init=1,lazy_journal_init=1,nodiscard -d "$folder" "$image" &&
mount -t ext4 -o loop,nosuid,nodev,noinit_itable "$image" "$folder" ||
rm -f "$image"
exec "$@"
"""


def why_not(folder: Path, size: int) -> str | None:
    """None if a file system of ``size`` bytes below ``folder`` may work, else why not."""
    if os.environ.get(NO_DISK_IMAGE, "") not in ("", "0"):
        return f"{NO_DISK_IMAGE} is set"
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if os.getuid() != 0 or not capabilities & _SYS_ADMIN:
        return "it takes root to mount one"
    if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
        return "there are no loop devices"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_TOOL_PATH) is None]
    if missing:
        return f"there is no {missing[0]} here (Debian: e2fsprogs, util-linux, mount)"
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free - _image_bytes(size) < max(_LEFT_FREE, free // 10):
        return f"the host has only {free // MIB} MiB left"
    return None


def with_image(command: Sequence[str], image: Path, folder: Path, size: int) -> list[str]:
    """The command, in a mount namespace in which ``folder`` is a file system that ``size`` bytes
    fit into, with a copy of what the folder holds. If it cannot be made, the folder is as it was;
    ``is_mounted`` tells."""
    unshare = shutil.which("unshare", path=_TOOL_PATH) or "unshare"
    shell = shutil.which("sh", path=_TOOL_PATH) or "sh"
    arguments = [str(image), str(folder), str(_image_bytes(size))]
    script = f"PATH={_TOOL_PATH}; export PATH\n{_SCRIPT}"
    return [unshare, "--mount", "--", shell, "-c", script, "sh", *arguments, *command]


def is_mounted(pid: int, folder: Path) -> bool:
    """Whether the process sees a file system of its own at ``folder``."""
    try:
        text = os.fsdecode(Path(f"/proc/{pid}/mountinfo").read_bytes())
    except OSError:
        return False
    # Blanks, line feeds and backslashes are written as octal numbers; all else is part of a name.
    fields = (line.split(" ") for line in text.split("\n") if line)
    points = (re.sub(r"\\([0-7]{3})", lambda o: chr(int(o[1], 8)), f[4]) for f in fields)
    return str(folder) in points


def _image_bytes(size: int) -> int:
    """With what ext4 takes for itself: inodes, journal, and a reserve that grows with it."""
    return size + size // 14 + min(size // 16, 16 * MIB) + 2 * _JOURNAL_MIB * MIB
