"""Endpoints: local listening sockets; each connection becomes one stream to the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.guest.peer import Peer
from sandbox_kernel.guest.pump import Pump
from sandbox_kernel.guest.wire.mux import INTERACTIVE, OUTPUT, URGENT

PRIORITY = {
    "control": URGENT,
    "hb": URGENT,
    "shell": INTERACTIVE,
    "stdin": INTERACTIVE,
    "iopub": OUTPUT,
}
"""The kernel's channels, each with the priority of its streams."""

MAX_UNIX_PATH = 107
ACCEPT_PAUSE = 1.0

log = logging.getLogger("sandbox_kernel.tunnel")


class Endpoint:
    """One listening socket. ``address`` is the path of a Unix socket, or (ip, port) for TCP.
    ``on_input`` is called whenever a client has sent something."""

    def __init__(
        self,
        peer: Peer,
        address: str | tuple[str, int],
        target: str,
        priority: int,
        on_input: Callable[[], object] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._target = target
        self._priority = priority
        self._on_input = on_input
        self._pumps: set[Pump] = set()
        self.address = address
        self._start_listening()

    def renew(self) -> None:
        """Listen again, if somebody has removed the socket. Connections go on."""
        if isinstance(self.address, str) and not self._owns(self.address):
            self._stop_listening()
            self._start_listening()

    @property
    def connections(self) -> int:
        return len(self._pumps)

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        if self._listener.fileno() >= 0:
            self._stop_listening()
            if isinstance(self.address, str) and self._owns(self.address):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.address)
        for pump in list(self._pumps):
            pump.close("the endpoint was closed")

    def _start_listening(self) -> None:
        self._listener = _listen(self.address)
        self._inode = os.stat(self.address).st_ino if isinstance(self.address, str) else 0
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_listening(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _owns(self, path: str) -> bool:
        """Not if somebody has taken this path over since."""
        try:
            return os.stat(path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _accept(self) -> None:
        if not self._peer.session.room:
            # The sandbox has been out of reach for long. Clients that come and go meanwhile must
            # not fill the memory.
            return self._pause()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptor or memory is left for it. The client waits; asking at once again and
            # again would not help it.
            log.warning("A client of %s must wait: %s", self._target, error)
            return self._pause()
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = self._peer.mux.open(self._target, self._priority)
        self._pumps.add(
            Pump(self._loop, self._peer, stream, connection, self._pumps.discard, self._on_input)
        )
        self._peer.flush_soon()

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE, self._listen_again)

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)


def _listen(address: str | tuple[str, int]) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(address, str):
            if len(os.fsencode(address)) > MAX_UNIX_PATH:
                raise SandboxError(
                    f"The socket path {address} is longer than {MAX_UNIX_PATH} bytes. Set "
                    f"SANDBOX_KERNEL_RUNTIME_DIR to a folder with a short path."
                )
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(address).st_mode):
                    os.unlink(address)  # left behind by a process that died
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SandboxError(
            f"Cannot listen on {address} for the kernel's clients: {error}"
        ) from error
    except SandboxError:
        listener.close()
        raise
    return listener
