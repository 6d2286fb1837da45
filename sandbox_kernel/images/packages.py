"""What a kernel needs and an image lacks: found on the host, and put into the sandbox once."""

from __future__ import annotations

import logging
from typing import Any

from sandbox_kernel.sandboxes.base import SandboxHandle

Log = logging.Logger | logging.LoggerAdapter[Any]


async def provide(handle: SandboxHandle, log: Log) -> dict[str, str]:
    """See to it that ``handle.python`` can run ipykernel. Called before the agent is started;
    the answer is the environment that the agent and its kernels need for it."""
    return {}
