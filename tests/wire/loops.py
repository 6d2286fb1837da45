"""The two event loops that the shells run on, behind one way to drive them in a test."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

from sandbox_kernel.guest.loop import Loop
from sandbox_kernel.wire.codec import RAW
from sandbox_kernel.wire.fdlink import FdLink
from sandbox_kernel.wire.peer import Peer
from tests.wire.sides import shaken_hands

LIMIT = 60.0
LOOPS = ["guest", "asyncio"]


class Driver:
    """``loop`` is either loop; exceptions of callbacks are collected in ``errors``."""

    def __init__(self, kind: str) -> None:
        self.errors: list[BaseException] = []
        self.loop: Any
        if kind == "guest":
            self.loop = Loop()
            self.loop.on_error = self.errors.append
        else:
            self.loop = asyncio.new_event_loop()
            self.loop.set_exception_handler(
                lambda _, context: self.errors.append(context.get("exception"))
            )

    def turn(self) -> None:
        """One turn of the loop, which waits for a moment at most."""
        if isinstance(self.loop, Loop):
            self.loop.call_later(0.01, lambda: None)
            self.loop._turn()
        else:
            self.loop.call_later(0.01, self.loop.stop)
            self.loop.call_soon(self.loop.call_soon, self.loop.stop)
            self.loop.run_forever()

    def until(self, condition: Callable[[], object], what: str = "", limit: float = LIMIT) -> None:
        """Run the loop until the condition holds; it must within ``limit`` seconds."""
        deadline = self.loop.time() + limit
        while not condition():
            assert self.loop.time() < deadline, what or "timed out"
            self.turn()
            assert self.errors == []

    def settle(self, turns: int = 20) -> None:
        """Let everything happen that can."""
        for _ in range(turns):
            self.turn()
        assert self.errors == []

    def close(self) -> None:
        self.loop.close()


class Pair:
    """A host and a guest, each a Peer, with a socketpair between them that can be replaced."""

    def __init__(self, driver: Driver, codec: str = RAW) -> None:
        self.driver = driver
        self.codec = codec
        self.host = Peer(driver.loop, host=True)
        self.guest = Peer(driver.loop, host=False)
        self.lost: list[str] = []
        self.broken: list[str] = []
        for peer in (self.host, self.guest):
            peer.on_link_lost = self.lost.append
            peer.on_broken = self.broken.append
        self.connect()

    def connect(self) -> None:
        """A new link; both sides tell each other how far they have received."""
        links = []
        for sock in socket.socketpair():
            fd = sock.detach()
            link = FdLink(self.driver.loop, fd, os.dup(fd))
            link.start()
            links.append(link)
        now = self.driver.loop.time()
        ends = shaken_hands(self.host.mux, self.guest.mux, self.codec, now=now)
        for peer, link, end in zip((self.host, self.guest), links, ends, strict=True):
            peer.attach(link, end)

    def cut(self) -> None:
        """Both sides lose the link, and all that is in its buffers."""
        self.host.detach()
        self.guest.detach()

    def close(self) -> None:
        self.cut()
        self.host.mux.close()
        self.guest.mux.close()
