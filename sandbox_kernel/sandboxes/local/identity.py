"""The user inside a jail."""

from __future__ import annotations

from pathlib import Path

from sandbox_kernel.sandboxes.local.mounts import Bind

UID = GID = 1000
"""Who everything in the jail runs as, as seen from inside."""
USER = "sandbox"
HOME = "/home/sandbox"


def write_identity(folder: Path, hostname: str = "sandbox") -> list[Bind]:
    """Write the jail's own /etc/passwd, /etc/group and /etc/hosts into ``folder``, which the jail
    must not be able to write, and return their binds."""
    files = {
        "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"{USER}:x:{UID}:{GID}:{USER}:{HOME}:/bin/sh\n"
        f"nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
        "group": f"root:x:0:\n{USER}:x:{GID}:\nnogroup:x:65534:\n",
        "hosts": f"127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost {hostname}\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [Bind(str(folder / name), f"/etc/{name}") for name in files]
