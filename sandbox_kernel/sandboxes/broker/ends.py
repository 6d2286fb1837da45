"""The two sides of a command's streams, of which the broker gets one."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_SOCKET_BUFFER = 2**20


@contextlib.contextmanager
def stream_ends(*, duplex: bool) -> Iterator[tuple[list[int], list[int | socket.socket]]]:
    """The broker's ends and ours: of a socket, or of three pipes (stdin, stdout, stderr).

    The broker's are closed here in any case, because it gets copies; ours are closed unless the
    caller takes them out of the list.
    """
    theirs: list[int] = []
    ours: list[int | socket.socket] = []
    try:
        if duplex:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            for sock in (near, far):
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
            ours.append(near)
            theirs.append(far.detach())
        else:
            for number in range(3):
                read, write = os.pipe()
                ours.append(write if number == 0 else read)
                theirs.append(read if number == 0 else write)
        yield theirs, ours
    finally:
        for end in [*theirs, *ours]:
            end.close() if isinstance(end, socket.socket) else os.close(end)
