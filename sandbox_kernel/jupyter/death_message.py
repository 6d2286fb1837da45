"""The message for the user of a kernel that has died, and a log where it can be read."""

from __future__ import annotations

import logging
from typing import Any

from sandbox_kernel.kernel_death import advice
from sandbox_kernel.kernels import Log, SandboxedKernel


def obituary(kernel: SandboxedKernel, *, recreate: bool, saved: bool) -> str:
    """For the user of a kernel that has died: why, what happens next, what to do. Empty while it
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
    """What happens to a kernel whose sandbox is lost."""
    if kernel.taken_over:
        return "The process that took it over uses it now."
    if kernel.client.capabilities.restart:
        return "The sandbox is started again, with its files; variables are lost."
    if kernel.client.capabilities.hosted and not recreate:
        return "It is not replaced automatically: start a new kernel, or set recreate."
    if not saved:
        return "The next kernel starts in a new one, without its files."
    return "The next kernel starts in a new one, with the files of the last save."


def visible_log(log: Any) -> Log:
    """This log, if it has a handler; else one whose warnings go to stderr. A plain script that uses
    nbclient has set up no logging, and traitlets disables the standard library's last resort."""
    logger = log.logger if isinstance(log, logging.LoggerAdapter) else log
    while isinstance(logger, logging.Logger):
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            found: Log = log
            return found
        logger = logger.parent if logger.propagate else None
    return logging.getLogger("sandbox_kernel")
