"""Notebooks of ``sandbox_kernel.Notebook``, opened in a server: they have the same live kernel.

A session for the path where such a notebook is recorded takes its kernel over, if the process that
had it has ended or has let go of it. While that process uses it, the server shares it
(``shared_kernels.py``).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound
from sandbox_kernel.jupyter.kernel_workspace import notebook_in
from sandbox_kernel.jupyter.server.adoption import Adopter
from sandbox_kernel.jupyter.server.shared_kernels import SharedKernels
from sandbox_kernel.jupyter.server.used_kernels import UsedKernels
from sandbox_kernel.live_notebooks import LiveNotebook, notebook_at


class LiveKernels:
    """Those of one server."""

    def __init__(self, adopter: Adopter, used: UsedKernels, log: logging.Logger) -> None:
        self._adopter = adopter
        self.shared = SharedKernels(adopter, used.add, log)
        self._used = used
        self._log = log
        self._taking = asyncio.Lock()

    async def start(self, usual: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ``MappingKernelManager.start_kernel``."""
        path = notebook_in(kwargs.get("env") or {})
        if path and kwargs.get("kernel_id") is None:
            async with self._taking:
                live = await asyncio.to_thread(notebook_at, path)
                if live is not None and await self._take(live):
                    return live.kernel_id
        return await usual(*args, **kwargs)

    async def _take(self, live: LiveNotebook) -> bool:
        """Have the notebook's kernel here. False if it has ended, so a new one is right."""
        if live.kernel_id in self._adopter.kernels.manager:
            return True
        owner = await asyncio.to_thread(lambda: live.owner)
        if owner is not None:
            self._log.info("Kernel %s is shared with process %d", live.kernel_id, owner)
            await self.shared.share(live)
            return True
        try:
            await self._adopter.adopt_notebook(live)
        except (SandboxGone, SandboxNotFound) as error:
            self._log.warning("The live kernel of %s has ended: %s", live.path, error)
            await asyncio.to_thread(live.forget)
            return False
        except TimeoutError:
            raise SandboxError(
                f"No kernel was started: sandbox {live.sandbox}, where the notebook is live, did "
                f"not answer. Try again, or end it with `sandbox-kernel rm {live.sandbox}`."
            ) from None
        self._log.info("Took over kernel %s of %s", live.kernel_id, live.path)
        self._used.add(live.kernel_id)
        return True
