"""Workspaces of real sandboxes, over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox_kernel.errors import QuotaExceeded, WorkspaceError
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.workspace import (
    Progress,
    Quota,
    Store,
    UploadPolicy,
    conversation,
    hydrate,
    persist,
    upload,
)
from tests.helpers.coroutines import run_coroutine
from tests.helpers.own_folders import own_folders
from tests.workspace.guests import WRITER

__all__ = ["run_coroutine"]  # the kernels live on the background loop

LIMIT = 150.0
LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Keep the files of sandboxes apart from the user's."""
    with own_folders():
        yield


@asynccontextmanager
async def sandbox() -> AsyncIterator[SandboxedKernel]:
    client = load_backend("local")
    made = await SandboxedKernel.create(client, SandboxSpec(), LOG)
    try:
        yield made
    finally:
        await made.remove()


async def run(made: SandboxedKernel, script: str) -> str:
    result = await made.handle.shell(script, timeout=60)
    assert result.ok, result.output
    return result.stdout


LOOK = (
    "find . -mindepth 1 -printf '%p %y %m %T@ %l %n\\n' | sort;"
    "find . -type f -print0 | sort -z | xargs -0 sha256sum"
)


async def test_files_outlive_their_sandbox(store: Store) -> None:
    """What one sandbox had is in the next one: contents, modes, times, links, odd names."""
    async with sandbox() as first:
        await run(
            first,
            "mkdir -p deep/er empty; head -c 3000000 /dev/urandom > deep/er/big; echo hi > a;"
            "chmod 640 a; touch -d '2001-02-03 04:05:06.789' a; ln -s a link; ln a hard;"
            "echo u > 'grüße \U0001f600'; printf x > \"$(printf 'not\\377utf8')\";"
            "chmod 500 empty",
        )
        report = await persist(first, store, "demo", notebook="demo.ipynb", kernel="sandbox")
        assert report.new
        assert not report.problems
        before = await run(first, LOOK)
    async with sandbox() as second:
        told = await hydrate(second, store, "demo")
        assert told.save is not None
        assert told.save.id == report.save.id
        assert not told.problems
        assert await run(second, LOOK) == before
        again = await persist(second, store, "demo")
        assert not again.new
        assert again.moved_bytes < 2000


async def test_stores_to_a_mapped_file_in_a_jail(store: Store) -> None:
    """A process in a jail has a file mapped, and stores to the same page twice: both are saved."""
    async with sandbox() as made:
        await run(made, "head -c 8192 /dev/zero > array")
        argv = made.handle.kernel_argv([sys.executable, "-c", WRITER, "array"])
        async with await made.handle.open_stream(argv) as writer:
            for number in (1, 2, 3):
                await writer.write(b"%d %d\n" % (number, number))
                assert await writer.read() == b"%d\n" % number
                await asyncio.sleep(0.15)  # until its time is one that is trusted
                assert (await persist(made, store, "w")).new
                assert not (await persist(made, store, "w")).new


async def test_a_workspace_without_saves_is_left_alone(store: Store) -> None:
    """Hydrating what was never saved does nothing, and says so."""
    async with sandbox() as made:
        await run(made, "echo kept > file")
        assert (await hydrate(made, store, "nothing")).save is None
        assert await run(made, "cat file") == "kept\n"


async def test_upload(store: Store, tmp_path: Path) -> None:
    """The files beside a notebook are in its new sandbox, as far as the policy lets them."""
    (tmp_path / "nb" / "sub").mkdir(parents=True)
    (tmp_path / "nb" / "data.csv").write_text("a,b\n")
    (tmp_path / "nb" / "secret.key").write_text("no")
    (tmp_path / "nb" / "sub" / "more.csv").write_text("c,d\n")
    async with sandbox() as made:
        assert await upload(made, store, "x", tmp_path / "nb", UploadPolicy()) is None
        told = await upload(made, store, "x", tmp_path / "nb", UploadPolicy.parse("*.csv"))
        assert told is not None
        assert told.files == 2
        assert await run(made, "find . -type f | sort") == "./data.csv\n./sub/more.csv\n"


async def test_cancel_and_quota(store: Store) -> None:
    """A persist that is cancelled, or is too large, leaves the store as it was, and the next one
    works: in the same sandbox, while a kernel could be running in it."""
    async with sandbox() as made:
        await run(made, "head -c 80000000 /dev/urandom > big; echo small > small")
        with pytest.raises(QuotaExceeded, match="big"):
            await persist(made, store, "w", quota=Quota(max_bytes=10_000_000))
        begun = asyncio.Event()
        told: list[Progress] = []

        def progress(value: Progress) -> None:
            told.append(value)
            if value.phase == "receive":
                begun.set()

        task = asyncio.ensure_future(persist(made, store, "w", progress=progress))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.latest("w") is None
        assert (await persist(made, store, "w")).new
        assert told


def processes_of(made: SandboxedKernel) -> list[int]:
    """All processes of a jail: those in the namespace of its first one."""
    first, _ = Records().load("local", made.handle.name).data["init"]
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if path.readlink() == Path(f"/proc/{first}/ns/pid").readlink():
                found.append(int(path.parts[2]))
    return found


async def test_a_sandbox_that_does_not_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer does not wait for ever: it is given up, and the next one works."""
    async with sandbox() as made:
        await run(made, "echo 1 > file")
        await persist(made, store, "w")
        await run(made, "echo 2 > file")
        # All of it, from outside: what only stops the helper, or the agent, is undone inside.
        frozen = processes_of(made)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(conversation, "STALLED_AFTER", 1.0)
        with pytest.raises(WorkspaceError, match="made no progress for 1 s"):
            await persist(made, store, "w")
        monkeypatch.undo()
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        assert (await persist(made, store, "w")).new


@pytest.mark.faults
async def test_cuts_do_not_matter(store: Store) -> None:
    """The stream to the sandbox breaks again and again while files are saved and brought in."""
    async with sandbox() as first, sandbox() as second:
        await run(
            first,
            "for i in $(seq 200); do head -c 100000 /dev/urandom > f$i; done;"
            "head -c 30000000 /dev/urandom > big",
        )
        stop = asyncio.Event()

        async def cut() -> None:
            while not stop.is_set():
                await asyncio.sleep(0.05)
                first.tunnel.cut()
                second.tunnel.cut()

        cutting = asyncio.ensure_future(cut())
        try:
            await persist(first, store, "w")
            await hydrate(second, store, "w")
        finally:
            stop.set()
            await cutting
        assert first.tunnel.reconnects > 1
        assert await run(first, "sha256sum *") == await run(second, "sha256sum *")
