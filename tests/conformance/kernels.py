"""Kernels in the sandboxes of any backend."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from jupyter_client import BlockingKernelClient, KernelManager

from sandbox_kernel.jupyter.connections import addresses
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.base import SandboxClient
from tests.helpers.coroutines import finish
from tests.helpers.waiting import LIMIT
from tests.kernels.live import provisioner_of


@contextlib.contextmanager
def kernel(**launch: Any) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A running kernel with a client that is ready, started with these keyword arguments."""
    manager = KernelManager(kernel_name="sandbox")
    manager.start_kernel(**launch)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def execute(client: BlockingKernelClient, code: str, on_output: Any = None) -> tuple[Any, str]:
    """Run a cell; its reply and all that it printed."""
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
            if on_output is not None:
                on_output(printed)

    reply = client.execute_interactive(code, output_hook=output, timeout=LIMIT)
    return reply["content"], "".join(printed)


def sandboxed(manager: KernelManager) -> SandboxedKernel:
    found = provisioner_of(manager).kernel
    assert isinstance(found, SandboxedKernel)
    return found


START_AND_DIE = """
import json, os, signal, sys
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="sandbox")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=float(sys.argv[2]))
client.execute_interactive(sys.argv[1], timeout=float(sys.argv[2]))
info = manager.get_connection_info()
info["key"] = info["key"].decode()
print(json.dumps([manager.provisioner.sandbox_name, info], default=lambda b: b.decode()))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def attached(
    client: SandboxClient, name: str, connection: Any
) -> Iterator[tuple[SandboxedKernel, BlockingKernelClient]]:
    """The kernel of a sandbox that another process has started; it is removed in the end."""

    async def attach() -> SandboxedKernel:
        found = await SandboxedKernel.attach(client, name, logging.getLogger(__name__))
        found.listen(addresses(connection))
        return found

    kernel = finish(attach())
    try:
        user = BlockingKernelClient()
        user.load_connection_info(connection)
        user.hb_channel.time_to_dead = LIMIT  # a slow machine is not a dead kernel
        user.start_channels()
        try:
            user.wait_for_ready(timeout=LIMIT)
            yield kernel, user
        finally:
            user.stop_channels()
    finally:
        finish(kernel.remove())
