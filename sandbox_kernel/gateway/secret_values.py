"""The value of a secret, held so that it is shown by mistake nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class SecretValue:
    """Text that repr, str, format, pickle, copy and JSON do not show. Only ``reveal`` does."""

    __slots__ = ("__reveal",)

    def __init__(self, text: str) -> None:
        self.__reveal: Callable[[], str] = lambda: text

    def reveal(self) -> str:
        return self.__reveal()

    def __len__(self) -> int:
        return len(self.__reveal())

    def __repr__(self) -> str:
        return "<the value of a secret>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __copy__(self) -> SecretValue:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SecretValue:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("The value of a secret is not serialized.")
