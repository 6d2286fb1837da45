"""Endpoints: local listening sockets; each connection becomes one stream to the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.paths import private_dir
from sandbox_kernel.wire.mux import INITIAL_WINDOW, INTERACTIVE, OUTPUT, URGENT
from sandbox_kernel.wire.peer import Peer
from sandbox_kernel.wire.pump import Pump

PRIORITY = {
    **{"control": URGENT, "hb": URGENT},
    **{"shell": INTERACTIVE, "stdin": INTERACTIVE},
    "iopub": OUTPUT,
}
"""Priority of the streams of each kernel channel."""

Address = str | tuple[str, int]
"""Path of a Unix socket, or IP address and port."""

MAX_UNIX_PATH = 107
ACCEPT_PAUSE = 1.0

log = logging.getLogger("sandbox_kernel.tunnel")


class Endpoint:
    """One listening socket. ``on_input`` is called whenever a client sends something. ``hand_over``
    may take a client's connection; it returns whether it did."""

    def __init__(
        self,
        peer: Peer,
        sandbox: str,
        address: Address,
        target: str,
        priority: int,
        on_input: Callable[[], object] | None = None,
        hand_over: Callable[[socket.socket], bool] = lambda connection: False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._sandbox = sandbox
        self._priority = priority
        self._on_input = on_input
        self._hand_over = hand_over
        self.target = target
        self.pumps: set[Pump] = set()
        """One for each connection."""
        self.address = address
        self._start_listening(_listen(address))

    @property
    def deleted(self) -> bool:
        """Has somebody deleted the socket, and put nothing in its place?"""
        return isinstance(self.address, str) and not os.path.lexists(self.address)

    def renew(self) -> None:
        """Listen again if the socket was removed; connections go on. SandboxError if that fails."""
        if not isinstance(self.address, str) or self._owns(self.address):
            return
        try:
            private_dir(Path(self.address).parent)
        except OSError as error:
            raise SandboxError(f"Cannot make the folder of {self.address}: {error}") from None
        listener = _listen(self.address)
        self._stop_listening()
        self._start_listening(listener)

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        if self._listener.fileno() >= 0:
            self._stop_listening()
            if isinstance(self.address, str) and self._owns(self.address):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.address)
        for pump in list(self.pumps):
            pump.close("the endpoint was closed")

    def _start_listening(self, listener: socket.socket) -> None:
        self._listener = listener
        self._inode = os.stat(self.address).st_ino if isinstance(self.address, str) else 0
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_listening(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _owns(self, path: str) -> bool:
        """Is the socket at this path still ours?"""
        try:
            return os.stat(path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _accept(self) -> None:
        if not self._peer.session.room:
            # The sandbox is out of reach, and clients that come and go must not fill the memory.
            return self._pause()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptor or memory is left, and trying again at once would not help.
            who = f"A client of sandbox {self._sandbox} ({self.target})"
            log.warning("%s must wait at %s: %s", who, self.address, error)
            return self._pause()
        if self._hand_over(connection):
            return
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A larger window gains nothing within one machine, and when a cell is interrupted, the
        # client reads all output that is under way before it sees the end.
        local = self._priority == OUTPUT and not self._peer.session.checked
        window = INITIAL_WINDOW if local else 0
        stream = self._peer.mux.open(self.target, self._priority, window)
        own = (self._loop, self._peer, stream, connection)
        self.pumps.add(Pump(*own, self.pumps.discard, self._on_input, widest=window))
        self._peer.flush_soon()

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE, self._listen_again)

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)


def _listen(address: Address) -> socket.socket:
    if isinstance(address, str) and len(os.fsencode(address)) > MAX_UNIX_PATH:
        raise SandboxError(
            f"The socket path {address} is longer than {MAX_UNIX_PATH} bytes. Set "
            f"SANDBOX_KERNEL_RUNTIME_DIR to a folder with a short path."
        )
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(address, str):
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
        raise SandboxError(f"Cannot listen on {address} for kernel clients: {error}") from error
    return listener
