"""What the user of a kernel is told when it has died, and where that is read."""

from __future__ import annotations

import logging
from typing import Any

from sandbox_kernel.death import advice
from sandbox_kernel.kernels import Log, SandboxedKernel


def obituary(kernel: SandboxedKernel, *, recreate: bool, saved: bool) -> str:
    """For the user of a kernel that has died: why, what becomes of it, what to do. Empty while it
    runs, and if it was asked to end. ``saved``: whether it has a workspace."""
    if not kernel.unasked:
        return ""
    cause = kernel.death.rstrip(".")
    if kernel.tunnel.failure is None:
        words = (
            f"The kernel died: {cause}.",
            f"Its sandbox, {kernel.handle.name}, is there, with the files; variables are lost.",
            advice(cause),
        )
    else:
        becomes = _after_loss(kernel, recreate=recreate, saved=saved)
        words = ("The kernel died with its sandbox.", f"{cause}.", becomes)
    return "\n".join(word for word in words if word)


def _after_loss(kernel: SandboxedKernel, *, recreate: bool, saved: bool) -> str:
    """What becomes of a kernel whose sandbox is lost."""
    if kernel.taken_over:
        return "It goes on under the process that has taken it over."
    if kernel.client.capabilities.restart:
        return "The sandbox is started again, with its files; variables are lost."
    if kernel.client.capabilities.hosted and not recreate:
        return "It is not made anew by itself: start a new kernel, or set recreate."
    if not saved:
        return "The next kernel starts in a new one, without its files."
    return "The next kernel starts in a new one, with the files of the last save."


def heard(log: Any) -> Log:
    """This log, if anybody reads it. Else one whose warnings and errors go to stderr: a plain
    script that uses nbclient has not set up any, and traitlets keeps even the standard library's
    last resort from printing."""
    logger = log.logger if isinstance(log, logging.LoggerAdapter) else log
    while isinstance(logger, logging.Logger):
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            found: Log = log
            return found
        logger = logger.parent if logger.propagate else None
    return logging.getLogger("sandbox_kernel")
