"""Runs a notebook from its first cell to its last in a sandbox of its own.

For ``sandbox-kernel run``, ``policy learn`` and pipelines (``pipeline``). Whatever happens, the
notebook is written as far as it ran, and the sandbox is removed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel.agents.notebook import Notebook
from sandbox_kernel.agents.prepared_notebook import PlannedCell, PreparedNotebook, prepare
from sandbox_kernel.agents.result import Result
from sandbox_kernel.agents.run_report import Ending, FailedCell, RunEvent, RunReport
from sandbox_kernel.atomic_write import write_atomically
from sandbox_kernel.errors import SandboxError, SpecError, SpecRefused
from sandbox_kernel.untrusted_text import printable

Tell = Callable[[RunEvent], None]
_MOST_ERROR = 500
"""Characters of an error in one line."""
_ASKED = "StdinNotImplementedError"


@dataclass(frozen=True)
class RunOptions:
    """What the runs of several notebooks have in common."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    cell_timeout: float | None = None
    deadline: float | None = None
    """Seconds from ``began``."""
    kernel: str | None = None
    backend: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the sandbox and the kernel, by name (``spec.py``)."""
    keep_going: bool = False
    """Also run what comes after a cell that failed."""
    began: float = field(default_factory=time.monotonic)


async def run_notebook(
    path: Path, output: Path, options: RunOptions, tell: Tell = lambda event: None
) -> RunReport:
    """Run one notebook, and write it to ``output`` (which may be ``path``). Raises nothing but
    CancelledError, after its clean-up."""
    return await _Run(path, output, options, tell).go()
