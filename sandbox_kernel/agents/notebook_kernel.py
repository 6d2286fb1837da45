"""The kernel of a notebook: one of jupyter_client's managers with our provisioner.

It is started or taken over from another process, and ended or left to one. All of it is on the
caller's loop; sandbox and tunnel are on the background loop.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import SandboxGone, SpecError
from sandbox_kernel.jupyter.configuration import GIVEN
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.live_notebooks import LiveNotebook
from sandbox_kernel.recordings import Recording
from sandbox_kernel.spec import DEFAULT_BACKEND, SETTINGS
from sandbox_kernel.suggestions import check_keys
from sandbox_kernel.tunnel.background import run

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.jupyter.provisioner import SandboxProvisioner

RECORDED = 16 * 2**20
"""Bytes of output that the sandbox keeps for the case that this process ends."""
MAX_RECORDING = 256 * 2**20
"""Bytes that another process may have let it keep."""
_SESSION = "JPY_SESSION_NAME"
_OURS = frozenset(name for name, one in SETTINGS.items() if one.only_for != "launcher")


class NotebookKernel:
    """A kernel in a sandbox that this process drives."""

    def __init__(self, manager: Any, kernelspec: Mapping[str, Any], cwd: str) -> None:
        self.manager = manager
        self.kernelspec = dict(kernelspec)
        self._cwd = cwd

    @classmethod
    async def start(
        cls,
        *,
        kernel: str | None,
        backend: str | None,
        settings: Mapping[str, Any],
        notebook: str,
        cwd: str,
    ) -> NotebookKernel:
        """A new sandbox with a kernel. ``notebook`` is the path whose saved files it gets, if any.
        On any failure nothing is left."""
        check_keys(settings, _OURS - {"backend"}, "Notebook.open")
        name, kernelspec = _kernelspec(kernel, backend, settings)
        self = cls(_manager(name, kernelspec), kernelspec, cwd)
        try:
            await self.manager.start_kernel(env=_environment(notebook), cwd=cwd)
        except BaseException:
            await self.manager.cleanup_resources()
            raise
        return self

    @classmethod
    async def take_over(cls, live: LiveNotebook) -> NotebookKernel:
        """The kernel of a notebook that another process has started; it may have died since.
        SandboxGone if its sandbox has ended."""
        manager, provisioner = _with_provisioner(live.kernel_name, live.kernelspec, live.kernel_id)
        self = cls(manager, live.kernelspec, live.cwd or os.getcwd())
        provisioner.takes_dead = True
        try:
            await provisioner.load_provisioner_info(live.provisioner)
            saved = provisioner.saved_workspace is not None
            self._adopt(provisioner, _environment(live.path if saved else ""))
        except BaseException:
            await manager.cleanup_resources()
            raise
        return self

    async def fork(self) -> NotebookKernel:
        """A kernel that goes on from this one's memory, in a sandbox of its own. Unsupported where
        the backend cannot."""
        copy = await run(self.sandboxed.fork())
        try:
            manager, provisioner = _with_provisioner(self.manager.kernel_name, self.kernelspec, "")
            connection = (await self.provisioner.get_provisioner_info())["connection_info"]
            await provisioner.go_on_with(copy, connection)
        except BaseException:
            await run(copy.remove())
            raise
        kernel = NotebookKernel(manager, self.kernelspec, self._cwd)
        kernel._adopt(provisioner, _environment(""))
        return kernel

    def _adopt(self, provisioner: SandboxProvisioner, environment: dict[str, str]) -> None:
        from sandbox_kernel.jupyter.jupyter_internals import adopt_kernel

        arguments = {"env": environment, "cwd": self._cwd}
        adopt_kernel(self.manager, provisioner, provisioner.connection_info, arguments)

    @property
    def provisioner(self) -> SandboxProvisioner:
        found: SandboxProvisioner = self.manager.provisioner
        return found

    @property
    def sandboxed(self) -> SandboxedKernel:
        """SandboxGone if it has none any more."""
        if self.provisioner.kernel is None:
            raise SandboxGone("The notebook's sandbox has ended. Open the notebook again.")
        return self.provisioner.kernel

    async def describe(self, path: str) -> LiveNotebook:
        """What another process needs to go on with it."""
        handle, manager = self.sandboxed.handle, self.manager
        return LiveNotebook(
            sandbox=handle.name,
            backend=handle.backend,
            sandbox_id=handle.id,
            kernel_id=manager.kernel_id,
            kernel_name=manager.kernel_name,
            path=path,
            kernelspec=self.kernelspec,
            provisioner=await self.provisioner.get_provisioner_info(),
            connection_file=manager.connection_file,
            cwd=self._cwd,
        )

    async def died(self) -> str:
        """Why the kernel has ended, when it has."""
        kernel = self.sandboxed
        await run(kernel.wait())
        return kernel.death

    @property
    def has_lost_it(self) -> bool:
        """Whether another process has taken the sandbox over."""
        kernel = self.provisioner.kernel
        return kernel is not None and kernel.taken_over

    # --- output

    async def record(self) -> None:
        """Let the sandbox keep what the kernel publishes from now on."""
        await run(self.sandboxed.record(RECORDED))

    async def recorded(self, since: int = 0) -> Recording:
        return await run(self.sandboxed.recorded(MAX_RECORDING, since))

    # --- its life

    async def interrupt(self) -> None:
        await self.manager.interrupt_kernel()

    async def restart(self) -> None:
        """Another kernel in the same sandbox, with its files."""
        await self.manager.restart_kernel(now=True)

    async def detach(self) -> None:
        """Leave it running, for another process."""
        await self.provisioner.detach()
        # The manager would delete the sockets, which may be that process's by now.
        self.manager.transport = "tcp"
        await self.manager.cleanup_resources()

    async def end(self, *, save: bool = True) -> None:
        """End it with its sandbox, after its files were saved if it has a workspace."""
        if not save:
            self.provisioner.saved_workspace = None
        if self.manager.has_kernel:
            await self.manager.shutdown_kernel(now=True)
        else:
            await self.manager.cleanup_resources()


def _environment(notebook: str) -> dict[str, str]:
    """For the kernel's start: this process may be a kernel itself, of another notebook."""
    found = {key: value for key, value in os.environ.items() if key != _SESSION}
    return {**found, _SESSION: notebook} if notebook else found


def _manager(name: str, kernelspec: Mapping[str, Any]) -> Any:
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class OneKernelspec(KernelSpecManager):
        """One kernelspec that is on no disk."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(resource_dir="", **kernelspec)

    return AsyncKernelManager(kernel_name=name, kernel_spec_manager=OneKernelspec())


def _with_provisioner(
    name: str, kernelspec: Mapping[str, Any], kernel_id: str
) -> tuple[Any, SandboxProvisioner]:
    """A manager and the provisioner of a kernel that runs already; a new id if it has none."""
    from jupyter_client.provisioning.factory import KernelProvisionerFactory

    from sandbox_kernel.jupyter.provisioner import SandboxProvisioner

    manager = _manager(name, kernelspec)
    manager.kernel_id = kernel_id or str(uuid.uuid4())
    provisioner = KernelProvisionerFactory.instance().create_provisioner_instance(
        manager.kernel_id, manager.kernel_spec, parent=manager
    )
    assert isinstance(provisioner, SandboxProvisioner)
    return manager, provisioner


def _kernelspec(
    kernel: str | None, backend: str | None, settings: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Name and contents of the kernelspec, with these settings. SpecError if it is not ours."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    from sandbox_kernel.jupyter.kernelspec import PROVISIONER, template

    if kernel is None:
        found = template()
        chosen = backend or DEFAULT_BACKEND
        name = PROVISIONER if chosen == DEFAULT_BACKEND else f"{PROVISIONER}-{chosen}"
    else:
        name = kernel
        try:
            found = KernelSpecManager().get_kernel_spec(kernel).to_dict()
        except NoSuchKernel:
            raise SpecError(
                f"Jupyter has no kernel {kernel!r}, so no notebook was opened. `sandbox-kernel "
                f"list` shows those that run in a sandbox; without `kernel` it is ipykernel."
            ) from None
    provisioner = found.get("metadata", {}).get("kernel_provisioner", {})
    if provisioner.get("provisioner_name") != PROVISIONER:
        raise SpecError(
            f"The kernel {kernel!r} does not run in a sandbox, so no notebook was opened. Name one "
            f"that `sandbox-kernel install` has made, or none."
        )
    given = {key: value for key, value in settings.items() if value is not None}
    given |= {"backend": backend} if backend else {}
    config = {**provisioner.get("config", {}), **given}
    found["metadata"] = {
        **found["metadata"],
        "kernel_provisioner": {**provisioner, "config": config, GIVEN: sorted(given)},
    }
    return name, found
