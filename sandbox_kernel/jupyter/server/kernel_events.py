"""What the extension does when a kernel of its server starts, dies or ends (``observers``)."""

from __future__ import annotations

from pathlib import Path

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter import process_exit
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.egress import EgressEvents
from sandbox_kernel.jupyter.server.save_hooks import Saver
from sandbox_kernel.jupyter.server.saved_kernels import SavedKernel
from sandbox_kernel.jupyter.server.server_kernels import ServerKernels
from sandbox_kernel.jupyter.server.warm_kernels import WarmKernels
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.unsaved_files import Unsaved

DEATH_EVENTS = "https://sandbox-kernel.example/events/kernel_death/v1"
_SCHEMA = Path(__file__).with_name("kernel_death.yaml")


class KernelEvents:
    """An ``observers.Observer`` for one server, whose lock has the name ``server``. It ignores
    kernels of others. With ``outlive``, kernels survive the exit of this process."""

    def __init__(
        self,
        kernels: ServerKernels,
        saver: Saver,
        warm: WarmKernels,
        *,
        server: str,
        outlive: bool,
    ) -> None:
        self._kernels = kernels
        self._saver = saver
        self._warm = warm
        self._server = server
        self._outlive = outlive
        self._not_restarted: set[str] = set()
        """Kernels that could not be restarted, as their notebooks say already."""
        self.egress = EgressEvents(kernels)
        kernels.app.event_logger.register_event_schema(_SCHEMA)

    def _is_ours(self, provisioner: SandboxProvisioner) -> bool:
        return getattr(provisioner.parent, "parent", None) is self._kernels.manager

    async def launching(self, provisioner: SandboxProvisioner, kernel: SandboxedKernel) -> None:
        if not self._is_ours(provisioner) or not self._kernels.record_limit:
            return
        if provisioner.connection_info.get("curve_publickey"):
            self._kernels.log.warning(
                "Output of kernel %s that it makes while there is no server will be lost: its "
                "transport is encrypted, so its sandbox cannot record it.",
                provisioner.kernel_id,
            )
            return
        await kernel.record(self._kernels.record_limit)

    async def launched(self, provisioner: SandboxProvisioner) -> None:
        manager = provisioner.parent
        if not self._is_ours(provisioner) or manager is None:
            return
        kernel_id = manager.kernel_id
        manager.reason = ""
        self._not_restarted.discard(kernel_id)
        known = self._kernels.saved.get(kernel_id)
        await self._kernels.add(
            SavedKernel(
                kernel_id=kernel_id,
                kernel_name=manager.kernel_name,
                server=self._server,
                root_dir=self._kernels.app.root_dir,
                provisioner=await provisioner.get_provisioner_info(),
                cwd=provisioner.cwd,
                sessions=known.sessions if known else [],
            )
        )
        self.egress.watch(kernel_id, provisioner)
        if self._outlive and provisioner.kernel is not None:
            process_exit.disown(provisioner.kernel)
        self._kernels.app.io_loop.add_callback(
            self._warm.use, manager.kernel_name, manager.kernel_spec
        )
        while provisioner.notices:
            self._kernels.say(kernel_id, provisioner.notices.pop(0))

    def died(self, provisioner: SandboxProvisioner) -> None:
        if self._is_ours(provisioner):
            # Both texts change with the restart that follows.
            texts = provisioner.death, provisioner.obituary
            self._kernels.app.io_loop.add_callback(self._died, provisioner, *texts)

    def _died(self, provisioner: SandboxProvisioner, cause: str, obituary: str) -> None:
        kernel_id, workspace = str(provisioner.kernel_id), provisioner.saved_workspace
        if provisioner.parent is not None:
            provisioner.parent.reason = cause  # GET /api/kernels shows it until the kernel runs
        output = self._kernels.outputs.get(kernel_id)
        if output is not None and not output.notices.has_tabs:
            output.notices.say(obituary)
        self._kernels.app.event_logger.emit(
            schema_id=DEATH_EVENTS,
            data={
                "kernel_id": kernel_id,
                "sandbox": provisioner.sandbox_name or "",
                "notebook": workspace.notebook if workspace else "",
                "cause": cause,
                "message": obituary,
            },
        )

    async def kept(self, provisioner: SandboxProvisioner, unsaved: Unsaved) -> None:
        if self._is_ours(provisioner):
            self._saver.tell_unsaved(str(provisioner.kernel_id), unsaved)

    def not_restarted(self, provisioner: SandboxProvisioner, error: SandboxError) -> None:
        kernel_id = str(provisioner.kernel_id)
        if self._is_ours(provisioner) and kernel_id not in self._not_restarted:
            self._not_restarted.add(kernel_id)
            self._kernels.say(kernel_id, f"The kernel could not be restarted. {error}")

    async def ended(self, provisioner: SandboxProvisioner) -> None:
        if self._is_ours(provisioner):
            self._not_restarted.discard(str(provisioner.kernel_id))
            await self._kernels.remove(str(provisioner.kernel_id))
