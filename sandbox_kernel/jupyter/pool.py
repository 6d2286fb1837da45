"""Pools of spare sandboxes in this process, so that a kernel starts in the time of a fork.

Each kind of kernel (``SparePlan``) has its own pool. It is filled when the first kernel of that
kind has started, refilled after each spare that is taken, and emptied when no kernel of the kind
was started for a while, or the process ends. A spare leaves its pool exactly once: to become a
kernel's, or to be removed.

The setting ``pool_size`` asks for a pool. Without it, a Jupyter Server keeps small ones
(``unasked``), which stay out of the way: they are filled when no kernel starts, and only while
there is memory.

Everything here runs on the background loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import astuple, dataclass

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.kernels.spare_plan import SparePlan, SpareSandbox
from sandbox_kernel.sandboxes.local.cgroup import memory_left
from sandbox_kernel.tunnel.clock import since_boot
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks

log = logging.getLogger("sandbox_kernel.pool")

REMOVE_TIMEOUT = 60.0
_CHECK = 5.0
_LOOK = 0.1

Make = Callable[[], Awaitable[SpareSandbox]]
Remove = Callable[[SandboxedKernel], Awaitable[None]]
Likeness = Callable[[], Awaitable[str]]


@dataclass(frozen=True)
class Terms:
    """How a pool is kept."""

    size: int
    idle_seconds: float
    """It is emptied when no kernel of its kind was started for this long."""
    quiet: float = 0.0
    """Seconds without the start of any kernel before a spare is made."""
    least_memory: float = 0.0
    """The share of the memory that must be available for a spare to be made; spares are dropped
    when half of it is left."""


unasked: Terms | None = None
"""The terms of pools that no setting asks for; None: there are none in this process."""
shares_spares = True
"""Without ``unasked``, this process takes spares of other processes, and leaves them some."""
_pools: dict[str, Pool] = {}
_under_way = 0
_last_start = 0.0


@contextlib.contextmanager
def starting_a_kernel() -> Iterator[None]:
    """No pool is filled meanwhile. One that makes a spare unasked begins again later."""
    global _under_way, _last_start
    _under_way += 1
    for pool in _pools.values():
        pool.make_way()
    try:
        yield
    finally:
        _under_way -= 1
        _last_start = since_boot()


async def calm(quiet: float) -> None:
    """Wait until no start is under way, nor was one for that many seconds."""
    while _under_way or since_boot() - _last_start < quiet:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK)


class Pool:
    """Spares of one kind."""

    def __init__(self, terms: Terms, make: Make, remove: Remove) -> None:
        self._terms = terms
        self._make = make
        self._remove = remove
        self._ready: deque[SpareSandbox] = deque()
        self._used_at = since_boot()
        self._tasks, self._watching = OwnedTasks(), OwnedTasks()
        self._filling: asyncio.Task[None] | None = None
        self._making = False
        self._short = False
        """Memory was short at the last look."""

    def __len__(self) -> int:
        return len(self._ready)

    async def take(self, likeness: Likeness) -> SandboxedKernel | None:
        """A sandbox that nobody else gets, or None if none is ready that is like one made now. The
        pool is filled again when the start of the kernel is over."""
        taken = None
        while self._ready and taken is None:
            spare = self._ready.popleft()
            try:
                if spare.usable and spare.likeness == await likeness():
                    taken = spare.kernel
            finally:
                if taken is None:
                    self._tasks.start(self._discard(spare))
        self.fill()
        return taken

    def fill(self) -> None:
        """A kernel of this kind starts, or is expected: have spares in a while."""
        self._used_at = since_boot()
        if self._filling is None or self._filling.done():
            self._filling = self._tasks.start(self._fill_up())
        if not self._watching:
            self._watching.start(self._watch())

    def make_way(self) -> None:
        """A kernel starts: a spare that is being made unasked is given up, and made later."""
        if self._filling is not None and self._making and self._terms.quiet:
            self._filling.cancel()
            self._filling = self._tasks.start(self._fill_up())

    async def drain(self) -> None:
        """Remove every sandbox that waits. The next ``take`` fills the pool again."""
        await self._watching.cancel()
        await self._empty()

    async def _empty(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
        while self._ready:
            self._tasks.start(self._discard(self._ready.popleft()))
        await self._tasks.wait(REMOVE_TIMEOUT)

    async def _discard(self, spare: SpareSandbox) -> None:
        try:
            await self._remove(spare.kernel)
        except (SandboxError, OSError) as error:
            name = spare.kernel.handle.name
            log.warning("The spare sandbox %s could not be removed: %s", name, error)

    async def _fill_up(self) -> None:
        while len(self._ready) < self._terms.size:
            await calm(self._terms.quiet)
            if await self._memory_is_below(self._terms.least_memory):
                return
            self._making = True
            try:
                spare = await self._make()
            except (SandboxError, OSError) as error:
                # The next kernel that starts meets the same error and shows it to its user.
                log.warning("No spare sandbox could be made: %s", error)
                return
            finally:
                self._making = False
            self._ready.append(spare)

    async def _watch(self) -> None:
        """Until the pool has not been used for too long."""
        idle, least = self._terms.idle_seconds, self._terms.least_memory
        while since_boot() - self._used_at < idle:
            await asyncio.sleep(min(_CHECK, idle))
            unused = since_boot() - self._used_at >= idle
            if unused or (self._ready and await self._memory_is_below(least / 2)):
                await self._empty()

    async def _memory_is_below(self, least: float) -> bool:
        left = await asyncio.to_thread(memory_left) if least else 1.0
        short, told, self._short = left < least, self._short, left < least
        if short and not told:
            log.warning("No spare sandbox is kept: %.0f %% of the memory is available.", 100 * left)
        return short


def pool_for(plan: SparePlan, terms: Terms, make: Make, remove: Remove) -> Pool:
    """The pool of this process for this kind of kernel."""
    key = plan.key(astuple(terms))
    if key not in _pools:
        _pools[key] = Pool(terms, make, remove)
    return _pools[key]


async def drain_all() -> None:
    """Empty every pool; at exit, and for tests."""
    pools = list(_pools.values())
    _pools.clear()
    await asyncio.gather(*(pool.drain() for pool in pools))


def forget_all() -> None:
    """In a forked child: the pools belong to the parent, and so do starts that are under way."""
    global _under_way, unasked, shares_spares
    _pools.clear()
    _under_way, unasked, shares_spares = 0, None, True
