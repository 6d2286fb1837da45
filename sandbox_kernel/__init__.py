"""Jupyter kernels that run inside a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Capabilities",
    "ExecResult",
    "ExecStream",
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
    "Capabilities": "sandboxes.capabilities",
    "ExecResult": "sandboxes.base",
    "ExecStream": "sandboxes.base",
    "SandboxClient": "sandboxes.base",
    "SandboxError": "errors",
    "SandboxHandle": "sandboxes.base",
    "SandboxInfo": "sandboxes.base",
    "SandboxSpec": "spec",
    "SandboxUnavailable": "errors",
    "SandboxedKernel": "kernels",
    "backend_names": "sandboxes.backends",
    "load_backend": "sandboxes.backends",
}

if TYPE_CHECKING:
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
    """Import on first use: many users of a part of this package need no more of it."""
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'sandbox_kernel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sandbox_kernel.{_HOME[name]}"), name)


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """For Jupyter Server, which imports this package by the extension's name."""
    from sandbox_kernel.jupyter.server.app import SandboxServer

    return [{"module": "sandbox_kernel.jupyter.server.app", "app": SandboxServer}]
