"""What a jail gets in a machine with systemd: run there by ``__main__.py``, as several users.

The argument is a part of the path of the cgroup that is expected, or ``none``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.sandboxes.local.cgroup import Cgroup
from sandbox_kernel.sandboxes.local.limits import MIB
from sandbox_kernel.spec import SandboxSpec
from tests.local.hogs import BOMB, HOG

PATIENCE = 300.0


async def limited(client: LocalClient, expected: str) -> None:
    """All limits are in force, and stay so when systemd is told to reload."""
    spec = SandboxSpec(memory_mib=128, processes=40, cpus=0.5, start_timeout=PATIENCE)
    handle = await client.create(spec)
    try:
        await handle.spawn(["sleep", "1000"])
        made = Cgroup.from_json(handle._record.data["cgroup"])
        assert made is not None
        folder = Path(made.folders["memory"])
        assert expected in str(folder), folder
        assert folder.suffix == ".scope"
        managers = ["--system"] if os.getuid() == 0 else ["--user"]
        subprocess.run(["systemctl", *managers, "daemon-reload"], check=True)
        assert (folder / "memory.max").read_text() == f"{128 * MIB}\n"
        assert (folder / "pids.max").read_text() == "40\n"
        assert (folder / "cpu.max").read_text() == "50000 100000\n"
        assert not handle.weaknesses
        assert (await handle.exec("python3", ["-c", HOG], timeout=PATIENCE)).exit_code == -9
        info = await handle.info()
        assert info.last_kill.startswith("out of memory: 'python3' used")
        assert (info.status, info.oom_kills, info.detail["processes"]) == ("running", 1, 1)
        bomb = await handle.exec("python3", ["-c", BOMB], timeout=PATIENCE)
        assert bomb.stdout.startswith("refused ")
        info = await handle.info()
        assert (info.status, info.oom_kills) == ("running", 1)
    finally:
        await client.remove(handle.name)


async def unlimited(client: LocalClient) -> None:
    """No cgroup, and the jail says so."""
    handle = await client.create(SandboxSpec(start_timeout=PATIENCE))
    try:
        assert handle._record.data["cgroup"] is None
        assert "no cgroup can be made here" in " ".join(handle.weaknesses)
    finally:
        await client.remove(handle.name)


def main(expected: str) -> None:
    own = Path("/proc/self/cgroup").read_text().strip()
    print(f"uid {os.getuid()} in {own}: expects {expected}", flush=True)
    client = LocalClient()
    asyncio.run(unlimited(client) if expected == "none" else limited(client, expected))


if __name__ == "__main__":
    main(sys.argv[1])
