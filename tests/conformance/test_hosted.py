"""What hosted sandboxes add: they are paused and resumed, by anybody and at any time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import BlockingKernelClient, KernelManager
from jupyter_core.utils import run_sync

from sandbox_kernel.errors import SandboxGone, SandboxNotFound, SandboxPaused
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.tunnel import background
from sandbox_kernel.tunnel.tunnel import Tunnel
from sandbox_kernel.workspace import Store
from tests.helpers.coroutines import finish
from tests.helpers.waiting import LIMIT, until

from .conftest import Backend
from .kernels import execute, kernel, sandboxed


@pytest.fixture(autouse=True)
def hosted(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in this backend, if it is a hosted one."""
    if not backend.capabilities.hosted:
        pytest.skip("for hosted backends only")
    for name, value in backend.environment().items():
        monkeypatch.setenv(name, value)
    yield
    while _others:
        finish(_others.pop().close())


@contextlib.contextmanager
def configured(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Iterator[tuple[Any, Any]]:
    """A kernel with these settings."""
    for key, value in fields.items():
        monkeypatch.setenv(f"SANDBOX_KERNEL_{key.upper()}", str(value))
    with kernel() as (manager, client):
        yield manager, client


async def from_elsewhere(backend: Backend, name: str) -> SandboxHandle:
    """The sandbox as another process sees it."""
    _others.append(load_backend(backend.row.name))
    return await _others[-1].get(name)


_others: list[SandboxClient] = []


async def status(handle: SandboxHandle) -> str:
    return (await handle.info()).status


def wait_for(manager: KernelManager, wanted: str) -> None:
    handle = sandboxed(manager).handle

    async def reached() -> bool:
        return await status(handle) == wanted

    finish(until(reached))


# --- sandboxes


async def test_pause_and_resume(backend: Backend) -> None:
    """Processes stand still and go on; both calls are idempotent."""
    async with backend.sandbox() as handle:
        await handle.spawn(["/bin/sh", "-c", "while true; do date +%s%N >beat; sleep 0.05; done"])
        for _ in range(2):
            await handle.pause()
        assert await status(handle) == "paused"
        with pytest.raises(SandboxPaused, match=f"{handle.name}.*resume"):
            await handle.exec("true", timeout=LIMIT)
        assert await status(handle) == "paused", "a command must not resume it"
        for _ in range(2):
            await handle.resume()
        assert await status(handle) == "running"
        before = (await handle.shell("cat beat", timeout=LIMIT)).stdout

        async def beats() -> bool:
            return bool((await handle.shell("cat beat", timeout=LIMIT)).stdout != before)

        await until(beats)


async def test_paused_resume_without_name_collision(backend: Backend) -> None:
    """Another process resumes a paused sandbox by its name: the same one, and no second."""
    async with backend.sandbox() as handle:
        await handle.shell("echo mine > note", timeout=LIMIT)
        await handle.pause()
        other = await from_elsewhere(backend, handle.name)
        await other.resume()
        assert other.id == handle.id
        assert (await other.shell("cat note", timeout=LIMIT)).stdout == "mine\n"
        assert [n for n in await backend.client.list() if n == handle.name] == [handle.name]


async def test_reattach_by_id_without_orphaning(backend: Backend) -> None:
    """The provider's id leads to the same sandbox, and nothing is made on the way."""
    async with backend.sandbox() as handle:
        await handle.shell("echo mine > note", timeout=LIMIT)
        before = sorted(await backend.client.list())
        again = await from_elsewhere(backend, handle.id)
        assert (again.id, again.name) == (handle.id, handle.name)
        assert (await again.shell("cat note", timeout=LIMIT)).stdout == "mine\n"
        assert sorted(await backend.client.list()) == before


async def test_a_paused_sandbox_is_removed_as_any_other(backend: Backend) -> None:
    """Without being resumed."""
    handle = await backend.client.create(backend.spec())
    await handle.pause()
    await backend.client.remove(handle.name)
    assert await status(handle) == "gone"
    with pytest.raises(SandboxGone, match=handle.name):
        await handle.resume()


async def test_sandboxes_of_other_machines_are_seen(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Under the same label, though this one has no record of them; they can be paused and
    removed, too. Under another label they are not seen."""
    async with backend.sandbox() as handle:
        name = handle.name
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "another-machine"))
        another = load_backend(backend.row.name)
        assert name in await another.list()
        seen = await another.get(name)
        assert seen.id == handle.id
        await seen.pause()
        assert await status(seen) == "paused"
        await seen.resume()
        assert (await seen.shell("echo here", timeout=LIMIT)).stdout == "here\n"
        with monkeypatch.context() as patch:
            patch.setenv("SANDBOX_KERNEL_LABEL", "somebody-else")
            assert name not in await another.list()
            with pytest.raises(SandboxNotFound):
                await another.get(name)
        await another.remove(name)
        await another.close()
        monkeypatch.undo()
        assert await status(handle) == "gone"


# --- kernels


def count(backend: Backend, client: BlockingKernelClient, manager: Any, **times: float) -> None:
    """Run a cell that counts; pause its sandbox from elsewhere on the way, and resume it."""
    numbers, pause = int(times["seconds"] * 10), times["pause"]
    loop = background.background_loop()
    futures: list[Any] = []

    async def freeze() -> None:
        other = await from_elsewhere(backend, sandboxed(manager).handle.name)
        await other.pause()
        assert await status(other) == "paused"
        await asyncio.sleep(pause)
        await other.resume()

    def on_output(printed: list[str]) -> None:
        if not futures and sum(map(len, printed)) > 20:
            futures.append(asyncio.run_coroutine_threadsafe(freeze(), loop))

    code = f"import time\nfor i in range({numbers}): print(i, flush=True); time.sleep(0.1)"
    reply, printed = execute(client, code, on_output)
    futures[0].result(LIMIT)
    assert reply["status"] == "ok"
    assert printed.split() == [str(number) for number in range(numbers)]
    assert sandboxed(manager).tunnel.reconnects >= 1


@pytest.mark.faults
def test_a_running_cell_survives_pause_and_resume(backend: Backend) -> None:
    """Every number is printed once, and the kernel is never taken for dead."""
    with kernel() as (manager, client):
        count(backend, client, manager, seconds=4, pause=1)
        assert manager.is_alive()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cell_of_a_minute_survives_a_pause_of_ten_seconds(backend: Backend) -> None:
    """The same, longer than any time limit on the way."""
    with kernel() as (manager, client):
        count(backend, client, manager, seconds=60, pause=10)


def test_an_idle_kernel_is_paused_and_the_next_cell_resumes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client sees a kernel that is busy for a moment, never a dead one."""
    with configured(monkeypatch, idle_pause_seconds=2) as (manager, client):
        handle = sandboxed(manager).handle
        execute(client, "x = 'kept'")
        wait_for(manager, "paused")
        time.sleep(2)  # heartbeats go on, and must not resume it
        assert finish(status(handle)) == "paused"
        assert manager.is_alive()
        states: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "status":
                states.append(message["content"]["execution_state"])

        reply = client.execute_interactive("print(x)", output_hook=hook, timeout=LIMIT)
        assert reply["content"]["status"] == "ok"
        assert states[0] == "busy"
        assert manager.is_alive()
        assert finish(status(handle)) == "running"


async def is_on_its_way(tunnel: Tunnel) -> bool:
    """A client has sent something, which the tunnel has and the sandbox has not."""
    return tunnel.has_undelivered_input()


def test_a_cell_sent_before_the_pause_is_noticed_resumes_the_sandbox(backend: Backend) -> None:
    """The provider pauses the sandbox, and before the tunnel knows, somebody runs a cell: it must
    wake the sandbox as a cell does that is sent later. One that was not asked for anything since
    stays paused."""
    with kernel() as (manager, client):
        running = sandboxed(manager)
        tunnel = running.tunnel
        execute(client, "x = 'kept'")

        async def noticed() -> bool:
            return tunnel.paused

        async def freeze(gate: asyncio.Event) -> None:
            """Pause it from elsewhere; the tunnel hears of it when the gate is opened."""
            ask = running.handle.open_command

            async def later(command: Any) -> Any:
                await gate.wait()
                return await ask(command)

            running.handle.open_command = later  # type: ignore[method-assign]
            await (await from_elsewhere(backend, running.handle.name)).pause()

        async def gated() -> asyncio.Event:
            return asyncio.Event()

        loop, gate = background.background_loop(), finish(gated())
        finish(freeze(gate))
        sent = client.execute("print(x)")
        finish(until(partial(is_on_its_way, tunnel)))
        assert not tunnel.paused
        loop.call_soon_threadsafe(gate.set)
        reply = client.get_shell_msg(timeout=LIMIT)
        assert (reply["parent_header"]["msg_id"], reply["content"]["status"]) == (sent, "ok")
        assert finish(status(running.handle)) == "running"

        gate = finish(gated())
        finish(freeze(gate))
        loop.call_soon_threadsafe(gate.set)
        finish(until(noticed))
        time.sleep(1)  # long enough for it to be resumed, if something did that
        assert finish(status(running.handle)) == "paused"
        execute(client, "x")


def test_a_cell_that_waits_for_a_link_keeps_the_sandbox_from_being_paused(
    backend: Backend,
) -> None:
    """The link is down when a cell is sent, and the kernel, idle for all that is known, is to be
    paused. It is not, and the cell runs as soon as there is a link again."""
    with kernel() as (manager, client):
        running = sandboxed(manager)
        execute(client, "x = 'kept'")

        async def break_link() -> asyncio.Event:
            gate, ask = asyncio.Event(), running.handle.open_command

            async def later(command: Any) -> Any:
                await gate.wait()
                return await ask(command)

            running.handle.open_command = later  # type: ignore[method-assign]
            running.tunnel.cut()
            return gate

        gate = finish(break_link())
        sent = client.execute("print(x)")
        finish(until(partial(is_on_its_way, running.tunnel)))
        assert finish(running.pause()) is False
        background.background_loop().call_soon_threadsafe(gate.set)
        reply = client.get_shell_msg(timeout=LIMIT)
        assert (reply["parent_header"]["msg_id"], reply["content"]["status"]) == (sent, "ok")


def test_files_of_a_kernel_that_was_paused_from_elsewhere_are_saved_at_its_end(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only what we have paused ourselves, and saved before, need not be resumed for that."""
    store = str(tmp_path / "store")
    with configured(monkeypatch, store=store, workspace="w") as (manager, client):
        provisioner = manager.provisioner
        execute(client, "open('first', 'w').write('saved')")
        assert run_sync(provisioner.pause)()
        assert provisioner.at_rest
        execute(client, "open('second', 'w').write('unsaved')")
        assert not provisioner.at_rest

        async def noticed() -> bool:
            return bool(provisioner.paused)

        async def freeze() -> None:
            await (await from_elsewhere(backend, sandboxed(manager).handle.name)).pause()
            await until(noticed)

        finish(freeze())
        assert not provisioner.at_rest
        with pytest.raises(SandboxPaused, match="is paused, and its files"):
            run_sync(provisioner.save)(wake=False)
    latest = Store.open(store).latest("w")
    assert latest is not None
    assert latest.files == 2


@pytest.mark.slow
def test_a_busy_kernel_is_not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that is silent for longer than the limit is still at work."""
    with configured(monkeypatch, idle_pause_seconds=1) as (manager, client):
        assert execute(client, "import time; time.sleep(5); print('done')")[1] == "done\n"
        assert sandboxed(manager).tunnel.reconnects == 0


def test_closing_pauses_by_policy_and_the_next_kernel_goes_on(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``pause_on_exit`` the sandbox of a kernel that is shut down is paused; a kernel that is
    started with the same name has its files."""
    name = f"{backend.prefix}-paused"
    try:
        with configured(monkeypatch, pause_on_exit=True, name=name) as (manager, client):
            execute(client, "open('note', 'w').write('kept')")
            handle = sandboxed(manager).handle
        assert finish(status(handle)) == "paused"
        with configured(monkeypatch, pause_on_exit=True, name=name) as (manager, client):
            assert execute(client, "print(open('note').read())")[1] == "kept\n"
            assert sandboxed(manager).handle.id == handle.id
        assert finish(status(handle)) == "paused"
    finally:
        finish(backend.client.remove(name))


def test_closing_deletes_by_default(backend: Backend) -> None:
    """Nothing is left that costs money, also if the sandbox was paused just then."""
    with kernel() as (manager, _):
        running = sandboxed(manager)
        finish(running.pause())
        name = running.handle.name
    assert name not in finish(backend.client.list())


def test_a_lost_sandbox_is_not_made_anew_unasked(backend: Backend) -> None:
    """Restarting a kernel whose hosted sandbox is gone says so, unless ``recreate`` is set."""
    with kernel() as (manager, _):
        handle = sandboxed(manager).handle
        before = len(finish(backend.client.list()))
        finish(backend.client.remove(handle.name))
        finish(sandboxed(manager).wait())
        with pytest.raises(SandboxGone, match=r"recreate"):
            manager.restart_kernel(now=True)
        assert len(finish(backend.client.list())) <= before


GIGABYTE = 10**9


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_a_gigabyte_through_a_stream(backend: Backend) -> None:
    """Every byte is right, the host's memory stays as it was, and the sandbox is well."""
    block = random.Random(3).randbytes(2**20 - 7)
    blocks = -(-GIGABYTE // len(block))
    async with backend.sandbox() as handle:
        await handle.exec("/bin/sh", ["-c", "cat >block"], stdin=block, timeout=LIMIT)
        script = "i=0; while [ $i -lt $0 ]; do cat block; i=$((i+1)); done"
        expected, got, size, grown = hashlib.sha256(), hashlib.sha256(), 0, 0
        for _ in range(blocks):
            expected.update(block)
        before, began = _memory(), time.monotonic()
        async with await handle.open_stream(["/bin/sh", "-c", script, str(blocks)]) as stream:
            while piece := await stream.read():
                got.update(piece)
                size += len(piece)
                grown = max(grown, _memory() - before)
            assert await stream.wait() == 0
        seconds = time.monotonic() - began
        print(f"{size / 1e6:.0f} MB in {seconds:.0f} s; memory grew by {grown / 2**20:.0f} MiB")
        assert size == blocks * len(block)
        assert got.digest() == expected.digest()
        assert grown < 64 * 2**20
        assert (await handle.shell("echo well", timeout=LIMIT)).stdout == "well\n"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_gigabyte_of_a_kernels_output() -> None:
    """The same through a kernel's channels, in outputs of 50 MB."""
    with kernel() as (manager, client):
        received, sizes = 0, []
        while received < GIGABYTE:
            code = "from IPython.display import display\n"
            code += f"display({{'text/plain': '{received:012d}' * 4_200_000}}, raw=True)"
            outputs: list[str] = []

            def keep(message: dict[str, Any], outputs: list[str] = outputs) -> None:
                if message["msg_type"] == "display_data":
                    outputs.append(message["content"]["data"]["text/plain"])

            reply = client.execute_interactive(code, output_hook=keep, timeout=LIMIT)
            assert reply["content"]["status"] == "ok"
            assert "".join(outputs) == f"{received:012d}" * 4_200_000
            received += len(outputs[0])
            del outputs
            sizes.append(_memory())
        grown = max(sizes[5:]) - max(sizes[:5])
        print(f"{received / 1e6:.0f} MB; memory grew by {grown / 2**20:.0f} MiB after the first")
        assert grown < 128 * 2**20
        assert execute(client, "print('well')")[1] == "well\n"
        assert sandboxed(manager).tunnel.reconnects == 0


def _memory() -> int:
    """What this process has in memory now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
