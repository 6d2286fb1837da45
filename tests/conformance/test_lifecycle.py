"""Sandboxes come into being, are found again, end, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExists,
    SandboxGone,
    SandboxNotFound,
    SpecError,
    SpecRefused,
)
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxHandle
from tests.helpers.waiting import LIMIT, SLOWNESS, until

from .conftest import Backend
from .processes import running

# Every field that a backend may refuse, with a value that it must refuse or enforce.
FIELDS: dict[str, Any] = {
    "image": "registry.example/no-such-image:1",
    "memory_mib": 512,
    "cpus": 1,
    "processes": 200,
    "open_files": 256,
    "disk_mib": 64,
    "volume": "conformance",
    "readable": ["/usr/share"],
    "python": sys.executable,
    "secrets": ["token"],
    "delete_after_seconds": 3600,
    "egress": ["data.example"],
}
LIMITS = ("memory_mib", "cpus", "processes", "open_files", "disk_mib")

_CREATE = """
import asyncio, json, os, signal, sys
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.spec import SandboxSpec

async def main(backend, spec, word):
    client = load_backend(backend)
    handle = await client.create(SandboxSpec.from_mapping(json.loads(spec)))
    await handle.shell("echo from another process > note", timeout=60)
    await handle.spawn(["sleep", word])
    print("created", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""

_GROW = """
import os, sys
with open("big", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, int(sys.argv[1]) * 2**20)
"""


async def create_and_die(backend: Backend, word: str = "1000", **fields: Any) -> str:
    """Another process makes a sandbox, spawns ``sleep word`` in it, and is killed."""
    spec = backend.spec(**fields)
    command = [sys.executable, "-c", _CREATE, backend.row.name, json.dumps(spec.to_dict()), word]
    ran = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert ran.stdout == "created\n"
    return spec.name


# --- names


async def test_a_name_is_taken_once(backend: Backend) -> None:
    """SandboxExists, and the first one is unharmed."""
    async with backend.sandbox() as first:
        await first.shell("echo mine > mark", timeout=LIMIT)
        with pytest.raises(SandboxExists, match=first.name):
            await backend.client.create(backend.spec(name=first.name))
        assert (await first.shell("cat mark", timeout=LIMIT)).stdout == "mine\n"
        assert (await first.info()).status == "running"


async def test_of_many_who_want_a_name_one_gets_it(backend: Backend) -> None:
    """Also when all ask at the same time."""
    name = f"{backend.prefix}-wanted"
    results = await asyncio.gather(
        *(backend.client.create(backend.spec(name=name)) for _ in range(4)), return_exceptions=True
    )
    try:
        won = [r for r in results if isinstance(r, SandboxHandle)]
        assert len(won) == 1
        assert [type(r) for r in results if r is not won[0]] == [SandboxExists] * 3
        assert (await won[0].shell("echo well", timeout=LIMIT)).stdout == "well\n"
    finally:
        await backend.client.remove(name)


async def test_a_name_is_free_again_after_removal(backend: Backend) -> None:
    """The next sandbox of that name is a new, empty one."""
    name = f"{backend.prefix}-again"
    ids = []
    for _ in range(2):
        async with backend.sandbox(name=name) as handle:
            ids.append(handle.id)
            assert (await handle.shell("ls; touch left-behind", timeout=LIMIT)).stdout == ""
    assert ids[0] != ids[1]


async def test_an_unknown_name(backend: Backend) -> None:
    """SandboxNotFound, which says how to see what there is."""
    with pytest.raises(SandboxNotFound, match="no-such-sandbox"):
        await backend.client.get("no-such-sandbox")


# --- what is known


async def test_info(backend: Backend) -> None:
    """Who, where, since when, and in which state: running, then ended."""
    before = time.time()
    async with backend.sandbox() as handle:
        info = await handle.info()
        assert (info.name, info.id, info.backend) == (handle.name, handle.id, backend.row.name)
        assert info.status == "running"
        assert before - 5 <= info.created <= time.time() + 5
        assert info.oom_kills == 0
        assert info.last_kill == ""
        await handle.kill()
        assert (await handle.info()).status in ("stopped", "gone")
    assert (await handle.info()).status == "gone"


async def test_the_log_holds_what_spawned_commands_print(backend: Backend) -> None:
    """``logs`` has their output, not that of exec; ``tail`` counts lines."""
    async with backend.sandbox() as handle:
        await handle.exec("echo", ["an exec"], timeout=LIMIT)
        await handle.spawn(["/bin/sh", "-c", "echo first; echo second >&2"])

        async def logged() -> bool:
            return "second" in await handle.logs()

        await until(logged)
        log = await handle.logs()
        assert "first" in log
        assert "an exec" not in log
        assert len((await handle.logs(tail=1)).splitlines()) <= 1


async def test_limits_in_force_are_told(backend: Backend) -> None:
    """A limit that was asked for is in ``info().limits``, with its value; the disk has an end."""
    values = {**FIELDS, **backend.row.limits}
    asked = {name: values[name] for name in LIMITS if getattr(backend.capabilities, name)}
    async with backend.sandbox(**asked) as handle:
        told = (await handle.info()).limits
        assert [name for name in asked if str(asked[name]) not in told[name]] == []
        assert (await handle.shell("echo runs", timeout=LIMIT)).ok
        if "disk_mib" in asked:
            wanted = str(2 * asked["disk_mib"])
            assert not (await handle.exec("python3", ["-c", _GROW, wanted], timeout=LIMIT)).ok


# --- refusals


async def test_what_cannot_be_enforced_is_refused(backend: Backend) -> None:
    """Each field by its name, with a way out, before anything exists."""
    before = await backend.names()
    for name in [name for name in FIELDS if not getattr(backend.capabilities, name)]:
        spec = backend.spec(**{name: FIELDS[name]})
        with pytest.raises(SpecRefused, match=rf"{spec.name}.*\b{name}\b.*\. \S"):
            await backend.client.create(spec)
        with pytest.raises(SandboxNotFound):
            await backend.client.get(spec.name)
    assert await backend.names() == before


async def test_a_bad_name_is_no_spec(backend: Backend) -> None:
    """What could be a path or an option is refused before the backend sees it."""
    for name in ("../up", "-rf", "a/b", "UPPER", "x" * 64, "new\nline"):
        with pytest.raises(SpecError):
            backend.spec(name=name)
        with pytest.raises(SandboxError):
            await backend.client.get(name)


# --- the end


async def test_removing_twice(backend: Backend) -> None:
    """Is no error, nor is removing what never was."""
    handle = await backend.client.create(backend.spec())
    assert handle.name in await backend.names()
    await backend.client.remove(handle.name)
    await backend.client.remove(handle.name)
    await backend.client.remove(f"{backend.prefix}-never")
    assert handle.name not in await backend.names()
    with pytest.raises(SandboxNotFound):
        await backend.client.get(handle.name)


async def test_stop_and_kill_are_idempotent(backend: Backend) -> None:
    """In any order and any number."""
    for first, second in (("stop", "kill"), ("kill", "stop")):
        async with backend.sandbox() as handle:
            await getattr(handle, first)()
            await getattr(handle, first)()
            await getattr(handle, second)()
            assert (await handle.info()).status != "running"


async def test_a_stopped_sandbox_is_gone_for_commands(backend: Backend) -> None:
    """SandboxGone that names it, from exec, stream and spawn alike."""
    async with backend.sandbox() as handle:
        await handle.stop()
        for attempt in (
            handle.exec("true", timeout=LIMIT),
            handle.open_stream(["true"]),
            handle.spawn(["true"]),
        ):
            with pytest.raises(SandboxGone, match=handle.name):
                await attempt
    with pytest.raises(SandboxGone, match=handle.name):
        await handle.exec("true", timeout=LIMIT)


async def test_stop_lets_commands_finish_in_order(backend: Backend) -> None:
    """They are asked to end first, and may say goodbye in the log."""
    async with backend.sandbox() as handle:
        script = "trap 'echo goodbye; exit' TERM; echo up; while true; do sleep 0.05; done"
        await handle.spawn(["/bin/sh", "-c", script])

        async def up() -> bool:
            return "up" in await handle.logs()

        await until(up)
        await handle.stop()
        status = (await handle.info()).status
        assert status in ("stopped", "paused", "gone")
        if status == "stopped":
            assert "goodbye" in await handle.logs()


async def test_commands_notice_the_end_of_their_sandbox(backend: Backend) -> None:
    """An open stream ends, and ``wait`` says that the sandbox did."""
    async with backend.sandbox() as handle, await handle.open_stream(["sleep", "1000"]) as stream:
        await handle.kill()
        assert await asyncio.wait_for(stream.read(), LIMIT) == b""
        with pytest.raises(SandboxGone, match=handle.name):
            await asyncio.wait_for(stream.wait(), LIMIT)


async def test_a_sandbox_that_was_killed_from_outside(backend: Backend) -> None:
    """Is noticed, with a reason in words, and can be removed as any other."""
    async with backend.sandbox() as handle:
        info = await handle.info()
        if backend.row.crash is not None:
            backend.row.crash(info)
        else:
            await (await load_backend(backend.row.name).get(handle.name)).kill()

        async def ended() -> bool:
            return bool((await handle.info()).status != "running")

        await until(ended)
        with pytest.raises(SandboxGone, match=f"{handle.name}.*killed"):
            await handle.exec("true", timeout=LIMIT)


# --- other processes


async def test_spawned_commands_outlive_their_exec(backend: Backend) -> None:
    """A spawned command belongs to the sandbox: a stream that is closed does not touch it."""
    word = "31536003"
    async with backend.sandbox() as handle:
        stream = await handle.open_stream(["cat"])
        await handle.spawn(["sleep", word])
        await stream.close()
        assert len(await running(handle, word)) == 1


async def test_a_sandbox_outlives_its_creator(backend: Backend) -> None:
    """Its creator is killed; this process lists it, finds it, uses it and removes it."""
    if not backend.capabilities.reattach:
        pytest.skip("this backend cannot reattach")
    word = "31536004"
    name = await create_and_die(backend, word)
    try:
        assert name in await backend.names()
        handle = await backend.client.get(name)
        assert handle.name == name
        assert (await handle.shell("cat note", timeout=LIMIT)).stdout == "from another process\n"
        assert len(await running(handle, word)) == 1
    finally:
        await backend.client.remove(name)
    assert name not in await backend.names()


async def test_other_processes_see_the_list(backend: Backend) -> None:
    """What this process made, another one lists and removes."""
    async with backend.sandbox() as handle:
        code = (
            "import asyncio, sys\n"
            "from sandbox_kernel.sandboxes.backends import load_backend\n"
            "async def main(backend, name):\n"
            "    client = load_backend(backend)\n"
            "    print(name in await client.list())\n"
            "    await client.remove(name)\n"
            "asyncio.run(main(*sys.argv[1:]))\n"
        )
        command = [sys.executable, "-c", code, backend.row.name, handle.name]
        ran = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert (ran.stdout, ran.stderr) == ("True\n", "")
        assert handle.name not in await backend.names()
        with pytest.raises(SandboxGone, match=handle.name):
            await handle.exec("true", timeout=LIMIT)


async def test_an_orphan_ends_with_its_lease(backend: Backend) -> None:
    """Nobody is attached for ``lease_seconds``: the sandbox ends (or is paused) by itself, and
    says so."""
    name = await create_and_die(backend, lease_seconds=1.5 * SLOWNESS)

    async def ended() -> bool:
        try:
            return (await (await backend.client.get(name)).info()).status != "running"
        except SandboxNotFound:
            return True

    try:
        # Asking is no attachment: it must not keep the sandbox alive.
        await until(ended)
        if backend.row.lease_pauses:
            assert (await (await backend.client.get(name)).info()).status == "paused"
        elif name in await backend.names():
            with pytest.raises(SandboxGone, match="lease"):
                await (await backend.client.get(name)).exec("true", timeout=LIMIT)
    finally:
        await backend.client.remove(name)


async def test_a_stream_keeps_the_lease(backend: Backend) -> None:
    """A sandbox that somebody is attached to outlives its lease."""
    sandbox = backend.sandbox(lease_seconds=SLOWNESS)
    async with sandbox as handle, await handle.open_stream(["cat"]) as stream:
        waiting = asyncio.ensure_future(stream.wait())
        done, _ = await asyncio.wait({waiting}, timeout=3 * SLOWNESS)
        assert not done
        waiting.cancel()
        await stream.write(b"still here\n")
        assert await stream.read() == b"still here\n"


async def test_diagnose_leaves_nothing(backend: Backend) -> None:
    """It tries for real, answers in words, and clears up."""
    before = set(await backend.client.list())
    found = await backend.client.diagnose()
    assert found
    assert all(d.what for d in found)
    assert all(d.fix for d in found if d.ok is False)
    assert set(await backend.client.list()) <= before
