"""Tasks that belong to one object, which ends them when it ends itself.

For objects that live longer than one call, where ``asyncio.TaskGroup`` does not fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnedTasks:
    """Holds its tasks until they are done. Used on one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __bool__(self) -> bool:
        """Whether any task still runs."""
        return bool(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self, timeout: float) -> None:
        """Wait for the tasks to end, but not longer than that."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended. A task may call this for the others."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
