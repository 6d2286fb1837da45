"""A pool of warm sandboxes, made ahead, so that a kernel starts in the time of a fork.

Off unless ``pool_size`` is set. Each kind of kernel (backend, spec, command line) has its own pool.
It is filled when the first kernel of that kind starts, refilled after each sandbox that is taken,
and emptied when none was taken for ``pool_idle_seconds`` or the process ends. A sandbox leaves the
pool exactly once: to become a kernel's, or to be removed.

Everything here runs on the background loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks

log = logging.getLogger("sandbox_kernel.pool")

Make = Callable[[], Awaitable[SandboxedKernel]]
Remove = Callable[[SandboxedKernel], Awaitable[None]]


class Pool:
    """Warm sandboxes of one kind."""

    def __init__(self, size: int, idle_seconds: float, make: Make, remove: Remove) -> None:
        self._size = size
        self._idle_seconds = idle_seconds
        self._make = make
        self._remove = remove
        self._ready: deque[SandboxedKernel] = deque()
        self._filling, self._draining = OwnedTasks(), OwnedTasks()
        self._idle_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._ready)

    async def take(self) -> SandboxedKernel | None:
        """A sandbox that nobody else gets, or None if none is ready. Fills the pool again."""
        self._stop_timer()
        self._idle_timer = asyncio.get_running_loop().call_later(
            self._idle_seconds, lambda: self._draining.start(self.drain())
        )
        taken = None
        while self._ready and taken is None:
            candidate = self._ready.popleft()
            if candidate.tunnel.failure is None and candidate.tunnel.connected:
                taken = candidate
            else:
                await self._remove(candidate)
        if not self._filling:
            self._filling.start(self._fill_up())
        return taken

    async def drain(self) -> None:
        """Remove every sandbox that waits. The next ``take`` fills the pool again."""
        self._stop_timer()
        await self._filling.cancel()
        while self._ready:
            await self._remove(self._ready.popleft())

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    async def _fill_up(self) -> None:
        while len(self._ready) < self._size:
            try:
                kernel = await self._make()
            except SandboxError as error:
                # The next kernel that starts meets the same error and shows it to its user.
                log.warning("No sandbox for the pool: %s", error)
                return
            self._ready.append(kernel)


_pools: dict[str, Pool] = {}


def pool_for(kind: object, size: int, idle_seconds: float, make: Make, remove: Remove) -> Pool:
    """The pool of this process for this kind of kernel (any JSON value)."""
    key = json.dumps([kind, size, idle_seconds], sort_keys=True)
    if key not in _pools:
        _pools[key] = Pool(size, idle_seconds, make, remove)
    return _pools[key]


async def drain_all() -> None:
    """Empty every pool; at exit, and for tests."""
    pools = list(_pools.values())
    _pools.clear()
    await asyncio.gather(*(pool.drain() for pool in pools))


def forget_all() -> None:
    """In a forked child: the pools belong to the parent."""
    _pools.clear()
