"""A jail's processes, seen from the host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from sandbox_kernel.jupyter.connections import addresses
from sandbox_kernel.tunnel.background import submit
from tests.kernels.live import Live


def processes_of(live: Live) -> dict[int, str]:
    """The host's pids of all processes in a kernel's jail, with their command lines."""
    first = submit(live.kernel.handle.info()).result(30).detail["pid"]
    parents, commands = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile
        parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
        commands[int(entry.name)] = command
    inside = {first}
    while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= more
    return {pid: commands[pid] for pid in inside if pid in commands}


def kernel_of(live: Live) -> int:
    """The host's pid of the kernel, which is the last word of its line NSpid."""
    for pid in processes_of(live):
        status = Path(f"/proc/{pid}/status").read_text()
        if status.partition("NSpid:")[2].splitlines()[0].split()[-1] == str(live.kernel.pid):
            return pid
    raise AssertionError("the kernel has no process")


def agent_of(live: Live) -> int:
    """The agent is the kernel's parent."""
    stat = Path(f"/proc/{kernel_of(live)}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def clients(live: Live, number: int) -> list[socket.socket]:
    """Unconnected sockets for the kernel's shell endpoint."""
    return [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(number)]


def path_of(live: Live, channel: str = "shell") -> str:
    return str(addresses(live.manager.get_connection_info())[channel])
