"""The error for a framework that is not installed."""

from __future__ import annotations

from sandbox_kernel.errors import SandboxUnavailable


def missing(extra: str, error: ImportError) -> SandboxUnavailable:
    """To raise where a module's framework cannot be imported."""
    return SandboxUnavailable(
        f"This needs another package: pip install 'sandbox-kernel[{extra}]' ({error})."
    )
