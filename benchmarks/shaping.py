"""Making the link of this process's sandboxes slow, narrow or text-only, or that of a service.

The means to do so belong to the tests (``tests/faults``, ``tests/emulators``), so this works from a
checkout only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.columns import Link, Service
from sandbox_kernel.jupyter import hosting
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background

_LIMIT = 60.0


class NoShaping(Exception):
    """Links cannot be shaped here."""


@contextmanager
def shaped(link: Link | None) -> Iterator[None]:
    """Sandboxes that this process starts inside this block are reached over such a link."""
    if link is None:
        yield
        return
    try:
        from tests.faults.shaped import Shape, install
    except ImportError as error:
        raise NoShaping(f"run it from a checkout of the repository ({error})") from error
    # A shape's delay is that of one direction.
    with install(Shape(link.round_trip / 2, link.bandwidth, link.byte_exact)):
        yield


@contextmanager
def hosted(service: Service | None) -> Iterator[None]:
    """Sandboxes that this process starts inside this block are those of an emulated service."""
    if service is None:
        yield
        return
    try:
        from tests.emulators.running import started
    except ImportError as error:
        raise NoShaping(f"run it from a checkout of the repository ({error})") from error
    with started(service.backend, delay=service.round_trip) as running:
        os.environ.update(running.env, SANDBOX_KERNEL_BACKEND=service.backend)
        yield


def echo_times(count: int) -> list[float]:
    """Round trips of a few bytes over the bare link, to a ``cat`` in a sandbox and back: what the
    link takes by itself, with no tunnel and no kernel."""
    return background.submit(_echo_times(count)).result(_LIMIT)


async def _echo_times(count: int) -> list[float]:
    # From where kernels get it: this is what the shape has replaced.
    client = hosting.load_backend("local")  # type: ignore[attr-defined]
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
