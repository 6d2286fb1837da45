"""A workspace's files from outside: real jails, and sandboxes that lie."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.agents import changed_files, copying
from sandbox_kernel.agents.changed_files import ChangedFiles
from sandbox_kernel.agents.files import MOST_BYTES, SandboxFiles, path_inside
from sandbox_kernel.agents.result import ChangedFile
from sandbox_kernel.errors import (
    ExecFailed,
    FileMissing,
    QuotaExceeded,
    SandboxError,
    SandboxTimeout,
    SpecError,
    WorkspaceError,
    WorkspaceRefused,
)
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.workspace.reports import Quota


@asynccontextmanager
async def jail(client: LocalClient) -> AsyncIterator[LocalHandle]:
    handle = await client.create(SandboxSpec(name="box"))
    try:
        yield handle
    finally:
        await client.remove(handle.name)


async def sh(handle: LocalHandle, script: str) -> None:
    result = await handle.shell(script, timeout=30)
    assert result.ok, result.output


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("a", "a"),
        ("./a//b/", "a/b"),
        ("/workspace/a", "a"),
        ("/workspace", "."),
        ("", "."),
        ("a/../b", "b"),
        ("-n", "-n"),
        ("~", "~"),
        (Path("x/y"), "x/y"),
    ],
)
def test_paths_in_the_workspace(path: str | Path, inside: str) -> None:
    """Relative to it, or absolute and below it."""
    assert path_inside(path, "/workspace") == inside


@pytest.mark.parametrize(
    "path",
    [
        *("..", "../a", "/etc/passwd", "a/../../b", "/workspace/../etc", "/workspaces", "/"),
        *("a\0b", "x" * 5000, "half\ud800", 3, None),
    ],
)
def test_paths_that_lead_out_are_refused(path: Any) -> None:
    """Before the sandbox hears of them."""
    with pytest.raises(SpecError):
        path_inside(path, "/workspace")


async def test_write_read_and_list(client: LocalClient) -> None:
    """Any bytes, any name; folders are made; a file that is replaced keeps its mode."""
    async with jail(client) as handle:
        files = SandboxFiles(handle)
        everything = bytes(range(256)) * 5000
        await files.write("deep/er/b in.x", everything)
        assert await files.read("/workspace/deep/er/b in.x") == everything
        await files.write("-n", "")
        assert await files.read("-n") == b""
        await sh(handle, "chmod 750 ./-n; ln -s ./-n link; mkfifo pipe")
        await files.write("link", "through")
        assert await files.read("-n") == b"through"
        await sh(handle, "test -x ./-n && test -L link")
        found = await files.list()
        assert [(each.path, each.kind) for each in found] == [
            *(("-n", "file"), ("deep", "folder"), ("link", "link"), ("pipe", "other")),
        ]
        assert found[0].size == 7
        assert [each.path for each in await files.list("deep/er")] == ["deep/er/b in.x"]
        assert [each.size for each in await files.list("deep/er/b in.x")] == [len(everything)]
        await sh(handle, "mkdir many; cd many; seq 30 | xargs touch")
        some = await files.listing("many", most=10)
        assert ([each.path for each in some.entries[:2]], some.more) == (["many/1", "many/10"], 20)


async def test_what_cannot_be_read_or_written_is_said(client: LocalClient) -> None:
    """Each with an error of its own kind that names path and sandbox; nothing waits for a pipe."""
    async with jail(client) as handle:
        files = SandboxFiles(handle)
        await sh(handle, "mkdir d; mkfifo pipe; printf 12345 > five; touch file")
        with pytest.raises(FileMissing, match="nope in sandbox 'box' does not exist"):
            await files.read("nope")
        with pytest.raises(FileNotFoundError):
            await files.list("file/below")
        with pytest.raises(WorkspaceError, match="d in sandbox 'box': is a folder"):
            await files.read("d")
        with pytest.raises(WorkspaceError, match="is a folder"):
            await files.write("d", b"")
        with pytest.raises(WorkspaceError, match="no regular file"):
            await files.read("pipe")
        with pytest.raises(QuotaExceeded, match="5 bytes"):
            await files.read("five", max_bytes=4)
        assert await files.read("five", max_bytes=5) == b"12345"
        with pytest.raises(QuotaExceeded):
            await files.write("large", bytes(MOST_BYTES + 1))
        with pytest.raises(WorkspaceError):
            await files.write("file/below", b"x")
        with pytest.raises(SpecError):
            await files.write("../out", b"x")
        await sh(handle, "test ! -e large; test -z \"$(ls -A | grep '^[.]sandbox-kernel')\"")


async def test_there_and_back(client: LocalClient, tmp_path: Path) -> None:
    """Folders go in and come out again, within limits, and over nothing that is here."""
    here = tmp_path / "in"
    (here / "sub").mkdir(parents=True)
    (here / "sub" / "a.bin").write_bytes(os.urandom(600_000))
    async with jail(client) as handle:
        files = SandboxFiles(handle)
        with pytest.raises(QuotaExceeded, match="Nothing was copied"):
            await files.upload(here, quota=Quota(max_bytes=599_999))
        with pytest.raises(FileNotFoundError):
            await files.upload(tmp_path / "none")
        assert await files.list() == []
        assert await files.upload(here, "got") == 1
        with pytest.raises(QuotaExceeded):
            await files.download("got", tmp_path / "out", quota=Quota(max_bytes=599_999))
        copied = await files.download("got", tmp_path / "out")
        assert (copied.files, copied.bytes, copied.left_out) == (1, 600_000, ())
        same = (tmp_path / "out" / "sub" / "a.bin").read_bytes()
        assert same == (here / "sub" / "a.bin").read_bytes()
        (tmp_path / "got").touch()
        with pytest.raises(WorkspaceError, match="exists already"):
            await files.download("got/sub", tmp_path / "got")
        with pytest.raises(SpecError):
            await files.download("/etc/passwd", tmp_path)
        with pytest.raises(WorkspaceError, match="could not read"):
            await files.download("none", tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["got", "in", "out"]


async def test_a_download_writes_nowhere_else(client: LocalClient, tmp_path: Path) -> None:
    """Links that lead out and hidden files stay in the sandbox, and are named."""
    async with jail(client) as handle:
        await sh(
            handle,
            "mkdir d; cd d; ln -s / root; ln -s ../../x up; ln -s fine in; touch fine .profile",
        )
        copied = await SandboxFiles(handle).download("d", tmp_path)
        assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["fine", "in"]
        assert sorted(each.partition(":")[0] for each in copied.left_out) == [
            *(".profile", "root", "up")
        ]


async def liar(handle: LocalHandle, answer: bytes) -> None:
    """Let the sandbox's Python answer everything with the same bytes."""
    await sh(handle, "mkdir -p /tmp/lies")
    await SandboxFiles(handle).write("answer", answer)
    await SandboxFiles(handle).write("python", "#!/bin/sh\ncat /workspace/answer\ncat > /dev/null")
    await sh(handle, "chmod 755 python")
    handle.python = "/workspace/python"


def entry(*values: Any) -> bytes:
    return b'{"count": 1}\n' + json.dumps(values).encode() + b"\n"


LIES = {
    "no JSON": b"{\n",
    "deep JSON": b"[" * 9000 + b"\n",
    "a list": b"[]\n",
    "no end of its line": b"x" * 100,
    "nothing": b"",
    "more than it said": b'{"size": 1}\nxx',
    "less than it said": b'{"size": 3}\nxx',
    "no size": b'{"size": null}\nxx',
    "far too much": b'{"size": 1}\n' + b"x" * 100_000,
    "no count": b'{"count": true}\n',
    "a path out": entry("../x", "file", 1, 1),
    "a folder above": entry("..", "folder", 1, 1),
    "another kind": entry("x", "device", 1, 1),
    "a kind that is none": entry("x", [], 1, 1),
    "a negative size": entry("x", "file", -1, 1),
    "a huge size": entry("x", "file", 10**30, 1),
    "a time that is none": entry("x", "file", 1, float("nan")),
    "a name that is none": entry(None, "file", 1, 1),
    "too few facts": entry("x"),
    "a terminal's commands": b'{"error": "\\u001b[2J", "kind": ["missing"]}\n',
}


async def test_what_a_hostile_sandbox_answers_is_not_believed(client: LocalClient) -> None:
    """A Python that lies: an error each time, and nothing but that."""
    async with jail(client) as handle:
        for lie, answer in LIES.items():
            await liar(handle, answer)
            files = SandboxFiles(handle)
            calls = (files.read("x", max_bytes=10), files.listing("x", most=3))
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, (WorkspaceError, ExecFailed)), (lie, outcome)
                assert "\x1b" not in str(outcome)
            handle.python = None


async def test_a_sandbox_that_does_not_answer_is_given_up(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a read nor a look at the files waits without a limit."""
    monkeypatch.setattr(copying, "PATIENCE", 0.2)
    monkeypatch.setattr(changed_files, "PATIENCE", 0.2)
    async with jail(client) as handle:
        await SandboxFiles(handle).write("python", "#!/bin/sh\nsleep 1000")
        await sh(handle, "chmod 755 python")
        handle.python = "/workspace/python"
        with pytest.raises(SandboxTimeout):
            await SandboxFiles(handle).read("x")
        with pytest.raises(SandboxTimeout):
            await ChangedFiles(handle).look()


async def test_changed_files(client: LocalClient) -> None:
    """What is new since the last look, by path: contents of the same length, too, but no caches."""
    async with jail(client) as handle:
        await sh(handle, "mkdir d; printf 1 > d/one; printf 2 > two; printf 3 > three")
        watch = ChangedFiles(handle)
        assert await watch.look() == []
        assert await watch.look() == []
        await sh(
            handle,
            "printf x > d/one; rm two; printf new > d/new; mkdir .hidden __pycache__;"
            "touch .hidden/x __pycache__/y; ln -s /etc/passwd link",
        )
        assert [(each.path, each.kind) for each in await watch.look()] == [
            ("d/new", "created"),
            ("d/one", "changed"),
            ("link", "created"),
            ("two", "deleted"),
        ]
        assert await watch.look() == []
        await sh(handle, "mkdir many; cd many; seq 300 | xargs touch")
        found = await watch.look()
        assert (len(found), watch.more) == (200, 100)
        await watch.close()
        await sh(handle, "rm -r many")
        assert await watch.look() == []
        await watch.close()
        await watch.close()


async def test_too_many_files_are_not_watched(client: LocalClient) -> None:
    """It says so; when there are fewer again, it goes on."""
    async with jail(client) as handle:
        watch = ChangedFiles(handle)
        await watch.look()
        await sh(handle, "mkdir many; cd many; seq 20001 | xargs touch")
        assert (await watch.look(), watch.unseen) == ([], True)
        await sh(handle, "rm many/1 many/2 many/3; touch a")
        assert (await watch.look(), watch.unseen) == ([], False)
        await sh(handle, "touch b")
        assert await watch.look() == [ChangedFile("b", "created", 0)]
        await watch.close()


async def test_looking_begins_anew_after_its_program_was_killed(client: LocalClient) -> None:
    """Code in the sandbox can end it; one look fails, the next one is a first one."""
    async with jail(client) as handle:
        watch = ChangedFiles(handle)
        await watch.look()
        await sh(handle, "kill $(grep -l 'MOST_CHANGE[S]' /proc/[0-9]*/cmdline | cut -d/ -f3)")
        with pytest.raises(SandboxError):
            await watch.look()
        assert await watch.look() == []
        await sh(handle, "touch a")
        assert await watch.look() == [ChangedFile("a", "created", 0)]
        await watch.close()


CHANGES = {
    "no JSON": b"{",
    "a list": b"[]",
    "no changes": b'{"more": 0, "unseen": false}',
    "a number of changes": b'{"changes": 3, "more": 0, "unseen": false}',
    "no number": b'{"changes": [], "more": null, "unseen": false}',
    "a path out": b'{"changes": [["../x", "created", 1]], "more": 0, "unseen": false}',
    "an absolute path": b'{"changes": [["/x", "created", 1]], "more": 0, "unseen": false}',
    "no kind": b'{"changes": [["x", "moved", 1]], "more": 0, "unseen": false}',
    "a size that is none": b'{"changes": [["x", "created", -1]], "more": 0, "unseen": false}',
    "too few facts": b'{"changes": [["x"]], "more": 0, "unseen": false}',
    "an infinity": b'{"changes": [], "more": Infinity, "unseen": false}',
    "an endless line": b"x" * (5 * 2**20),
}


async def test_false_changes_are_not_believed(client: LocalClient) -> None:
    """As for the other answers."""
    async with jail(client) as handle:
        for lie, answer in CHANGES.items():
            await liar(handle, answer + b"\n")
            watch = ChangedFiles(handle)
            with pytest.raises(WorkspaceRefused):
                raise AssertionError(f"{lie}: {await watch.look()}")
            handle.python = None
