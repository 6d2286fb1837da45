"""A holder: a process that has one spare ready for the next kernel of a kind, for ten minutes.

``Shelf.ask_for_one`` starts it, after a kernel has started. It makes a spare and offers it on its
shelf. Whoever takes it attaches to the sandbox, which ends this process's session with it; then the
next one is made. It ends, and its spare with it, when no kernel of the kind was started for
``LIMIT`` seconds, when memory gets short, when somebody removes the spare, and when the user logs
out: SIGHUP, SIGTERM, or the folder of the shelf or ``$XDG_RUNTIME_DIR`` is gone. If it is killed,
the spare ends by itself (``UNUSED_LEASE``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.kernels.spare_plan import LEAST_MEMORY, SparePlan, SpareSandbox, make_spare
from sandbox_kernel.kernels.spare_shelf import Offer, Shelf
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.local.cgroup import memory_left
from sandbox_kernel.tunnel.clock import since_boot

LIMIT = 600.0
"""Seconds that a spare waits after the last start of a kernel of its kind."""
DELAY = 0.5
"""Seconds after such a start before the next spare is made: the kernel's own start comes first."""
CHECK = 1.0

_log = logging.getLogger("sandbox_kernel.spare_holder")


class Holder:
    """Has one spare after the other. ``hold`` ends when there is to be no more; if it is cancelled,
    the spare is removed, too."""

    def __init__(self, shelf: Shelf, plan: SparePlan) -> None:
        self._shelf = shelf
        self._plan = plan
        self._client = load_backend(plan.backend)
        self._session = os.environ.get("XDG_RUNTIME_DIR", "")
        if not os.path.isdir(self._session):
            self._session = ""
        self._last_use = shelf.last_use()
        self._used_at = since_boot()

    async def hold(self) -> None:
        again = True
        while again:
            await asyncio.sleep(DELAY)
            if self._over(LEAST_MEMORY):
                return
            spare = await make_spare(self._client, self._plan, _log)
            try:
                again = await self._wait(spare)
            finally:
                await asyncio.shield(self._let_go(spare))

    async def _wait(self, spare: SpareSandbox) -> bool:
        """Offer a spare until it is taken, and another one is wanted; False if none is."""
        kernel, ended = spare.kernel, asyncio.Event()
        kernel.on_exit = ended.set  # also when whoever took it attaches
        handle = kernel.handle
        self._shelf.offer(Offer(handle.backend, handle.name, handle.id, spare.likeness))
        while self._shelf.offered and kernel.exit_code is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), CHECK)
            if self._over(LEAST_MEMORY / 2):
                return False
        return not self._shelf.offered

    def _over(self, least_memory: float) -> bool:
        used = self._shelf.last_use()
        if used != self._last_use:
            self._last_use, self._used_at = used, since_boot()
        return (
            used is None
            or since_boot() - self._used_at > LIMIT
            or (bool(self._session) and not os.path.isdir(self._session))
            or memory_left() < least_memory
        )

    async def _let_go(self, spare: SpareSandbox) -> None:
        """Remove a spare, if it is still offered. Else somebody has it, who is attached or will be
        in a moment; if not, its lease ends it."""
        kernel = spare.kernel
        if self._shelf.take() is None:
            return await kernel.release()
        try:
            await kernel.remove()
        except (SandboxError, OSError) as error:
            _log.warning("The spare sandbox %s could not be removed: %s", kernel.handle.name, error)


async def _main(shelf: Shelf, plan: SparePlan) -> None:
    holding = asyncio.ensure_future(Holder(shelf, plan).hold())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, holding.cancel)
    try:
        await holding
    except asyncio.CancelledError:
        pass
    except (SandboxError, OSError) as error:
        # The next kernel that starts meets the same error and shows it to its user.
        _log.warning("No spare sandbox could be made: %s", error)


def main(key: str, lock: str) -> int:
    """The plan comes on stdin: it has the environment of the sandbox, which is nobody's business
    on this host."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    shelf = Shelf(key)
    os.set_inheritable(int(lock), False)  # locked as long as this process has it
    try:
        plan = SparePlan.from_dict(json.loads(sys.stdin.buffer.read()))
        asyncio.run(_main(shelf, plan))
    finally:
        shelf.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
