"""Where a notebook's settings come from."""

from __future__ import annotations

import pytest

from sandbox_kernel import Notebook
from sandbox_kernel.errors import SandboxError


async def test_what_a_program_asks_for_is_what_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment fills in what the program leaves open, and changes nothing else: not in a
    restart either, nor where another process goes on."""
    monkeypatch.setenv("SANDBOX_KERNEL_MEMORY_MIB", "700")
    monkeypatch.setenv("SANDBOX_KERNEL_PROCESSES", "90")
    monkeypatch.setenv("SANDBOX_KERNEL_BACKEND", "no-such-backend")
    async with Notebook.open(backend="local", memory_mib=600, processes=None) as notebook:
        provisioner = notebook._session.kernel.provisioner
        assert provisioner.kernel is not None
        spec = provisioner.kernel.handle.spec
        assert (notebook.backend, spec.memory_mib, spec.processes) == ("local", 600, 90)
        await notebook.restart()
        assert provisioner.configuration().spec.memory_mib == 600
        await notebook.detach()
        async with Notebook.attach(notebook.sandbox) as again:
            assert again._session.kernel.provisioner.configuration().spec.memory_mib == 600
    with pytest.raises(SandboxError, match="no-such-backend"):
        await Notebook.open()
