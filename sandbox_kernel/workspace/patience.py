"""How long a sandbox that transfers files is waited for: as long as it goes on.

Bytes that come or go show that by themselves, and the socket's timeout notices when there are none.
What a sandbox only says about itself ("so many files looked at") is believed as far as it adds up:
else one that says so for ever would be waited for as long.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from sandbox_kernel.guest.workspace.messages import Stalled

LONGEST = 24 * 3600.0
"""Seconds that a transfer may take in all."""
_FILES, _BYTES = 1000, 64 * 2**20
"""What a sandbox must have got through meanwhile, by its own word, to be waited for again."""


class Patience:
    """For one conversation; as patient as its socket's timeout. ``Stalled`` says that it ends."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        files: int = _FILES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step = files
        self._limit = sock.gettimeout() or LONGEST
        self._clock = clock
        self._started = self._moved_at = clock()
        self._files = self._bytes = 0

    def moved(self) -> None:
        """Something that was wanted has come."""
        self._moved_at = self._clock()
        if self._moved_at - self._started > LONGEST:
            raise Stalled(f"it takes longer than {LONGEST / 3600:g} hours")

    def told(self, files: int, size: int) -> None:
        """The sandbox says how far it is."""
        if files >= self._files + self._step or size >= self._bytes + _BYTES:
            self._files, self._bytes = max(files, self._files), max(size, self._bytes)
            self.moved()
        elif self._clock() - self._moved_at > self._limit:
            raise Stalled("it says that it is at work, and gets nowhere")
