"""Many kernels of one process at work at once: ``python -m benchmarks scale``.

They share one asyncio loop, as in Jupyter Server.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from benchmarks.columns import Column
from benchmarks.resources import Cpu
from benchmarks.rows import percentile_99

AT_ONCE = 4
"""Kernels that are started or stopped at the same time."""
LIMIT = 120.0
WARM_UP = 5


@dataclass(frozen=True)
class Point:
    """One point of the curve."""

    kernels: int
    per_second: float
    """Round trips of all kernels together."""
    p50: float
    p99: float
    tunnel_share: float | None
    """Share of one core that the tunnel's thread used meanwhile."""


def bend(points: Sequence[Point]) -> int | None:
    """The first number of kernels after which more kernels add less than a tenth of what as many
    added at the start of the curve."""
    first = points[0].per_second / points[0].kernels
    for before, point in itertools.pairwise(points):
        added = point.per_second - before.per_second
        if added < 0.1 * first * (point.kernels - before.kernels):
            return before.kernels
    return None


async def measure(column: Column, kernels: int, round_trips: int) -> Point:
    """Start that many kernels, let them work at once, and stop them."""
    gate = asyncio.Semaphore(AT_ONCE)
    fleet = [_Kernel(column) for _ in range(kernels)]
    try:
        await asyncio.gather(*(kernel.start(gate) for kernel in fleet))
        await asyncio.gather(*(kernel.work(WARM_UP) for kernel in fleet))
        before, begin = Cpu.now(), time.perf_counter()
        times = await asyncio.gather(*(kernel.work(round_trips) for kernel in fleet))
        seconds, after = time.perf_counter() - begin, Cpu.now()
    finally:
        await asyncio.gather(*(kernel.stop(gate) for kernel in fleet), return_exceptions=True)
    samples = [sample for each in times for sample in each]
    share = None
    if before.tunnel is not None and after.tunnel is not None:
        share = (after.tunnel - before.tunnel) / seconds
    return Point(kernels, len(samples) / seconds, median(samples), percentile_99(samples), share)


class _Kernel:
    def __init__(self, column: Column) -> None:
        self._manager = AsyncKernelManager(kernel_name=column.kernel, transport=column.transport)
        self._client: AsyncKernelClient | None = None

    async def start(self, gate: asyncio.Semaphore) -> None:
        async with gate:
            await self._manager.start_kernel()
            client = self._manager.client()
            assert isinstance(client, AsyncKernelClient)
            self._client = client
            client.start_channels()
            await client.wait_for_ready(timeout=LIMIT)

    async def work(self, round_trips: int) -> list[float]:
        times = []
        for _ in range(round_trips):
            begin = time.perf_counter()
            await self._run()
            times.append(time.perf_counter() - begin)
        return times

    async def stop(self, gate: asyncio.Semaphore) -> None:
        async with gate:
            if self._client is not None:
                self._client.stop_channels()
            if self._manager.has_kernel:
                await self._manager.shutdown_kernel(now=True)
            self._manager.cleanup_resources()

    async def _run(self) -> None:
        assert self._client is not None
        request = self._client.execute("pass", store_history=False)
        while not _answers(await self._client.get_shell_msg(timeout=LIMIT), request):
            pass
        while True:
            message: dict[str, Any] = await self._client.get_iopub_msg(timeout=LIMIT)
            if _answers(message, request) and message["content"].get("execution_state") == "idle":
                return


def _answers(message: dict[str, Any], request: str) -> bool:
    return bool(message["parent_header"].get("msg_id") == request)
