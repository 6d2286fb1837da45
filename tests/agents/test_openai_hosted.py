"""The OpenAI Agents SDK's client at a hosted service, whose sandboxes cost money while they run."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents.sandbox.errors import WorkspaceStartError

from sandbox_kernel.agents.openai_agents import SandboxKernelClient, SandboxKernelClientOptions
from sandbox_kernel.agents.openai_agents import sandbox as sandbox_module
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.tunnel.background import run
from tests.helpers.coroutines import RunCoroutine, on_own_loop
from tests.helpers.own_folders import own_folders

from ..emulators.running import Running, started
from ..superserve.sandboxes import at_the_service

PAUSED = SandboxKernelClientOptions("superserve", pause_on_exit=True)


@pytest.fixture(scope="session")
def run_coroutine() -> RunCoroutine:
    """An application has a loop of its own, which is not that of the sandboxes."""
    return on_own_loop


@pytest.fixture(scope="module")
def emulator() -> Iterator[Running]:
    with own_folders(), started("superserve") as service, pytest.MonkeyPatch.context() as patch:
        for name, value in service.env.items():
            patch.setenv(name, value)
        patch.setenv("SANDBOX_KERNEL_LABEL", f"test-{secrets.token_hex(4)}")
        yield service
        assert at_the_service(service) == []


@pytest.mark.slow
async def test_a_paused_sandbox_goes_on_and_delete_removes_it(emulator: Running) -> None:
    """Closing pauses it, a resume by state wakes it with its processes, and a paused one is
    deleted, too: at the service nothing is left."""
    client = SandboxKernelClient()
    session = await client.create(options=PAUSED)
    try:
        async with session:
            await session.write(Path("note.txt"), io.BytesIO(b"kept"))
            await session.exec("sleep 4321 > /dev/null 2>&1 &")
        assert [one["status"] for one in at_the_service(emulator)] == ["paused"]
        stored = json.dumps(client.serialize_session_state(session.state))
        assert emulator.env["SUPERSERVE_API_KEY"] not in stored
        other = SandboxKernelClient()
        async with await other.resume(other.deserialize_session_state(json.loads(stored))) as found:
            with await found.read(Path("note.txt")) as file:
                assert file.read() == b"kept"
            assert b"sleep" in (await found.exec("cat /proc/[0-9]*/comm")).stdout
            assert len(at_the_service(emulator)) == 1
        assert [one["status"] for one in at_the_service(emulator)] == ["paused"]
        await other.close()
    finally:
        await client.delete(session)
        await client.close()
    assert at_the_service(emulator) == []


@pytest.mark.slow
async def test_a_service_that_fails_gets_no_second_sandbox(emulator: Running) -> None:
    """An error of the service is no proof that the sandbox is gone."""
    client = SandboxKernelClient()
    session = await client.create(options=PAUSED)
    try:
        await session.start()
        resumed = await client.resume(session.state.model_copy())
        emulator.fault("GET /sandboxes", "status", status=500, times=100)
        with pytest.raises(WorkspaceStartError):
            await resumed.start()
        emulator.clear()
        assert len(at_the_service(emulator)) == 1
        await resumed.start()
        assert len(at_the_service(emulator)) == 1
    finally:
        emulator.clear()
        await client.delete(session)
        await client.close()


@pytest.mark.slow
async def test_a_sandbox_that_was_paused_meanwhile_is_woken(
    emulator: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service pauses what nobody uses for a while; the model may take its time."""
    monkeypatch.setattr(sandbox_module, "_IDLE", 0.0)
    client = SandboxKernelClient()
    session = await client.create(options=PAUSED)
    try:
        await session.start()
        service = load_backend("superserve")
        await run((await run(service.get(session.state.sandbox))).pause())  # type: ignore[attr-defined]
        await run(service.close())
        assert (await session.exec("echo awake")).stdout == b"awake\n"
    finally:
        await client.delete(session)
        await client.close()
