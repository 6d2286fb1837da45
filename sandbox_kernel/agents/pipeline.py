"""Runs several notebooks, some of them at once. For ``sandbox-kernel run --jobs``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sandbox_kernel.agents.notebook_run import RunOptions, Tell, run_notebook
from sandbox_kernel.agents.run_report import RunReport


async def run_notebooks(
    runs: Sequence[tuple[Path, Path]],
    options: RunOptions,
    *,
    jobs: int = 1,
    tell: Tell = lambda step: None,
) -> list[RunReport]:
    """Run each notebook (first) and write it (second), at most ``jobs`` at once. Reports are in the
    order given. One that fails does not stop the others. If it is cancelled,
    it ends when every run has cleaned up."""
    places = asyncio.Semaphore(jobs)

    async def one(path: Path, output: Path) -> RunReport:
        async with places:
            return await run_notebook(path, output, options, tell)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(path, output)) for path, output in runs]
    return [task.result() for task in tasks]


def exit_code(reports: Sequence[RunReport]) -> int:
    """That of the first notebook which did not pass, in the order given."""
    return next((code for one in reports if (code := one.ending.exit_code)), 0)
