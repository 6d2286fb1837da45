"""Mistakes of the host's own: they are told as such, and the sandbox is not blamed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sandbox_kernel.errors import InternalError
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.wire.peer import Peer
from tests.helpers.waiting import until

pytestmark = pytest.mark.usefixtures("folder")


def failed(kernel: SandboxedKernel) -> BaseException | None:
    return kernel.tunnel.failure


async def test_the_agent_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An event's handler that raises is logged, and the session goes on; a link that cannot be
    taken into use ends it as a mistake in sandbox-kernel, not as an agent's bad message."""

    def mistaken(*_: object, **__: object) -> Any:
        raise TypeError("ours")

    log = logging.getLogger("mistakes")
    kernel = await SandboxedKernel.create(LocalClient(), SandboxSpec(), log)
    try:
        kernel.tunnel.control._on_event = mistaken
        await kernel.launch(["/bin/true"], env={}, cwd="/", connection={})
        await until(lambda: "was not handled" in caplog.text)
        assert kernel.handle.name in caplog.text
        assert (await kernel.tunnel.control.call("info"))["version"] == 1
        assert not failed(kernel)

        monkeypatch.setattr(Peer, "attach", mistaken)
        kernel.tunnel.cut()
        failure = await until(lambda: failed(kernel))
        assert isinstance(failure, InternalError)
        assert "mistake in sandbox-kernel" in str(failure)
        assert "agent" not in str(failure)
    finally:
        await kernel.remove()
