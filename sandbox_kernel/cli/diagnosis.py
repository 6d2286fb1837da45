"""Tries a backend, for ``doctor`` and ``install``."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Sequence

from sandbox_kernel.errors import SandboxError, SandboxUnavailable
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import Diagnosis
from sandbox_kernel.spec import DEFAULT_BACKEND

TIMEOUT = 120.0


async def diagnose(backend: str) -> Sequence[Diagnosis]:
    """What ``doctor`` says about one backend. Problems are results, not errors."""
    try:
        client = load_backend(backend)
    except SandboxUnavailable as error:
        fix = f"pip install 'sandbox-kernel[{backend}]'"
        return [Diagnosis(False, f"its SDK cannot be imported: {error.__cause__ or error}", fix)]
    except SandboxError as error:
        return [Diagnosis(False, str(error))]
    try:
        checks = await asyncio.wait_for(client.diagnose(), TIMEOUT)
    except TimeoutError:
        return [Diagnosis(False, f"it did not answer within {TIMEOUT:g} s", "Try again later.")]
    except (SandboxError, OSError) as error:
        return [Diagnosis(False, f"the check itself failed: {error}")]
    finally:
        await client.close()
    if backend == DEFAULT_BACKEND and all(check.ok is not False for check in checks):
        # Kernels of other backends cost money, or minutes.
        checks = [*checks, await _kernel(backend)]
    return checks or [Diagnosis(None, "nothing to check")]


async def _kernel(backend: str) -> Diagnosis:
    try:
        from sandbox_kernel.jupyter.trial_start import try_kernel  # lazy: start-up time

        problem = await asyncio.wait_for(try_kernel(backend), TIMEOUT)
    except TimeoutError:
        problem = f"it did not answer within {TIMEOUT:g} s"
    except Exception as error:  # noqa: BLE001  (an import that fails is a finding, too)
        problem = f"{type(error).__name__}: {error}"
    if problem:
        python = f"{sys.executable} (Python {platform.python_version()})"
        fix = f"The interpreter is {python}; `sandbox-kernel --debug doctor` logs more."
        return Diagnosis(False, f"no kernel can be started: {problem}", fix)
    return Diagnosis(True, "a kernel starts, and runs a cell")
