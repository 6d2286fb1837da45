"""The two sides of a command's streams: one for the host, one to hand over."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_SOCKET_BUFFER = 2**20


@contextlib.contextmanager
def stream_ends(
    *, duplex: bool, terminal: bool = False
) -> Iterator[tuple[list[int], list[int | socket.socket]]]:
    """The ends to hand over, and ours: of a socket, or of three pipes (stdin, stdout, stderr). A
    terminal has none yet: the far side makes it.

    Those to hand over are closed here in any case, because the far side gets copies; ours are
    closed unless the caller takes them out of the list.
    """
    theirs: list[int] = []
    ours: list[int | socket.socket] = []
    try:
        if terminal:
            pass
        elif duplex:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            near.setblocking(False)
            for sock in (near, far):
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
