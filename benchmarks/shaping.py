"""Make the link to this process's sandboxes slow, narrow or text-only, or emulate a service.

This uses parts of the tests (``tests/faults``, ``tests/emulators``), so it needs a checkout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.columns import Link, Service
from sandbox_kernel.jupyter import kernel_factory
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background

_LIMIT = 60.0


@contextmanager
def shaped(link: Link | None) -> Iterator[None]:
    """Give sandboxes that this process starts inside this block such a link."""
    if link is None:
        yield
        return
    from tests.faults.shaped import Shape, install

    # A shape's delay is that of one direction.
    with install(Shape(link.round_trip / 2, link.bandwidth, link.byte_exact)):
        yield


@contextmanager
def hosted(service: Service | None) -> Iterator[None]:
    """Start an emulated service; sandboxes started inside this block are sandboxes of it."""
    if service is None:
        yield
        return
    from tests.emulators.running import started

    with started(service.backend, delay=service.round_trip) as running:
        os.environ.update(running.env, SANDBOX_KERNEL_BACKEND=service.backend)
        yield


def echo_times(count: int) -> list[float]:
    """Seconds of round trips of a few bytes over the bare link, to a ``cat`` in a sandbox and back:
    the link's own time, without tunnel and kernel."""
    return background.submit(_echo_times(count)).result(_LIMIT)


async def _echo_times(count: int) -> list[float]:
    # The same lookup as for kernels, because the shape has replaced it.
    client = kernel_factory.load_backend("local")  # type: ignore[attr-defined]
    handle = await client.create(SandboxSpec())
    try:
        times = []
        async with await handle.open_stream(["cat"], duplex=True) as stream:
            for _ in range(count):
                begin = time.perf_counter()
                await stream.write(b"are you there?")
                await stream.read()
                times.append(time.perf_counter() - begin)
    finally:
        await client.remove(handle.name)
    return times
