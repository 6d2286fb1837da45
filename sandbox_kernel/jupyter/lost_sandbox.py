"""Restarting a kernel whose sandbox has ended."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_kernel.errors import SandboxGone, SandboxNotFound
from sandbox_kernel.jupyter.kernel_command import with_interpreter
from sandbox_kernel.kernels import Log, SandboxedKernel


async def start_again(
    lost: SandboxedKernel, argv: Sequence[str], *, recreate: bool, log: Log
) -> bool:
    """Start a lost sandbox again, if its backend can do that. False if the kernel needs a new one:
    SandboxGone if that is a hosted one, unless the user wants it (``recreate``). A sandbox that
    another process took over has not ended, and its endpoints are in use: SessionRefused. On the
    background loop."""
    name, reason = lost.handle.name, lost.tunnel.failure
    if reason is not None and lost.taken_over:
        raise reason
    if lost.client.capabilities.restart:
        try:
            await lost.revive(with_interpreter(argv, lost.handle.spec))
        except (SandboxGone, SandboxNotFound) as error:
            reason = error
        else:
            log.warning("Sandbox %s had ended (%s) and was started again.", name, reason)
            return True
    if lost.client.capabilities.hosted and not recreate:
        raise SandboxGone(
            f"{reason} A hosted sandbox is not replaced automatically: start a new kernel, or set "
            f"recreate."
        )
    log.warning(
        "Sandbox %s is gone (%s). The kernel is restarted in a new one; files of the old one, "
        "if the backend still has them, are kept until `sandbox-kernel rm %s`.",
        *(name, reason, name),
    )
    return False
