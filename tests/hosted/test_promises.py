"""What each hosted backend promises by name; more is in the tests of each."""

from __future__ import annotations

import pytest

from sandbox_kernel.sandboxes.base import SandboxClient

from .sandboxes import LIMIT, sandbox
from .services import Hosted


async def test_endpoint_overrides_are_kept_on_resume(
    hosted: Hosted, client: SandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox that was made at another address is looked for there, whatever is set now."""
    async with sandbox(client) as handle:
        await handle.pause()
        for elsewhere in ("http://127.0.0.1:9", None):
            for variable in hosted.addresses:
                if elsewhere:
                    monkeypatch.setenv(variable, elsewhere)
                else:
                    monkeypatch.delenv(variable)
            again = await hosted.client().get(handle.name)
            await again.resume()
            assert (await again.shell("echo there", timeout=LIMIT)).stdout == "there\n"
            await again.pause()
