"""What the audit has of real sandboxes, and of what it keeps silent."""

from __future__ import annotations

import json
import logging
import os
import pwd
import stat
import time
from pathlib import Path

import pytest

from sandbox_kernel.audit.reading import audits, read
from sandbox_kernel.audit.trail import Trail, audit_path, forget_unused, without_values
from sandbox_kernel.audit.upkeep import delete_old, look_after
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.kernels.spare_plan import SparePlan, make_spare
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background

LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def kinds(name: str) -> list[str]:
    return [event["kind"] for event in read(audit_path("local", name))]


async def test_a_sandbox_without_egress_is_audited_too(data: Path) -> None:
    """From its making to its end: by whom, without values, without code, and without our own
    commands."""
    client = LocalClient()
    spec = SandboxSpec(name="box", env={"API_TOKEN": "s3cret-value"}, labels={"team": "a"})
    handle = await client.create(spec)
    try:
        await handle.exec("echo", ["hello"])
        await handle.exec("python3", ["-c", "print('private code')\nprint()"])
        await handle.upload(str(data / "records"), "/workspace/copied")
    finally:
        await client.remove("box")
    path = audit_path("local", "box")
    created, echo, python, removed = read(path)
    assert [e["kind"] for e in (created, echo, removed)] == ["created", "exec", "removed"]
    assert created["spec"]["env"] == ["API_TOKEN"]
    assert created["spec"]["labels"] == {"team": "a"}
    assert created["id"] == removed["id"] == handle.id
    assert echo["argv"] == ["echo", "hello"]
    assert python["argv"] == ["python3", "-c", "(29 characters)"]
    assert created["by"]["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert created["by"]["pid"] == os.getpid()
    assert "s3cret-value" not in path.read_text()
    assert "private code" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_nothing_and_egress_alone() -> None:
    client = LocalClient()
    for keeps in ("none", "egress"):
        await client.create(SandboxSpec(name=keeps, audit=keeps))
        await client.remove(keeps)
        assert not audit_path("local", keeps).exists()
    trail = Trail("local", "few", keeps="egress")
    trail({"kind": "egress", "action": "deny"})
    trail.note("exec", argv=["ls"])
    trail.note("policy", egress=[])
    assert kinds("few") == ["egress", "policy"]


async def test_a_spare_that_nobody_used_leaves_no_audit(data: Path) -> None:
    async def main() -> tuple[str, str]:
        client = LocalClient()
        names = []
        for used in (False, True):
            plan = SparePlan.of("local", SandboxSpec(), ())
            kernel = (await make_spare(client, plan, LOG)).kernel
            names.append(kernel.handle.name)
            if used:
                await kernel.handle.exec("true")
            await kernel.remove()
        return names[0], names[1]

    unused, used = await background.run(main())
    assert kinds(unused) == []
    assert kinds(used) == ["created", "exec"], "what was done in it stays"


async def test_a_creation_that_fails_leaves_no_audit(data: Path) -> None:
    client = LocalClient()
    await client.create(SandboxSpec(name="twice"))
    with pytest.raises(Exception, match="exists already"):
        await client.create(SandboxSpec(name="twice"))
    await client.remove("twice")
    await client.remove("twice")
    assert kinds("twice") == ["created", "removed"]


async def test_work_goes_on_without_an_audit(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its folder is another's, or no folder at all: that is told once."""
    data.mkdir(mode=0o700)
    (data / "audit").write_text("not a folder")
    client = LocalClient()
    with caplog.at_level(logging.WARNING, "sandbox_kernel.audit"):
        handle = await client.create(SandboxSpec(name="box"))
        assert (await handle.exec("echo", ["hi"])).stdout == "hi\n"
        await client.remove("box")
    told = [r for r in caplog.records if "audit cannot be written" in r.getMessage()]
    assert len(told) == 1, caplog.text


async def test_a_link_in_its_place_is_not_followed(data: Path, tmp_path: Path) -> None:
    trail = Trail("local", "box")
    (data / "audit").mkdir(parents=True, mode=0o700)
    (tmp_path / "target").write_text("")
    trail.path.symlink_to(tmp_path / "target")
    trail.note("exec", argv=["ls"])
    assert (tmp_path / "target").read_text() == ""


async def test_attaching_and_the_kernel(data: Path) -> None:
    """Another process that takes the sandbox over, and a kernel that dies, with the reason."""

    async def main() -> None:
        client = LocalClient()
        kernel = await SandboxedKernel.create(client, SandboxSpec(name="box"), LOG)
        await kernel.detach()
        kernel = await SandboxedKernel.attach(client, "box", LOG)
        try:
            for code in (3, 4):
                argv = ["/bin/sh", "-c", f"exit {code}", "{connection_file}"]
                await kernel.launch(argv, env={}, cwd="/", connection={"key": "k"}, warm=False)
                await kernel.wait()
        finally:
            await kernel.remove()

    await background.run(main())
    assert kinds("box") == [
        *("created", "attached", "kernel-started", "kernel-died"),
        *("kernel-restarted", "kernel-died", "removed"),
    ]
    died = [e for e in read(audit_path("local", "box")) if e["kind"] == "kernel-died"]
    assert [event["exit_code"] for event in died] == [3, 4]
    assert "exit code 3" in died[0]["why"]


def test_of_what_may_hold_secrets_only_names_are_left() -> None:
    spec = {
        "env": {"A": "1"},
        "options": {"api_key": "k"},
        "secrets": ["TOKEN", {"name": "OTHER", "hosts": ["a.example"]}, "X=file:/secret"],
        "audit_command": "ship --token t",
        "egress": ["a.example"],
    }
    assert without_values(spec) == {
        "env": ["A"],
        "options": ["api_key"],
        "secrets": ["OTHER", "TOKEN", "X"],
        "egress": ["a.example"],
    }


def test_an_audit_with_anything_else_is_not_forgotten(tmp_path: Path) -> None:
    for content in ('{"kind": "created"}\n{"kind": "egress"}\n', "torn", "[]\n"):
        path = tmp_path / "local-a.jsonl"
        path.write_text(content)
        forget_unused(path)
        assert path.exists()
    path.write_text('{"kind": "created"}\n')
    forget_unused(path)
    assert not path.exists()
    forget_unused(path)


def aged(folder: Path, name: str, days: float, size: int = 10) -> Path:
    path = folder / name
    path.write_bytes(b"x" * size)
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    return path


def test_old_audits_go(tmp_path: Path) -> None:
    """By age of the last line, with their rotated files; then the oldest, by size and number."""
    old, rotated = aged(tmp_path, "local-a.jsonl", 91), aged(tmp_path, "local-a.jsonl.1", 95)
    live, of_live = aged(tmp_path, "local-b.jsonl", 1), aged(tmp_path, "local-b.jsonl.1", 95)
    other = aged(tmp_path, "notes.txt", 500)
    delete_old(tmp_path)
    assert not old.exists()
    assert not rotated.exists()
    assert live.exists()
    assert of_live.exists()
    big = [aged(tmp_path, f"local-big{n}.jsonl", 2 + n, 1000) for n in range(4)]
    delete_old(tmp_path, most_bytes=2500)
    assert [path.exists() for path in big] == [True, True, False, False]
    delete_old(tmp_path, most_audits=2)
    assert [path.exists() for path in big] == [True, False, False, False]
    assert live.exists()
    assert other.exists()


def test_looking_for_old_audits_is_rare(tmp_path: Path) -> None:
    look_after(tmp_path / "none")
    look_after(tmp_path)
    old = aged(tmp_path, "local-a.jsonl", 91)
    look_after(tmp_path)
    assert old.exists()
    os.utime(tmp_path / ".looked-after", (0, 0))
    look_after(tmp_path)
    assert not old.exists()
    assert audits(tmp_path) == []


def test_an_event_that_is_too_long_is_named(data: Path) -> None:
    data.mkdir()
    Trail("local", "a").note("odd", facts={str(n): ["x" * 1000] * 50 for n in range(50)})
    [event] = read(audit_path("local", "a"))
    assert event.keys() == {"time", "kind", "sandbox", "cut"}
    assert json.dumps(event)
