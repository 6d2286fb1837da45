"""The network and the service fail in every way that they can: nothing is doubled or lost."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import Any

import pytest

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
)
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes import wrapped_command
from sandbox_kernel.sandboxes.superserve import SuperserveClient
from sandbox_kernel.sandboxes.superserve import client as module
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background
from tests.conformance.kernels import execute, kernel, sandboxed
from tests.conformance.processes import not_running
from tests.helpers.waiting import until

from ..emulators.running import Running
from ..hosted.sandboxes import LIMIT, creations, sandbox, set_status
from .sandboxes import at_the_service

CREATE = "POST /sandboxes$"


# --- creating


@pytest.mark.parametrize(
    "fault",
    [{"kind": "lose"}, pytest.param({"kind": "slow", "seconds": 35}, marks=pytest.mark.long)],
)
async def test_a_create_that_times_out_after_succeeding(
    client: SuperserveClient, emulator: Running, fault: dict[str, Any]
) -> None:
    """The answer is lost: the one sandbox that was made is found again and used."""
    emulator.fault(CREATE, **fault)
    async with sandbox(client, start_timeout=100) as handle:
        assert (await handle.shell("echo mine", timeout=LIMIT)).stdout == "mine\n"
        assert creations(emulator) == 1
        assert [found["id"] for found in at_the_service(emulator)] == [handle.id]
    assert at_the_service(emulator) == []


async def test_what_a_request_made_is_found_when_the_label_is_another(
    client: SuperserveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request alone tells: nothing is left behind by who has set another label meanwhile."""
    async with sandbox(client) as handle:
        monkeypatch.setenv("SANDBOX_KERNEL_LABEL", "another")
        monkeypatch.setattr(module, "_LOOK_UP", 0.0)
        assert await client._look_up(Records().load("superserve", handle.name)) == handle.id


async def test_a_create_that_arrives_twice(client: SuperserveClient, emulator: Running) -> None:
    """One of the two sandboxes is used, the other one is deleted."""
    emulator.fault(CREATE, "twice")
    async with sandbox(client) as handle:
        assert creations(emulator) == 2
        assert [found["id"] for found in at_the_service(emulator)] == [handle.id]


async def test_a_create_that_fails_leaves_nothing(
    client: SuperserveClient, emulator: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the service nor on this disk, and it is not tried a second time."""
    monkeypatch.setattr(module, "_LOOK_UP", 0.5)
    faults: tuple[tuple[dict[str, Any], type[SandboxError]], ...] = (
        ({"kind": "status", "status": 503}, SandboxUnavailable),
        ({"kind": "status", "status": 401}, SandboxUnavailable),
        ({"kind": "status", "status": 409}, SandboxError),
        ({"kind": "drop"}, SandboxUnavailable),
    )
    for fault, error in faults:
        emulator.clear()
        emulator.fault(CREATE, **fault)
        with pytest.raises(error, match=r"'failing' was not created"):
            await client.create(SandboxSpec(name="failing"))
        assert creations(emulator) == 1
        assert at_the_service(emulator) == []
        assert await client.list() == []


async def test_a_rate_limit_is_waited_for(client: SuperserveClient, emulator: Running) -> None:
    """429 is a refusal, so asking again makes one sandbox only; a quota is not waited for."""
    limited = {"error": {"code": "rate_limited", "message": "slow down"}}
    emulator.fault(CREATE, "status", status=429, times=2, body=limited)
    async with sandbox(client):
        assert len(at_the_service(emulator)) == 1
    emulator.ask("POST", "/_emulator/settings", {"max_active": 0})
    try:
        with pytest.raises(SandboxUnavailable, match=r"too_many_sandboxes.*Pause or remove"):
            await client.create(SandboxSpec(name="one-too-many"))
    finally:
        emulator.ask("POST", "/_emulator/settings", {"max_active": 100})


async def test_what_comes_into_being_late_is_deleted(
    client: SuperserveClient, emulator: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service makes the sandbox after it was given up: the next create clears it away."""
    monkeypatch.setattr(module, "_LOOK_UP", 0.2)
    emulator.fault(CREATE, "lose")
    emulator.fault("GET /sandboxes$", "status", status=500, times=50)
    with pytest.raises(SandboxUnavailable):
        await client.create(SandboxSpec(name="late"))
    assert len(at_the_service(emulator)) == 1
    emulator.clear()
    async with sandbox(client, name="late") as handle:
        assert [found["id"] for found in at_the_service(emulator)] == [handle.id]


async def test_a_cancelled_create_leaves_nothing(
    client: SuperserveClient, emulator: Running
) -> None:
    """Whoever waited for it has gone."""
    emulator.fault(CREATE, "slow", seconds=2)
    creating = asyncio.ensure_future(client.create(SandboxSpec(name="cancelled")))
    await until(lambda: at_the_service(emulator))
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert at_the_service(emulator) == []
    assert await client.list() == []


# --- states


async def test_token_rotation(client: SuperserveClient, emulator: Running) -> None:
    """Whoever else uses the sandbox gets a new token, and ours is good for nothing: a fresh one is
    asked for, and streams that are open stay so."""
    async with sandbox(client) as handle, await handle.open_stream(["cat"]) as stream:
        other = SuperserveClient()
        for number in range(3):
            again = await other.get(handle.name)
            assert (await again.shell("echo theirs", timeout=LIMIT)).ok
            assert (await handle.shell("echo ours", timeout=LIMIT)).stdout == "ours\n"
            await stream.write(b"%d\n" % number)
            assert await stream.read() == b"%d\n" % number
        await other.close()


async def test_a_failed_sandbox(client: SuperserveClient, emulator: Running) -> None:
    """Is said to have failed; it is neither resumed nor replaced, and can be removed."""
    async with sandbox(client) as handle:
        set_status(emulator, handle, "failed")
        assert (await handle.info()).status == "stopped"
        for attempt in (handle.exec("true"), handle.resume(), handle.pause()):
            with pytest.raises(SandboxGone, match=rf"{handle.name}.*failed"):
                await attempt
        assert creations(emulator) == 1


async def test_a_sandbox_that_the_service_does_not_know_any_more(
    client: SuperserveClient, emulator: Running
) -> None:
    """It was deleted elsewhere: gone, and not replaced."""
    async with sandbox(client) as handle:
        await SuperserveClient().delete_remote(handle.id)
        assert (await handle.info()).status == "gone"
        for attempt in (handle.exec("true"), handle.resume(), handle.pause()):
            with pytest.raises(SandboxGone, match=handle.name):
                await attempt
        assert creations(emulator) == 1


async def test_an_unknown_status(client: SuperserveClient, emulator: Running) -> None:
    """A word that the SDK does not know is no reason to do anything."""
    async with sandbox(client) as handle:
        set_status(emulator, handle, "hibernating")
        assert (await handle.info()).status == "unknown"
        for attempt in (handle.exec("true"), handle.resume(), handle.pause()):
            with pytest.raises(SandboxError, match=rf"{handle.name}.*hibernating.*install -U"):
                await attempt
        assert creations(emulator) == 1
        set_status(emulator, handle, "active")


@pytest.mark.parametrize("status", ["starting", "resuming", "migrating", "pausing"])
async def test_states_on_the_way_are_waited_for(
    client: SuperserveClient, emulator: Running, status: str
) -> None:
    """A command waits until the sandbox is active."""
    async with sandbox(client) as handle:
        set_status(emulator, handle, status)
        waiting = asyncio.ensure_future(handle.shell("echo at last", timeout=LIMIT))
        done, _ = await asyncio.wait({waiting}, timeout=1)
        assert not done
        set_status(emulator, handle, "active")
        assert (await waiting).stdout == "at last\n"


async def test_a_slow_resume_is_polled_for(client: SuperserveClient, emulator: Running) -> None:
    """And one that another process has begun, too."""
    async with sandbox(client) as handle:
        await handle.pause()
        emulator.ask("POST", "/_emulator/settings", {"resume_seconds": 1.5})
        await asyncio.gather(handle.resume(), (await SuperserveClient().get(handle.name)).resume())
        assert (await handle.info()).status == "running"
        assert (await handle.shell("echo on", timeout=LIMIT)).stdout == "on\n"


async def test_errors_of_the_control_plane_pass(
    client: SuperserveClient, emulator: Running
) -> None:
    """The SDK asks again where that is safe; what stays wrong is told, with what to do."""
    async with sandbox(client) as handle:
        emulator.fault("GET /sandboxes/", "status", status=503, times=2)
        assert (await handle.info()).status == "running"
        emulator.fault(
            "GET /sandboxes/", "status", status=429, times=1, headers={"Retry-After": "0"}
        )
        assert (await handle.info()).status == "running"
        emulator.fault("GET /sandboxes/", "status", status=401, times=1)
        with pytest.raises(SandboxUnavailable, match="SUPERSERVE_API_KEY"):
            await handle.info()
        emulator.fault(r"/pause$", "status", status=409, times=1)
        await handle.pause()  # looked again, and asked again
        assert (await handle.info()).status == "paused"


# --- streams


async def test_output_that_splits_characters(client: SuperserveClient, emulator: Running) -> None:
    """The service's messages end in the middle of characters, and of our own marks."""
    emulator.ask("POST", "/_emulator/settings", {"chunk": 1})
    text = "Grüße, 世界 😀 " * 20
    async with sandbox(client) as handle:
        result = await handle.exec("cat", stdin=text.encode(), timeout=LIMIT)
        assert (result.stdout, result.stderr, result.exit_code) == (text, "", 0)
        script = f"printf %s '{text}' >&2; exit 7"
        result = await handle.exec("/bin/sh", ["-c", script], timeout=LIMIT)
        assert (result.stdout, result.stderr, result.exit_code) == ("", text, 7)


async def test_binary_data_is_exact(client: SuperserveClient, emulator: Running) -> None:
    """No byte is decoded on the way, nor taken for one of our marks."""
    data = random.Random(5).randbytes(300_000) + b"\0" * 5000
    emulator.ask("POST", "/_emulator/settings", {"chunk": 1021})
    async with sandbox(client) as handle, await handle.open_stream(["cat"]) as stream:

        async def feed() -> None:
            await stream.write(data)
            await stream.close_stdin()

        async def collect() -> bytes:
            found = b""
            while piece := await stream.read():
                found += piece
            return found

        found, _ = await asyncio.gather(collect(), feed())
        assert hashlib.sha256(found).digest() == hashlib.sha256(data).digest()


async def test_a_large_request_is_split(client: SuperserveClient) -> None:
    """The service takes messages of 64 KiB: arguments and variables may be larger than that."""
    async with sandbox(client) as handle:
        words = ["x" * 100_000, "y" * 20_000]
        result = await handle.exec(
            "/bin/sh",
            ["-c", 'echo "${#1} ${#2} ${#V}"', "sh", *words],
            env={"V": "z" * 60_000},
            timeout=LIMIT,
        )
        assert result.stdout == "100000 20000 60000\n"


async def test_a_stream_that_is_dropped(client: SuperserveClient, emulator: Running) -> None:
    """Its reader sees the end, ``wait`` says what happened, and nothing runs on: the service
    itself would let it."""
    async with sandbox(client) as handle:
        emulator.fault("GET /exec/connect", "cut", bytes=100_000)
        script = "head -c 1000000 /dev/zero; exec sleep 31536009"
        stream = await handle.open_stream(["/bin/sh", "-c", script])
        received = 0
        while piece := await stream.read():
            received += len(piece)
        assert received <= 100_000
        with pytest.raises(SandboxError, match=f"connection to sandbox '{handle.name}' broke"):
            await stream.wait()
        await stream.close()
        assert await not_running(handle, "31536009")


async def test_exec_timeout_kills_the_remote_process(
    client: SuperserveClient, emulator: Running
) -> None:
    """With its children; also when the connection is lost just then."""
    async with sandbox(client) as handle:
        script = "sleep 31536010 & sleep 31536010; true"
        with pytest.raises(SandboxTimeout):
            await handle.exec("/bin/sh", ["-c", script], timeout=1)
        assert await not_running(handle, "31536010")


async def test_a_template_without_python(
    client: SuperserveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is told in plain words."""
    async with sandbox(client) as handle:
        monkeypatch.setattr(wrapped_command, "PYTHON", "python9")
        with pytest.raises(ExecFailed, match=r"python9 is needed"):
            await handle.exec("true", timeout=LIMIT)


async def test_an_unknown_template(client: SuperserveClient) -> None:
    """Is the service's refusal, with its words."""
    with pytest.raises(SandboxNotFound, match=r"no/such.*not found"):
        await client.create(SandboxSpec(image="no/such"))


async def test_a_slow_stream(client: SuperserveClient, emulator: Running) -> None:
    """Output that trickles is passed on as it comes."""
    async with sandbox(client) as handle:
        emulator.ask("POST", "/_emulator/settings", {"rate": 40_000, "chunk": 1000})
        script = "head -c 40000 /dev/zero | tr '\\0' x"
        result = await handle.exec("/bin/sh", ["-c", script], timeout=LIMIT)
        assert result.stdout == "x" * 40_000


@pytest.mark.faults
def test_a_kernel_at_a_service_that_fails_all_the_time(
    emulator: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams are cut, refused and answered with errors; the cell's output is whole."""
    monkeypatch.setenv("SANDBOX_KERNEL_BACKEND", "superserve")
    with kernel() as (manager, kernel_client):
        emulator.fault("GET /exec/connect", "cut", times=3, bytes=60_000)
        emulator.fault("GET /exec/connect", "status", times=2, status=503)
        emulator.fault("GET /exec/connect", "status", times=1, status=401)
        emulator.fault("POST .*/activate", "status", times=2, status=500)
        background.background_loop().call_soon_threadsafe(sandboxed(manager).tunnel.cut)
        code = "for i in range(40_000): print(i, flush=i % 200 == 0)"
        reply, printed = execute(kernel_client, code)
        assert reply["status"] == "ok"
        assert printed.split() == [str(number) for number in range(40_000)]
        assert sandboxed(manager).tunnel.reconnects >= 3
    assert at_the_service(emulator) == []
