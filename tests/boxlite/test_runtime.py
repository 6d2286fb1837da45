"""What the SDK does that must be lived with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("boxlite")

from boxlite import errors as sdk

from sandbox_kernel.sandboxes.boxlite import sdk_runtime
from sandbox_kernel.sandboxes.boxlite.sdk_runtime import Runtime

CREATED = (
    "internal error: spawn_failed: internal error: build failed: failed operation due to "
    "incompatible container status: `Created`"
)


class Box:
    """Refuses the first commands with these words, as BoxLite's does; then it runs them."""

    def __init__(self, *refusals: str) -> None:
        self.refusals = list(refusals)

    async def get(self, name: str) -> Box:
        return self

    async def exec(self, command: str, args: list[str], env: list[Any]) -> Box:
        if self.refusals:
            raise sdk.BoxliteError(self.refusals.pop(0))
        return self

    def stdin(self) -> None: ...

    def stdout(self) -> None: ...


def execute(box: Box) -> None:
    made = Runtime.__new__(Runtime)
    made._sdk = box
    asyncio.run(made.execute("box", "python3", []))


def test_a_box_that_is_not_ready_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a box takes its first command only a moment after its start."""
    monkeypatch.setattr(sdk_runtime, "_RETRY", 0.01)
    box = Box(CREATED, CREATED)
    execute(box)
    assert box.refusals == []


def test_other_refusals_are_told_at_once() -> None:
    """Such as that the image has no such program."""
    box = Box("internal error: spawn_failed: no such file", CREATED)
    with pytest.raises(sdk.BoxliteError, match="no such file"):
        execute(box)
    assert box.refusals == [CREATED]


def test_a_box_that_never_gets_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is told, when it has been waited for."""
    monkeypatch.setattr(sdk_runtime, "_RETRY", 0.01)
    monkeypatch.setattr(sdk_runtime, "_READY_TIMEOUT", 0.05)
    with pytest.raises(sdk.BoxliteError, match="Created"):
        execute(Box(*[CREATED] * 1000))
