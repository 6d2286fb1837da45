"""Who wants to know about the kernels of this process: the Jupyter Server extension, if it runs.

The provisioner tells; it works the same when nobody listens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
    from sandbox_kernel.kernels import SandboxedKernel


class Observer(Protocol):
    """An error of ``launching`` or ``launched`` is an error of the kernel's start."""

    async def launching(self, provisioner: SandboxProvisioner, kernel: SandboxedKernel) -> None:
        """The sandbox is there, the kernel is started next. On the background loop."""

    async def launched(self, provisioner: SandboxProvisioner) -> None:
        """The kernel runs; also after a restart. On the caller's loop."""

    async def ended(self, provisioner: SandboxProvisioner) -> None:
        """Kernel and sandbox have been removed. On the caller's loop."""


observers: list[Observer] = []
