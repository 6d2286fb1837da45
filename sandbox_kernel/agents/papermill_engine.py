"""The papermill engine ``sandbox``: ``papermill --engine sandbox in.ipynb out.ipynb``.

papermill finds it by its entry point. Everything is as with papermill's own engine, but that the
notebook's kernel runs in a sandbox: a kernel of ours as it is, any other one with our provisioner,
which the environment (``SANDBOX_KERNEL_*``) and ``sandbox_settings`` configure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from papermill.engines import NBClientEngine
from traitlets import default

from sandbox_kernel.jupyter.kernelspec import PROVISIONER, list_kernelspecs


class SandboxEngine(NBClientEngine):
    """papermill's engine, with kernels in sandboxes."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        sandbox_settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Run a notebook's cells. ``sandbox_settings``: of the sandbox, by name, from the caller of
        ``papermill.execute_notebook``; weaker than the environment, as those of a kernelspec."""
        managers = _managers_with(sandbox_settings or {})
        super().execute_managed_notebook(
            nb_man, kernel_name, kernel_manager_class=managers, **options
        )


class ConfinedKernelSpecs(KernelSpecManager):
    """The kernelspecs of Jupyter, each with our provisioner."""

    def __init__(self, settings: Mapping[str, Any], **traits: Any) -> None:
        super().__init__(**traits)
        self._settings = settings

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        spec: KernelSpec = super().get_kernel_spec(kernel_name)
        ours = next((one for one in list_kernelspecs() if one.name == kernel_name), None)
        if ours is not None and ours.launcher:
            return spec  # it makes its sandbox itself
        config = {**(ours.config if ours else {}), **self._settings}
        provisioner = {"provisioner_name": PROVISIONER, "config": config}
        spec.metadata = {**spec.metadata, "kernel_provisioner": provisioner}
        return spec


def _managers_with(settings: Mapping[str, Any]) -> type[AsyncKernelManager]:
    class SandboxKernelManager(AsyncKernelManager):
        @default("kernel_spec_manager")
        def _confined(self) -> KernelSpecManager:
            return ConfinedKernelSpecs(settings, parent=self)

    return SandboxKernelManager
