"""The sandboxes that an MCP server has in use: opened, attached to, and ended in time.

The tools ask for a sandbox by its name, in every call. What this process does not have it attaches
to, if a server of the same policy has made it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from sandbox_kernel.agents.mcp.ledger import Ledger
from sandbox_kernel.agents.mcp.policy import Policy
from sandbox_kernel.agents.mcp.slow import NotReady, SlowWork, StillRunning, Tell
from sandbox_kernel.agents.notebook import Notebook
from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound, SpecRefused

LOOK_EVERY = 1.0
_LEAVING = 15.0
"""Seconds that leaving all sandboxes may take."""
_log = logging.getLogger(__name__)


@dataclass
class Held:
    """A sandbox that this process is attached to."""

    notebook: Notebook
    used: float = field(default_factory=time.monotonic)
    running: dict[str, float] = field(default_factory=dict)
    """Job -> when it was first seen running."""


class Sandboxes:
    """All sandboxes of one server. Lives on one event loop, inside ``async with``."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.slow = SlowWork()
        self._held: dict[str, Held] = {}
        self._ledger = Ledger(lambda: {*self._held, *(one.sandbox for one in Notebook.live())})
        self._known = policy.fingerprints()
        self._upkeep: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sandboxes:
        self._upkeep = asyncio.ensure_future(self._look_after_them())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Leave all sandboxes, as the policy says. A client that closes our stdin sends SIGTERM
        soon after, which cancels us: that does not cut it short."""
        leaving = asyncio.ensure_future(self._leave())
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            await leaving
            raise

    async def _leave(self) -> None:
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
        await self.slow.end()
        held = dict(self._held)
        self._held.clear()
        if not held:
            return
        closing = self.policy.limits.on_disconnect == "close"
        leave = self._close if closing else self._detach
        tasks = [asyncio.ensure_future(leave(name, one.notebook)) for name, one in held.items()]
        _, late = await asyncio.wait(tasks, timeout=_LEAVING)
        for task in late:
            task.cancel()
        if late:
            _log.warning("%d sandboxes are left to their lease", len(late))
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                _log.warning("a sandbox is left to its lease: %s", found)

    # --- for the tools

    async def reserve(self, backend: str) -> str:
        """A name for a new sandbox of this backend. SpecRefused beyond the limit."""
        name = f"mcp-{secrets.token_hex(8)}"
        limit, mark = self.policy.limits.max_sandboxes, self.policy.fingerprint(backend)
        await asyncio.to_thread(self._ledger.add, name, mark, self._known, limit)
        return name

    async def open(
        self, name: str, backend: str, path: str | None, seconds: float, tell: Tell | None = None
    ) -> Notebook:
        """Make the sandbox that was reserved. StillRunning: ``use`` gets it later."""
        work = lambda: self._hold(name, self._opened(name, backend, path))  # noqa: E731
        return await self.slow.outcome(("hold", name), work, seconds, tell, "starting the sandbox")

    async def use(self, name: str, tell: Tell | None = None) -> Notebook:
        """The sandbox of a call. SandboxNotFound if it is not one of this policy's."""
        await asyncio.to_thread(self._ledger.find, name, self._known)
        held = self._held.get(name)
        if held is not None and held.notebook.state == "closed":
            del self._held[name]  # it has ended, or another server has it
            held = None
        if held is None:
            work = lambda: self._hold(name, self._attached(name))  # noqa: E731
            seconds = self.policy.limits.call_seconds
            try:
                await self.slow.outcome(("hold", name), work, seconds, tell, "attaching")
            except StillRunning:
                raise NotReady from None
            held = self._held[name]
        held.used = time.monotonic()
        return held.notebook

    def check_queue(self, notebook: Notebook) -> None:
        """SpecRefused if too many cells wait already."""
        most = self.policy.limits.max_queue
        waiting = sum(1 for job in notebook.jobs.values() if not job.is_over)
        if waiting >= most:
            raise SpecRefused(
                f"{waiting} cells run or wait in sandbox {notebook.sandbox!r}, and {most} are "
                f"allowed. Wait for one with poll, or cancel one."
            )

    async def fork(self, notebook: Notebook) -> Notebook:
        """A second sandbox in the state of the first."""
        reserved = await self.reserve(notebook.backend)
        try:
            made = await notebook.fork()
        except BaseException:
            await asyncio.to_thread(self._ledger.forget, reserved)
            raise
        try:
            await asyncio.to_thread(self._ledger.rename, reserved, made.sandbox)
        except BaseException:  # no call could name it
            await asyncio.shield(made.close(save=False))
            raise
        self._held[made.sandbox] = Held(made)
        return made

    async def close(self, name: str, *, save: bool) -> None:
        await self._close(name, self._held[name].notebook, save=save)
        self._held.pop(name, None)

    # --- within

    async def _hold(self, name: str, getting: Coroutine[Any, Any, Notebook]) -> Notebook:
        notebook = await getting
        self._held[name] = Held(notebook)
        return notebook

    async def _opened(self, name: str, backend: str, path: str | None) -> Notebook:
        settings = dict(self.policy.settings.get(backend, {}))
        try:
            return await Notebook.open(
                path, kernel=self.policy.limits.kernel, backend=backend, name=name, **settings
            )
        except BaseException:
            await asyncio.to_thread(self._ledger.forget, name)
            raise

    async def _attached(self, name: str) -> Notebook:
        try:
            return await Notebook.attach(name, take_over=True)
        except (SandboxNotFound, SandboxGone) as error:
            await asyncio.to_thread(self._ledger.forget, name)
            raise SandboxGone(
                f"Sandbox {name!r} has ended. Open a new one with the tool open. ({error})"
            ) from error

    async def _close(self, name: str, notebook: Notebook, *, save: bool = True) -> None:
        await notebook.close(save=save)
        await asyncio.to_thread(self._ledger.forget, name)

    async def _detach(self, name: str, notebook: Notebook) -> None:
        await notebook.detach()

    async def _look_after_them(self) -> None:
        """Interrupt cells that run too long, and end sandboxes that nobody uses."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for name, held in list(self._held.items()):
                try:
                    await self._look_after(name, held)
                except SandboxError as error:
                    _log.warning("sandbox %s: %s", name, error)
                except Exception:  # noqa: BLE001  (a fault of ours with one sandbox)
                    _log.exception("sandbox %s", name)

    async def _look_after(self, name: str, held: Held) -> None:
        limits, now = self.policy.limits, time.monotonic()
        under_way = [job for job in held.notebook.jobs.values() if not job.is_over]
        if under_way:
            held.used = now
        elif now - held.used > limits.idle_seconds:
            work = lambda: self.close(name, save=True)  # noqa: E731
            self.slow.begin(("close", name), work)
            return
        started = {job.id: job for job in under_way if job.state != "queued"}
        held.running = {key: held.running.get(key, now) for key in started}
        for key, since in held.running.items():
            if now - since > limits.cell_seconds:
                self.slow.begin(("cancel", name, key), started[key].cancel)
