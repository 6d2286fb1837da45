"""Observers of the kernels of this process: the Jupyter Server extension, if it runs.

The provisioner calls them; it works the same without any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sandbox_kernel.errors import SandboxError
    from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
    from sandbox_kernel.kernels import SandboxedKernel
    from sandbox_kernel.sandboxes.unsaved_files import Unsaved


class Observer(Protocol):
    """An error of ``launching`` or ``launched`` is an error of the kernel's start."""

    async def launching(self, provisioner: SandboxProvisioner, kernel: SandboxedKernel) -> None:
        """The sandbox is there, the kernel is started next. On the background loop."""

    async def launched(self, provisioner: SandboxProvisioner) -> None:
        """The kernel runs; also after a restart. On the caller's loop."""

    def died(self, provisioner: SandboxProvisioner) -> None:
        """The kernel has ended, or its sandbox, and nobody had asked for that. Its restart, if
        there is one, comes later. On the background loop."""

    async def kept(self, provisioner: SandboxProvisioner, unsaved: Unsaved) -> None:
        """The kernel has ended, and its sandbox stays, because its files could not be saved. On the
        caller's loop; ``ended`` comes next."""

    def not_restarted(self, provisioner: SandboxProvisioner, error: SandboxError) -> None:
        """A kernel that has run before could not be started again. On the caller's loop."""

    async def ended(self, provisioner: SandboxProvisioner) -> None:
        """The kernel has ended, and its sandbox was removed, or is kept. On the caller's loop."""


observers: list[Observer] = []
