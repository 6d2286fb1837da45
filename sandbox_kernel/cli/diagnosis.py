"""Trying out a backend, for ``doctor`` and ``install``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sandbox_kernel.errors import SandboxError, SandboxUnavailable
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import Diagnosis

TIMEOUT = 120.0


async def diagnose(backend: str) -> Sequence[Diagnosis]:
    """What ``doctor`` says about one backend. Never raises for what it finds."""
    try:
        client = load_backend(backend)
    except SandboxUnavailable as error:
        fix = f"pip install 'sandbox-kernel[{backend}]'"
        return [Diagnosis(False, f"its SDK cannot be imported: {error.__cause__ or error}", fix)]
    except SandboxError as error:
        return [Diagnosis(False, str(error))]
    try:
        checks = await asyncio.wait_for(client.diagnose(), TIMEOUT)
    except asyncio.TimeoutError:
        return [Diagnosis(False, f"it did not answer within {TIMEOUT:g} s", "Try again later.")]
    except (SandboxError, OSError) as error:
        return [Diagnosis(False, f"the check itself failed: {error}")]
    finally:
        await client.close()
    return checks or [Diagnosis(None, "nothing to check")]
