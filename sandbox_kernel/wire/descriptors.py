"""Descriptor passing: file descriptors that travel with bytes over a Unix socket (SCM_RIGHTS).

Not ``socket.recv_fds``: it ignores its flags, so what it receives is inherited by every program.
"""

import array
import os
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, List, Sequence, Tuple


def send_with_descriptors(sock: socket.socket, data: bytes, fds: "Sequence[int]" = ()) -> int:
    """Send ``data``, and the descriptors with its first byte. Return how many bytes were sent."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([data], rights)


def receive_with_descriptors(
    sock: socket.socket, size: int, most: int
) -> "Tuple[bytes, List[int]]":
    """Receive up to ``size`` bytes and the descriptors that came with them, ``most`` of them at
    most. The caller owns the descriptors; they are closed on exec."""
    fds = array.array("i")
    room = socket.CMSG_SPACE(most * fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist()


def close_all(fds: "Iterable[int]") -> None:
    for fd in fds:
        os.close(fd)
