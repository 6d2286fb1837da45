"""The lease of a sandbox: as long as somebody is attached, the service's time limit moves on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.superserve import api, request
from sandbox_kernel.sandboxes.superserve.stream import SuperserveStream

_log = logging.getLogger(__name__)

_MOST_PAUSE = 300.0


class Lease:
    """Renews the time limit of one sandbox while streams are open. ``stored`` gives its record."""

    def __init__(self, record: Record, remote: Any, stored: Callable[[], Record | None]) -> None:
        self._record = record
        self._spec = record.sandbox_spec()
        self._remote = remote
        self._stored = stored
        self._streams = 0
        self._renewing: asyncio.Task[None] | None = None
        self._renewed = time.monotonic()

    def attach(self, stream: SuperserveStream) -> None:
        """Renew until the stream, and all others, are closed."""
        self._streams += 1

        def detached() -> None:
            self._streams -= 1
            if not self._streams and self._renewing is not None:
                self._renewing.cancel()
                self._renewing = None

        stream.on_close = detached
        if self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    def restarted(self) -> None:
        """The sandbox was resumed, with a whole lease."""
        self._renewed = time.monotonic()

    def ran_out(self) -> bool:
        """Whether the end of our own lease paused the sandbox: we were attached, but could not
        renew it in time (this machine slept, or the network was down)."""
        record = self._stored()
        if record is None or record.data.get("paused") or not self._streams:
            return False
        return time.monotonic() - self._renewed > self._spec.lease_seconds

    async def _renew(self) -> None:
        limit = self._spec.lease_seconds + request.SLACK
        while True:
            seconds = request.lease_seconds(self._spec, time.time() - self._active_since())
            try:
                await self._remote.update(timeout_seconds=seconds)
                self._renewed = time.monotonic()
                pause = limit / 3
            except api.ERRORS as error:
                _log.debug("sandbox %s: cannot renew its lease: %s", self._spec.name, error)
                pause = min(limit / 10, 10.0)
            await asyncio.sleep(min(pause, _MOST_PAUSE))

    def _active_since(self) -> float:
        record = self._stored() or self._record
        found = record.data.get("active_since")
        return float(found) if isinstance(found, (int, float)) else record.created
