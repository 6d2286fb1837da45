"""What ``Notebook.open`` and ``Notebook.attach`` return: to be awaited, or for ``async with``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox_kernel.agents.notebook import Notebook


class Opening:
    """Nothing happens before it is awaited or entered; each does it once."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, Notebook]]) -> None:
        self._begin = begin
        self._notebook: Notebook | None = None

    def __await__(self) -> Generator[Any, None, Notebook]:
        return self._begin().__await__()

    async def __aenter__(self) -> Notebook:
        self._notebook = await self._begin()
        return self._notebook

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._notebook is not None
        await self._notebook.close()
