"""Lets everything in a jail listen at ports below 1024 of the jail's own, empty network.

A program that ignores proxies dials the ports of its protocol, so the agent must listen there. The
right to is that of whoever has made the jail's network namespace: the host's user. The jail itself
has given up every right, so this is done from outside, by a process of its own: only one with a
single thread can enter a namespace.
"""

from __future__ import annotations

import subprocess
import sys

from sandbox_kernel.host_programs import run_program

_TIMEOUT = 10.0
_PROGRAM = """
import ctypes, fcntl, os, sys
NEW_USER, NEW_NET, GET_OWNER = 0x10000000, 0x40000000, 0xB701
libc = ctypes.CDLL(None, use_errno=True)
network = os.open("/proc/%s/ns/net" % sys.argv[1], os.O_RDONLY)
for fd, kind in ((fcntl.ioctl(network, GET_OWNER), NEW_USER), (network, NEW_NET)):
    if libc.setns(fd, kind):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w") as setting:
    setting.write("0")
"""


def allow(pid: int) -> str | None:
    """Allow it in the jail of this process. None, or why that is not possible here. Blocks."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(pid)]
    try:
        ran = run_program(command, _TIMEOUT, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ran.stderr.strip().rpartition("\n")[2] if ran.returncode else None
