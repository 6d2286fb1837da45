"""What of a kernel's time in a microVM is ours, and what is the VM's.

``python -m tests.microvm.measure BACKEND IMAGE``, in the rig. Each figure stands next to what the
VM itself takes for the nearest thing. They say nothing about a real machine, where everything is
10 to 40 times as fast; but how they compare with each other does.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jupyter_client import KernelManager

from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background

PATIENCE = 600.0
SPEC = {"memory_mib": 512, "start_timeout": PATIENCE / 2}


async def timed(action: Callable[[], Awaitable[Any]], times: int = 1) -> float:
    """Median seconds of an action."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        await action()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


async def machine(client: SandboxClient, image: str) -> dict[str, float]:
    """What the VM takes, without us."""
    made: list[SandboxHandle] = []

    async def create() -> None:
        made.append(await client.create(SandboxSpec.from_mapping({**SPEC, "image": image})))

    found = {"create a VM": await timed(create)}
    [handle] = made

    async def execute(*argv: str) -> None:
        result = await handle.exec(argv[0], argv[1:], timeout=PATIENCE)
        assert result.ok, result.output

    found["exec true"] = await timed(lambda: execute("true"), 5)
    found["exec python3"] = await timed(lambda: execute("python3", "-c", ""), 3)
    found["exec python3, import ipykernel"] = await timed(
        lambda: execute("python3", "-c", "import ipykernel.kernelapp"), 2
    )
    async with await handle.open_stream(["cat"]) as stream:

        async def echo() -> None:
            await stream.write(b"a line of text\n")
            assert await stream.read()

        await timed(echo, 3)
        found["a line to cat and back"] = await timed(echo, 50)
    await client.remove(handle.name)
    return found


def kernel(name: str) -> dict[str, float]:
    """What a kernel takes, through jupyter_client."""
    started = time.perf_counter()
    manager = KernelManager(kernel_name=name)
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        client.execute_interactive("1", timeout=PATIENCE, output_hook=lambda _: None)
        found = {"start to first result": time.perf_counter() - started}
        trips = []
        for _ in range(40):
            before = time.perf_counter()
            client.execute_interactive("1", timeout=PATIENCE, output_hook=lambda _: None)
            trips.append(time.perf_counter() - before)
        found["round trip of a cell"] = statistics.median(trips)
        before = time.perf_counter()
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=PATIENCE)
        client.execute_interactive("1", timeout=PATIENCE, output_hook=lambda _: None)
        found["restart to first result"] = time.perf_counter() - before
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return found


def main(backend: str, image: str) -> None:
    client = load_backend(backend)
    figures = {
        f"{backend}, no kernel": background.submit(machine(client, image)).result(PATIENCE * 2),
        "python3 beside the VM": kernel("python3"),
    }
    settings = {"backend": backend, "image": image, **SPEC}
    os.environ |= {f"SANDBOX_KERNEL_{key.upper()}": str(value) for key, value in settings.items()}
    figures[f"our kernel in {backend}"] = kernel("sandbox")
    background.submit(asyncio.wait_for(client.close(), PATIENCE)).result(PATIENCE)
    for column, rows in figures.items():
        for row, seconds in rows.items():
            print(f"{column:28} {row:32} {seconds * 1000:10.1f} ms")
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
