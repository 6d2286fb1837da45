"""What a provider's sandboxes reach by the provider's own network, and the provider's rules for it.

The jails that stand for sandboxes have an empty network of their own. If the rules let anything
out, the emulator puts an "internet" into that network from outside: addresses at which it listens
itself. It reads the head of each request there, decides by the address that is dialled and the host
that is named, and answers or breaks the connection off. If the rules let nothing out, there is not
even a route.

A sandbox is a machine of its own, so its root may listen at any port, and write /etc/resolv.conf; a
provider whose commands are not root is emulated by ``root=False``.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Callable

ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""They answer at port 80 and 443, where there is a network."""
_PORTS = (80, 443)
_TIMEOUT = 30.0
_HOST = re.compile(rb"\r\nhost: *([^\r:]+)", re.IGNORECASE)
_REQUEST = re.compile(rb"([A-Z]+) (/[^ ]*) ")
_PROGRAM = """
import array, ctypes, fcntl, os, socket, struct, sys
NEW_USER, NEW_NET, GET_OWNER, SET_ADDRESS, SET_MASK = 0x10000000, 0x40000000, 0xB701, 0x8916, 0x891C
pid, root, channel, ports, *addresses = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
space = os.open("/proc/%s/ns/net" % pid, os.O_RDONLY)
for fd, kind in ((fcntl.ioctl(space, GET_OWNER), NEW_USER), (space, NEW_NET)):
    if libc.setns(fd, kind):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
if root == "root":
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w") as setting:
        setting.write("0")
listeners = []
for number, address in enumerate(addresses):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as configured:
        for request, value in ((SET_ADDRESS, address), (SET_MASK, "255.255.255.255")):
            name = b"lo:%d" % number
            packed = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(configured, request, packed)
    listeners += [socket.create_server((address, int(port))) for port in ports.split(",")]
if listeners:
    with socket.socket(fileno=int(channel)) as given:
        socket.send_fds(given, [b"."], [listener.fileno() for listener in listeners])
"""

Decide = Callable[[str, str, str, str], bool]
"""Whether an address may be reached, with this host name (or none), method and path."""


class Outside:
    """One sandbox's network, from the provider's side."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []

    async def connect(self, pid: int, decide: Decide | None, *, root: bool) -> None:
        """Set up the network of the jail with this process; without ``decide`` there is none."""
        sockets = await asyncio.to_thread(_enter, pid, ADDRESSES if decide else (), root)
        for one in sockets:
            assert decide is not None
            self._servers.append(await asyncio.start_server(_Answers(decide).serve, sock=one))

    def close(self) -> None:
        for server in self._servers:
            server.close()


class _Answers:
    def __init__(self, decide: Decide) -> None:
        self._decide = decide

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        try:
            async with asyncio.timeout(_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
            request, named = _REQUEST.match(head), _HOST.search(head)
            assert request is not None
            method, path = request[1].decode(), request[2].decode()
            name = named[1].decode() if named else ""
            if self._decide(address, name, method, path):
                writer.write(b"HTTP/1.0 200 OK\r\n\r\nby the provider's network")
                await writer.drain()
                writer.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # it is no request, or nobody waits for the answer
        finally:
            if not writer.is_closing():
                writer.transport.abort()


def _enter(pid: int, addresses: tuple[str, ...], root: bool) -> list[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ports = ",".join(map(str, _PORTS))
        words = [str(pid), "root" if root else "user", str(theirs.fileno()), ports, *addresses]
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *words],
            check=True,
            timeout=_TIMEOUT,
            pass_fds=[theirs.fileno()],
        )
        if not addresses:
            return []
        _, fds, _, _ = socket.recv_fds(ours, 1, len(addresses) * len(_PORTS))
    return [socket.socket(fileno=fd) for fd in fds]
