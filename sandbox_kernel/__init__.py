"""Jupyter kernels that run inside a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "BlockingNotebook",
    "Capabilities",
    "ExecResult",
    "ExecStream",
    "Job",
    "Notebook",
    "Result",
    "SandboxClient",
    "SandboxError",
    "SandboxHandle",
    "SandboxInfo",
    "SandboxSpec",
    "SandboxUnavailable",
    "SandboxedKernel",
    "backend_names",
    "load_backend",
]

_HOME = {
    "agents.blocking": ("BlockingNotebook",),
    "agents.jobs": ("Job",),
    "agents.notebook": ("Notebook",),
    "agents.result": ("Result",),
    "errors": ("SandboxError", "SandboxUnavailable"),
    "kernels": ("SandboxedKernel",),
    "sandboxes.backends": ("backend_names", "load_backend"),
    "sandboxes.base": ("ExecResult", "ExecStream", "SandboxClient", "SandboxHandle", "SandboxInfo"),
    "sandboxes.capabilities": ("Capabilities",),
    "spec": ("SandboxSpec",),
}

if TYPE_CHECKING:
    from sandbox_kernel.agents.blocking import BlockingNotebook
    from sandbox_kernel.agents.jobs import Job
    from sandbox_kernel.agents.notebook import Notebook
    from sandbox_kernel.agents.result import Result
    from sandbox_kernel.errors import SandboxError, SandboxUnavailable
    from sandbox_kernel.kernels import SandboxedKernel
    from sandbox_kernel.sandboxes.backends import backend_names, load_backend
    from sandbox_kernel.sandboxes.base import (
        ExecResult,
        ExecStream,
        SandboxClient,
        SandboxHandle,
        SandboxInfo,
    )
    from sandbox_kernel.sandboxes.capabilities import Capabilities
    from sandbox_kernel.spec import SandboxSpec


def __getattr__(name: str) -> Any:
    """Import on first use: most users need only a part of this package."""
    import importlib

    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"sandbox_kernel.{home}"), name)
    raise AttributeError(f"module 'sandbox_kernel' has no attribute {name!r}")


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """For Jupyter Server, which imports this package by the extension's name."""
    from sandbox_kernel.jupyter.server.app import SandboxServer

    return [{"module": "sandbox_kernel.jupyter.server.app", "app": SandboxServer}]
