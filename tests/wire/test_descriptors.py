"""Descriptor passing over Unix sockets."""

from __future__ import annotations

import os
import socket

from sandbox_kernel.wire.descriptors import (
    close_all,
    receive_with_descriptors,
    send_with_descriptors,
)


def test_descriptors_travel_with_the_bytes() -> None:
    """The received ones are the same files under new numbers, and are closed on exec."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        read, write = os.pipe()
        assert send_with_descriptors(ours, b"two", [read, write]) == 3
        data, fds = receive_with_descriptors(theirs, 100, 2)
        close_all([read, write])
        assert data == b"two"
        assert not any(map(os.get_inheritable, fds))
        os.write(fds[1], b"x")
        assert os.read(fds[0], 10) == b"x"
        close_all(fds)


def test_bytes_without_descriptors_and_descriptors_without_room() -> None:
    """Neither is an error; what does not fit is closed by the kernel."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_with_descriptors(ours, b"none")
        assert receive_with_descriptors(theirs, 100, 2) == (b"none", [])
        send_with_descriptors(ours, b"three", [0, 1, 2])
        data, fds = receive_with_descriptors(theirs, 100, 1)
        close_all(fds)
        assert data == b"three"
        assert len(fds) < 3
