"""What runs beside a launched kernel: clients of our own that hear its messages."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from sandbox_kernel.jupyter.hint_log import Hint, log_hints
from sandbox_kernel.jupyter.idle_pause import pause_when_idle
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.spec import KernelConfiguration


async def set_up_companions(
    kernel: SandboxedKernel,
    configuration: KernelConfiguration,
    connection: Mapping[str, Any],
    *,
    hint: Hint | None = None,
) -> None:
    """Let a launched kernel be paused as its configuration says, and its cells be known to the
    audit, and log what ``hint`` says of its errors. On the background loop."""
    kernel.pause_on_exit = configuration.pause_on_exit
    companions: list[Coroutine[Any, Any, None]] = []
    if seconds := configuration.idle_pause_seconds:
        companions.append(pause_when_idle(kernel, connection, seconds))
    elif hint is not None:
        companions.append(log_hints(kernel, connection, hint))
    if kernel.cells is not None:
        from sandbox_kernel.jupyter.cell_listener import follow_cells  # lazy: most need none

        companions.append(follow_cells(kernel.cells, connection))
    await kernel.run_alongside(*companions)
