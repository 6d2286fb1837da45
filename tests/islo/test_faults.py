"""The network and the service fail in every way that they can: nothing is doubled or lost."""

from __future__ import annotations

import asyncio
import hashlib
import random

import pytest

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxGone,
    SandboxPaused,
    SandboxTimeout,
    SandboxUnavailable,
    SpecError,
)
from sandbox_kernel.sandboxes.islo import IsloClient
from sandbox_kernel.sandboxes.islo import handle as module
from sandbox_kernel.spec import SandboxSpec
from tests.conformance.processes import not_running, running
from tests.helpers.waiting import until

from ..emulators.running import Running
from ..hosted.sandboxes import LIMIT, creations, sandbox, set_status
from .sandboxes import account, settings

CREATE = "POST /sandboxes$"
EXEC = "POST /sandboxes/[^/]+/exec$"
STREAM = "POST /sandboxes/[^/]+/exec/stream$"


# --- creating


@pytest.mark.parametrize(
    "fault", [{"kind": "lose"}, {"kind": "twice"}, {"kind": "drop"}, {"kind": "status"}]
)
async def test_a_create_that_times_out_after_succeeding(
    client: IsloClient, emulator: Running, fault: dict[str, str]
) -> None:
    """However the answer is lost, there is one sandbox, and it is the one that is used."""
    emulator.fault(CREATE, **fault)
    async with sandbox(client) as handle:
        assert (await handle.shell("echo mine", timeout=LIMIT)).stdout == "mine\n"
        assert [found["id"] for found in account(emulator)["sandboxes"]] == [handle.id]
        assert len(account(emulator)["profiles"]) == 1


async def test_another_ones_sandbox_is_not_taken_for_ours(
    client: IsloClient, emulator: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Another machine has the name, and our create gets no answer: theirs is left alone."""
    async with sandbox(client, name="wanted") as theirs:
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", f"{tmp_path}/another-machine")
        for fault in (None, "drop"):
            if fault:
                emulator.fault(CREATE, fault)
            with pytest.raises(SandboxExists, match=r"'wanted'.*another machine"):
                await IsloClient().create(SandboxSpec(name="wanted"))
            found = account(emulator)
            assert [item["id"] for item in found["sandboxes"]] == [theirs.id]
            assert len(found["profiles"]) == 1
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", f"{tmp_path}/data")
        assert (await theirs.shell("echo well", timeout=LIMIT)).ok


async def test_a_create_that_fails_leaves_nothing(client: IsloClient, emulator: Running) -> None:
    """Neither in the account nor on this disk; the error says why."""
    settings(emulator, fail_create=True)
    with pytest.raises(SandboxGone, match=r"'failing'.*failed"):
        await client.create(SandboxSpec(name="failing"))
    settings(emulator, fail_create=False)
    for status, error in ((401, SandboxUnavailable), (402, SandboxUnavailable), (422, SpecError)):
        emulator.fault(CREATE, "status", status=status, times=2)
        with pytest.raises(error):
            await client.create(SandboxSpec(name="failing"))
        emulator.clear()
    with pytest.raises(SpecError, match="image"):
        await client.create(SandboxSpec(name="failing", image="registry.example/no-such-image"))
    assert account(emulator)["sandboxes"] == account(emulator)["profiles"] == []
    assert await client.list() == []


async def test_a_cancelled_create_leaves_nothing(client: IsloClient, emulator: Running) -> None:
    """Whoever waited for it has gone."""
    settings(emulator, start_seconds=3)
    creating = asyncio.ensure_future(client.create(SandboxSpec(name="cancelled")))
    await until(lambda: account(emulator)["sandboxes"])
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert account(emulator)["sandboxes"] == account(emulator)["profiles"] == []


async def test_a_rate_limit_is_waited_for(client: IsloClient, emulator: Running) -> None:
    """429 is a refusal: asking again, when the service says so, makes one sandbox only."""
    emulator.fault(CREATE, "status", status=429, times=2, headers={"Retry-After": "1"})
    async with sandbox(client):
        assert creations(emulator) == 3
        assert len(account(emulator)["sandboxes"]) == 1


# --- tokens


async def test_token_rotation(client: IsloClient, emulator: Running) -> None:
    """Session tokens are withdrawn and run out: new ones are had, and open streams stay open."""
    async with sandbox(client) as handle, await handle.open_stream(["cat"]) as stream:
        for number in range(3):
            emulator.ask("POST", "/_emulator/tokens/withdraw")
            await stream.write(b"%d\n" % number)
            assert await stream.read() == b"%d\n" % number
            emulator.ask("POST", "/_emulator/tokens/withdraw")
            assert (await handle.shell("echo well", timeout=LIMIT)).stdout == "well\n"
    settings(emulator, token_seconds=1)
    emulator.ask("POST", "/_emulator/tokens/withdraw")
    async with sandbox(client) as handle:
        for _ in range(3):
            await asyncio.sleep(0.7)  # a token runs out meanwhile, or the next time
            assert (await handle.shell("echo well", timeout=LIMIT)).ok


async def test_a_wrong_key_says_so(
    client: IsloClient, emulator: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the key in the message."""
    monkeypatch.setenv("ISLO_API_KEY", "ak_wrong")
    with pytest.raises(SandboxUnavailable, match="ISLO_API_KEY") as raised:
        await client.create(SandboxSpec())
    assert "ak_wrong" not in str(raised.value)
    assert [line.ok for line in await client.diagnose()] == [True, False]


# --- states


@pytest.mark.parametrize("word", ["failed", "error", "deleting"])
async def test_a_failed_sandbox_is_neither_resumed_nor_made_anew(
    client: IsloClient, emulator: Running, word: str
) -> None:
    async with sandbox(client) as handle:
        set_status(emulator, handle, word)
        assert (await handle.info()).status == "gone"
        for attempt in (handle.exec("true"), handle.resume(), handle.pause()):
            with pytest.raises(SandboxGone, match=handle.name):
                await attempt
        assert creations(emulator) == 1


async def test_an_unknown_status_is_left_alone(
    client: IsloClient, emulator: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, waited for, and nothing is done about it."""
    monkeypatch.setattr(module, "_STATE_TIMEOUT", 0.5)
    async with sandbox(client) as handle:
        set_status(emulator, handle, "hibernating")
        assert (await handle.info()).status == "unknown"
        with pytest.raises(SandboxTimeout, match="hibernating"):
            await handle.resume()
        with pytest.raises(SandboxError, match="hibernating"):
            await handle.exec("true", timeout=LIMIT)
        set_status(emulator, handle, "running")
        assert (await handle.shell("echo well", timeout=LIMIT)).ok
        assert creations(emulator) == 1


async def test_states_on_their_way_are_waited_for(client: IsloClient, emulator: Running) -> None:
    """Two pause and two resume at once, slowly; everybody gets what he asked for."""
    settings(emulator, pause_seconds=0.5, resume_seconds=0.5)
    async with sandbox(client) as handle:
        await asyncio.gather(handle.pause(), handle.pause())
        assert (await handle.info()).status == "paused"
        await asyncio.gather(handle.resume(), handle.resume())
        assert (await handle.shell("echo well", timeout=LIMIT)).ok


async def test_stopped_resume_without_name_collision(client: IsloClient, emulator: Running) -> None:
    """A stopped sandbox is started again, by name or id: the same one with its files."""
    async with sandbox(client) as handle:
        await handle.shell("echo mine > note", timeout=LIMIT)
        for key in (handle.name, handle.id):
            await handle.stop()
            again = await IsloClient().get(key)
            await again.resume()
            assert again.id == handle.id
            assert (await again.shell("cat note", timeout=LIMIT)).stdout == "mine\n"
        assert creations(emulator) == 1


async def test_a_sandbox_that_was_deleted_elsewhere(client: IsloClient, emulator: Running) -> None:
    """Gone, not replaced; and a new one of that name is not taken for it."""
    async with sandbox(client) as handle:
        api = client.api()
        await api.call(api.sandboxes.delete_sandbox, handle._remote, doing="")
        assert (await handle.info()).status == "gone"
        await api.call(api.sandboxes.create_sandbox, name=handle._remote, doing="")
        assert (await handle.info()).status == "gone"
        with pytest.raises(SandboxGone, match=handle.name):
            await handle.exec("true", timeout=LIMIT)
        await client.remove(handle.name)
        assert len(account(emulator)["sandboxes"]) == 1, "the other one is not ours to delete"
        await api.call(api.sandboxes.delete_sandbox, handle._remote, doing="")


async def test_the_lease_pauses_and_auto_resume_is_the_users_choice(
    client: IsloClient, emulator: Running
) -> None:
    """``pause_after_idle`` comes from the lease. Only with ``on_activity`` does use resume it."""
    for policy in ("never", "on_activity"):
        options = {"auto_resume": policy}
        async with sandbox(client, lease_seconds=5, options=options) as handle:
            asked = account(emulator)["sandboxes"][0]["request"]["lifecycle"]
            assert asked == {"pause_after_idle": 5, "auto_resume": policy}

            async def paused() -> bool:
                return bool(account(emulator)["sandboxes"][0]["status"] == "paused")

            await until(paused)
            assert (await handle.info()).status == "paused"
            if policy == "never":
                with pytest.raises(SandboxPaused, match="lease"):
                    await handle.exec("true", timeout=LIMIT)
            else:
                assert (await handle.shell("echo well", timeout=LIMIT)).stdout == "well\n"


async def test_delete_after(client: IsloClient, emulator: Running) -> None:
    """Islo's own limit, handed on as it is; what is left here can be removed."""
    handle = await client.create(SandboxSpec(options={"delete_after": 3}))

    async def gone() -> bool:
        return (await handle.info()).status == "gone"

    await until(gone)
    await client.remove(handle.name)


# --- commands and streams


@pytest.mark.parametrize("kind", ["lose", "twice", "drop", "status"])
async def test_a_command_is_run_once(client: IsloClient, emulator: Running, kind: str) -> None:
    """Also if its request is lost on the way back, or arrives twice."""
    async with sandbox(client) as handle:
        emulator.fault(EXEC, kind)
        result = await handle.shell("echo x >> count; cat count", timeout=LIMIT)
        assert result.stdout == "x\n"
        emulator.fault(EXEC, kind)
        await handle.spawn(["/bin/sh", "-c", "echo x >> spawned"])

        async def written() -> bool:
            return bool((await handle.shell("test -s spawned", timeout=LIMIT)).ok)

        await until(written)
        assert (await handle.shell("cat spawned", timeout=LIMIT)).stdout == "x\n"


@pytest.mark.parametrize("kind", ["lose", "twice", "drop", "status"])
async def test_input_arrives_once_and_in_order(
    client: IsloClient, emulator: Running, kind: str
) -> None:
    """Though pushes are lost, doubled and overtake each other."""
    data = random.Random(5).randbytes(600_000)
    async with sandbox(client) as handle, await handle.open_stream(["cat"]) as stream:
        emulator.fault(EXEC, kind, times=4)

        async def feed() -> None:
            for start in range(0, len(data), 50_000):
                await stream.write(data[start : start + 50_000])
            await stream.close_stdin()

        async def collect() -> bytes:
            got = b""
            while piece := await stream.read():
                got += piece
            return got

        got, _ = await asyncio.gather(collect(), feed())
        assert hashlib.sha256(got).digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("plain", [False, True])
async def test_output_is_exact_however_it_is_cut(
    client: IsloClient, emulator: Running, plain: bool
) -> None:
    """Chunks that split characters, slow streams, and both ways to wrap text in an event."""
    settings(emulator, chunk=7, plain_events=plain)
    text = "Grüße, 世界 😀\n".encode() * 40 + bytes(range(256))
    async with sandbox(client) as handle:
        await handle.write_file("/workspace/text", text)
        async with await handle.open_stream(["cat", "text"]) as stream:
            got = b""
            while piece := await stream.read():
                got += piece
        assert got == text
        assert await handle.read_file("/workspace/text") == text


async def test_a_stream_that_is_cut_says_so(client: IsloClient, emulator: Running) -> None:
    """It ends, ``wait`` raises, closing kills what runs on, and the sandbox is well."""
    word = "31536011"
    async with sandbox(client) as handle:
        emulator.fault(STREAM, "cut", bytes=20_000)
        script = f"while true; do head -c 5000 /dev/zero; sleep 0.05; done & sleep {word}"
        async with await handle.open_stream(["/bin/sh", "-c", script]) as stream:
            while await stream.read():
                pass
            with pytest.raises(SandboxError, match=handle.name):
                await asyncio.wait_for(stream.wait(), LIMIT)
        await until(lambda: not_running(handle, word))


async def test_exec_timeout_kills_the_remote_process(client: IsloClient, emulator: Running) -> None:
    """The limit is kept in the sandbox: also if this side is cut off meanwhile, or gives up."""
    async with sandbox(client) as handle:
        emulator.fault(r"GET /sandboxes/[^/]+/exec/", "status", status=503, times=3)
        with pytest.raises(SandboxTimeout, match="longer timeout"):
            await handle.exec("/bin/sh", ["-c", "sleep 31536012; true"], timeout=1)
        await until(lambda: not_running(handle, "31536012"))
        waiting = asyncio.ensure_future(handle.exec("sleep", ["31536013"]))
        await until(lambda: running(handle, "31536013"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: not_running(handle, "31536013"))


async def test_an_interrupt_overtakes_bulk(client: IsloClient, emulator: Running) -> None:
    """A signal is done at once though the command takes none of the input that waits for it."""
    script = "trap 'echo interrupted; exit 4' INT; echo up; while true; do sleep 0.05; done"
    command = ["/bin/sh", "-c", script]
    async with sandbox(client) as handle, await handle.open_stream(command) as stream:
        assert await stream.read() == b"up\n"
        writing = asyncio.ensure_future(stream.write(b"x" * 10_000_000))
        done, _ = await asyncio.wait({writing}, timeout=1)
        assert not done
        await stream.send_signal(2)
        assert await asyncio.wait_for(stream.wait(), LIMIT) == 4
        with pytest.raises(BrokenPipeError):
            await writing


async def test_small_writes_go_together(client: IsloClient, emulator: Running) -> None:
    """A hundred of them take a few requests, not a hundred."""
    async with sandbox(client) as handle, await handle.open_stream(["wc", "-l"]) as stream:
        emulator.clear()
        await asyncio.gather(*(stream.write(b"line\n") for _ in range(100)))
        await stream.close_stdin()
        assert int(await stream.read()) == 100
        pushes = [line for line in emulator.requests() if line.endswith("/exec")]
        assert len(pushes) < 20


async def test_a_request_that_is_too_large_is_refused_in_words(
    client: IsloClient, emulator: Running
) -> None:
    """Pushes keep below the limit of the service; a command line beyond it is an error."""
    async with sandbox(client) as handle:
        with pytest.raises(SpecError, match="too large"):
            await handle.exec("true", ["x" * 300_000], timeout=LIMIT)
        assert (await handle.exec("wc", ["-c"], stdin=b"x" * 3_000_000, timeout=LIMIT)).stdout
