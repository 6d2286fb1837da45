"""The OpenAI Agents SDK's client on local jails: what no test of the SDK itself asks for."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import RunConfig, Runner
from agents.run_state import RunState
from agents.sandbox import (
    LocalSnapshotSpec,
    Manifest,
    SandboxAgent,
    SandboxPathGrant,
    SandboxRunConfig,
)
from agents.sandbox.capabilities import Shell, ShellToolSet
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    InvalidManifestPathError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceStartError,
)
from agents.sandbox.manifest import Environment
from agents.sandbox.session import SandboxSession
from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from agents.testing import ScriptedModel, assistant_message, function_call

from sandbox_kernel.agents import workspace_tar
from sandbox_kernel.agents.openai_agents import (
    SandboxKernelClient,
    SandboxKernelClientOptions,
    terminals,
)
from sandbox_kernel.agents.openai_agents import session as session_module
from sandbox_kernel.errors import SandboxTimeout, SpecRefused
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.tunnel.background import run, submit
from tests.helpers.coroutines import RunCoroutine, on_own_loop
from tests.helpers.own_folders import own_folders

Payload = dict[str, Any]


@pytest.fixture(scope="session")
def run_coroutine() -> RunCoroutine:
    """An application has a loop of its own, which is not that of the sandboxes."""
    return on_own_loop


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    """Own folders, in which no sandbox may be left."""
    with own_folders():
        yield
        left = submit(LocalClient().list()).result()
        for name in left:
            submit(LocalClient().remove(name)).result()
        assert not left


@contextlib.asynccontextmanager
async def a_session(
    client: SandboxKernelClient | None = None, **options: Any
) -> AsyncIterator[SandboxSession]:
    """A started session, deleted afterwards."""
    client = client or SandboxKernelClient()
    given = {key: options.pop(key) for key in ("manifest", "snapshot") if key in options}
    session = await client.create(options=SandboxKernelClientOptions(**options), **given)
    try:
        await session.start()
        yield session
    finally:
        await session.shutdown()
        await client.delete(session)


async def sandboxes() -> list[str]:
    return await run(LocalClient().list())


def text(session_state: Any) -> str:
    return json.dumps(SandboxKernelClient().serialize_session_state(session_state))


async def content(session: SandboxSession, path: str) -> bytes:
    with await session.read(Path(path)) as file:
        found: bytes = file.read()
    return found


# --- resuming

IN_ANOTHER_PROCESS = """
import asyncio, json, sys
from pathlib import Path
from sandbox_kernel.agents.openai_agents import SandboxKernelClient

async def main():
    client = SandboxKernelClient()
    session = await client.resume(client.deserialize_session_state(json.loads(sys.argv[1])))
    await session.start()
    print((await session.read(Path("note.txt"))).read().decode())
    print((await session.exec("cat /proc/[0-9]*/comm")).stdout.decode())
    await session.write(Path("answer.txt"), __import__("io").BytesIO(b"from the other process"))

asyncio.run(main())
"""


async def test_another_process_resumes_the_same_sandbox() -> None:
    """A state is enough for a process that has never seen the sandbox; no second one is made, and
    what runs in it runs on."""
    async with a_session() as session:
        await session.write(Path("note.txt"), io.BytesIO(b"written before"))
        await session.exec("sleep 987 > /dev/null 2>&1 &")
        argv = [sys.executable, "-c", IN_ANOTHER_PROCESS, text(session.state)]
        done = await asyncio.to_thread(
            subprocess.run, argv, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("written before")
        assert "\nsleep\n" in done.stdout
        assert await content(session, "answer.txt") == b"from the other process"
        assert await sandboxes() == [session.state.sandbox]  # type: ignore[attr-defined]


async def test_a_session_that_was_shut_down_is_made_anew_from_its_snapshot(tmp_path: Path) -> None:
    """A jail cannot be stopped and started again, so the name is free and the files come back."""
    client = SandboxKernelClient()
    snapshot = LocalSnapshotSpec(base_path=tmp_path)
    session = await client.create(snapshot=snapshot)
    async with session:
        await session.write(Path("kept.bin"), io.BytesIO(bytes(range(256))))
        await session.exec("ln -s kept.bin link; chmod 755 kept.bin")
    assert await sandboxes() == []
    state = client.deserialize_session_state(json.loads(text(session.state)))
    resumed = await client.resume(state)
    try:
        await resumed.start()
        assert await content(resumed, "link") == bytes(range(256))
        assert (await resumed.exec("test -x kept.bin && readlink link")).stdout == b"kept.bin\n"
    finally:
        await resumed.shutdown()
        await client.delete(resumed)


async def test_a_passing_failure_makes_no_second_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the sandbox is there is not known, so none is made; later the session goes on."""
    async with a_session() as session:
        await session.write(Path("note.txt"), io.BytesIO(b"still here"))
        client = SandboxKernelClient()
        state = client.deserialize_session_state(json.loads(text(session.state)))
        resumed = await client.resume(state)

        async def fails(self: LocalClient, name: str) -> Any:
            raise SandboxTimeout("The service did not answer.")

        with monkeypatch.context() as patch:
            patch.setattr(LocalClient, "get", fails)
            patch.setattr(LocalClient, "create", None)
            with pytest.raises(WorkspaceStartError):
                await resumed.start()
        assert len(await sandboxes()) == 1
        await resumed.start()
        assert await content(resumed, "note.txt") == b"still here"
        assert len(await sandboxes()) == 1


async def test_a_sandbox_that_ends_under_way_is_not_replaced() -> None:
    """What was in it would be missing without a word; the next start of the session decides."""
    async with a_session() as session:
        await run((await run(LocalClient().get(session.state.sandbox))).kill())  # type: ignore[attr-defined]
        with pytest.raises(ExecTransportError, match="has ended"):
            await session.exec("true")
        assert not await session.running()


async def test_two_that_resume_at_once_share_one_sandbox(tmp_path: Path) -> None:
    """Of two processes that find no sandbox one makes it, and the other takes that."""
    client = SandboxKernelClient()
    session = await client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path))
    both = [await client.resume(session.state.model_copy()) for _ in range(2)]
    try:
        await asyncio.gather(*(one.exec("true") for one in both))
        assert len(await sandboxes()) == 1
    finally:
        await client.delete(session)


# --- what a state holds


async def test_a_state_has_no_secrets_and_no_rights_over_the_host(tmp_path: Path) -> None:
    """Neither the values nor the sources of what only the client may give are in it."""
    async with a_session(
        env={"API_KEY": "sk-secret-value"}, memory_mib=512, readable=[str(tmp_path)]
    ) as session:
        assert (await session.exec('printf "%s" "$API_KEY"')).stdout == b"sk-secret-value"
        stored = text(session.state)
        assert "sk-secret-value" not in stored
        assert str(tmp_path) not in stored
        payload = json.loads(stored)
    assert payload["settings"] == {"memory_mib": 512}
    assert payload["withheld"] == ["env", "readable"]


async def test_what_a_state_withholds_is_not_left_out_in_silence() -> None:
    """Without the client's own options a sandbox that is gone has no equal; with them it has."""
    options = SandboxKernelClientOptions(env={"API_KEY": "sk-secret-value"})
    session = await SandboxKernelClient().create(options=options)
    payload = json.loads(text(session.state))
    client = SandboxKernelClient()
    resumed = await client.resume(client.deserialize_session_state(dict(payload)))
    with pytest.raises(WorkspaceStartError) as refused:
        await resumed.start()
    assert isinstance(refused.value.cause, SpecRefused)
    client = SandboxKernelClient(options=options)
    resumed = await client.resume(client.deserialize_session_state(dict(payload)))
    try:
        assert (await resumed.exec('printf "%s" "$API_KEY"')).stdout == b"sk-secret-value"
    finally:
        await client.delete(resumed)


@pytest.mark.parametrize("setting", [{"folder": "/"}, {"readable": ["/etc"]}, {"env": {"A": "b"}}])
def test_a_forged_state_gets_nothing_of_the_host(setting: Payload) -> None:
    """A state from a database may have been changed there."""
    client = SandboxKernelClient()
    forged = {"type": "sandbox_kernel", "snapshot": {"type": "noop", "id": "x"}, "manifest": {}}
    with pytest.raises(ValueError, match="payload is invalid"):
        client.deserialize_session_state({**forged, "settings": setting})


def test_importing_registers_options_and_state() -> None:
    """``RunState.from_json`` and ``parse`` know both by their type alone."""
    options = SandboxKernelClientOptions(backend="islo", cpus=2, pause_on_exit=True)
    assert BaseSandboxClientOptions.parse(options.model_dump(mode="json")) == options
    assert options.settings == {"cpus": 2.0}
    with pytest.raises(ValueError, match="memory_gib"):
        SandboxKernelClientOptions(memory_gib=1)


async def test_what_a_backend_cannot_enforce_is_refused_before_anything_is_made() -> None:
    """Named, with the way out."""
    client = SandboxKernelClient()
    with pytest.raises(SpecRefused, match="image"):
        await client.create(options=SandboxKernelClientOptions(image="python:3.12"))
    with pytest.raises(SpecRefused, match="pause_on_exit"):
        await client.create(options=SandboxKernelClientOptions(pause_on_exit=True))
    grant = SandboxPathGrant(path="/data", host_path="/etc", read_only=True)
    with pytest.raises(ValueError, match="same path"):
        await client.create(manifest=Manifest(extra_path_grants=(grant,)))
    assert await sandboxes() == []


# --- commands


async def test_variables_of_the_manifest_reach_commands_and_terminals() -> None:
    """Each command has them, on top of those of the sandbox."""
    manifest = Manifest(environment=Environment(value={"GREETING": "hello"}))
    async with a_session(manifest=manifest, env={"WHO": "world"}) as session:
        assert (await session.exec('echo "$GREETING $WHO"')).stdout == b"hello world\n"
        shown = await session.pty_exec_start('echo "$GREETING $WHO"', tty=True, yield_time_s=5)
        assert b"hello world" in shown.output


async def test_output_is_exact_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any byte comes through; too many are left out with a note, and the command goes on."""
    async with a_session() as session:
        every = await session.exec("python3", "-c", _EVERY_BYTE, shell=False)
        assert every.stdout == bytes(range(256))
        assert every.exit_code == 3
        flood = await session.exec("head -c 40000000 /dev/zero; echo end >&2")
        assert len(flood.stdout) == 16 * 2**20
        assert b"end" in flood.stderr
        assert b"left out" in flood.stderr


_EVERY_BYTE = "import sys; sys.stdout.buffer.write(bytes(range(256))); sys.exit(3)"


async def test_a_command_that_is_late_is_killed_with_its_children() -> None:
    """The SDK is told, and nothing of it runs on in the sandbox."""
    async with a_session() as session:
        with pytest.raises(ExecTimeoutError):
            await session.exec("sleep 4321 & sleep 4321", timeout=1)
        found = await session.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert b"sleep 4321" not in found.stdout
        assert await session.running()


async def test_what_a_command_leaves_in_the_background_goes_on() -> None:
    """A server that the agent starts is there for its next command, and holds no answer up."""
    async with a_session() as session:
        assert (await session.exec("sleep 4323 & echo started")).stdout == b"started\n"
        found = await session.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert b"sleep 4323" in found.stdout


async def test_a_cancelled_command_is_killed() -> None:
    """A run that is cancelled leaves nothing running."""
    async with a_session() as session:
        task = asyncio.create_task(session.exec("touch started; exec sleep 4322"))
        while not (await session.exec("test -e started")).ok():
            assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await session.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert b"sleep 4322" not in found.stdout


async def test_the_sandboxs_own_user_needs_no_sudo_and_others_are_refused_in_words() -> None:
    """A jail has one user; it says so instead of running the command as that one."""
    async with a_session() as session:
        own = (await session.exec("id -un")).stdout.decode().strip()
        assert (await session.exec("id -un", user=own)).stdout.decode().strip() == own
        await session.write(Path("note.txt"), io.BytesIO(b"mine"), user=own)
        with await session.read(Path("note.txt"), user=own) as file:
            assert file.read() == b"mine"
        refused = await session.exec("echo ran", user="nobody-here")
        assert refused.exit_code == 126
        assert b"as user nobody-here: it has no such user" in refused.stderr
        assert b"ran" not in refused.stdout


async def test_a_terminal_is_one_from_any_loop() -> None:
    """Input, echo, size and the end of a shell; each step from a loop of its own, as with
    ``run_sync``."""
    session = await SandboxKernelClient().create()

    def step(coroutine: Any) -> Any:
        return asyncio.run(coroutine)

    async def start() -> Any:
        await session.start()
        return await session.pty_exec_start("cat", shell=False, tty=True, yield_time_s=0.3)

    try:
        begun = await asyncio.to_thread(step, start())
        assert begun.process_id is not None
        typed = session.pty_write_stdin(session_id=begun.process_id, chars="hello\n")
        shown = await asyncio.to_thread(step, typed)
        assert shown.output.replace(b"\r", b"").count(b"hello\n") >= 1
        ended = session.pty_write_stdin(session_id=begun.process_id, chars="\x04", yield_time_s=10)
        over = await asyncio.to_thread(step, ended)
        assert (over.process_id, over.exit_code) == (None, 0)
    finally:
        await session.shutdown()
        await SandboxKernelClient().delete(session)


async def test_a_flood_in_a_terminal_is_bounded_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command that writes more than an update may hold waits, and goes on with the next one."""
    monkeypatch.setattr(terminals, "_MOST", 10**6)
    async with a_session() as session:
        first = await session.pty_exec_start("head -c 1500000 /dev/zero; echo end", yield_time_s=5)
        assert first.process_id is not None
        assert 10**6 <= len(first.output) < 1.4 * 10**6
        rest = await session.pty_write_stdin(session_id=first.process_id, chars="", yield_time_s=30)
        assert rest.exit_code == 0
        assert len(first.output) + len(rest.output) == 1_500_000 + len("end\n")


# --- files


async def test_paths_outside_need_a_grant() -> None:
    """Also by a symlink that a command has made; a granted path can be read."""
    grants = (SandboxPathGrant(path="/tmp/granted"),)
    async with a_session(manifest=Manifest(extra_path_grants=grants)) as session:
        await session.exec(
            "ln -s /etc/passwd link; mkdir -p /tmp/granted; echo yes > /tmp/granted/a"
        )
        for path in ("link", "/etc/passwd", "../etc/passwd"):
            with pytest.raises(InvalidManifestPathError):
                await session.read(Path(path))
            with pytest.raises(InvalidManifestPathError):
                await session.write(Path(path), io.BytesIO(b"x"))
        assert await content(session, "/tmp/granted/a") == b"yes\n"


async def test_a_grant_shows_a_path_of_the_host(tmp_path: Path) -> None:
    """On the local backend, read-only and at the same path."""
    (tmp_path / "data.txt").write_text("of the host")
    grant = SandboxPathGrant(path=str(tmp_path), host_path=str(tmp_path), read_only=True)
    async with a_session(manifest=Manifest(extra_path_grants=(grant,))) as session:
        assert await content(session, str(tmp_path / "data.txt")) == b"of the host"
        with pytest.raises(WorkspaceArchiveWriteError):
            await session.write(tmp_path / "data.txt", io.BytesIO(b"x"))
    assert (tmp_path / "data.txt").read_text() == "of the host"


async def test_a_file_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox cannot fill the host's disk or memory; the part that was asked for can be had."""
    monkeypatch.setattr(session_module, "MAX_FILE", 10**6)
    async with a_session() as session:
        await session.exec("head -c 2000000 /dev/zero > large")
        with pytest.raises(WorkspaceArchiveReadError):
            await session.read(Path("large"))
        assert await session.read_bounded(Path("large"), max_bytes=10) == bytes(10)
        with pytest.raises(WorkspaceArchiveWriteError):
            await session.write(Path("x"), io.BytesIO(bytes(10**6 + 1)))


# --- archives


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    packed.seek(0)
    return packed


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


def with_comment(comment: str) -> tarfile.TarInfo:
    made = member("x")
    made.pax_headers = {"comment": comment}
    return made


HOSTILE: dict[str, Callable[[], io.BytesIO]] = {
    "..": lambda: archive_of((member("a/../../x"), b"1")),
    "absolute": lambda: archive_of((member("/tmp/x"), b"1")),
    "symlink out": lambda: archive_of((member("x", tarfile.SYMTYPE, "../../etc/passwd"), b"")),
    "absolute symlink": lambda: archive_of((member("x", tarfile.SYMTYPE, "/etc/passwd"), b"")),
    "symlinks that lead out together": lambda: archive_of(
        (member("a", tarfile.DIRTYPE), b""),
        (member("a/up", tarfile.SYMTYPE, ".."), b""),
        (member("x", tarfile.SYMTYPE, "a/up/../etc"), b""),
    ),
    "file below a symlink": lambda: archive_of(
        (member("a", tarfile.SYMTYPE, "b"), b""), (member("a/x"), b"1")
    ),
    "hard link": lambda: archive_of((member("x", tarfile.LNKTYPE, "keep.txt"), b"")),
    "device": lambda: archive_of((member("x", tarfile.CHRTYPE), b"")),
    "pipe": lambda: archive_of((member("x", tarfile.FIFOTYPE), b"")),
    "twice": lambda: archive_of((member("x"), b"1"), (member("./x"), b"2")),
    "huge": lambda: archive_of((member("x"), bytes(3_000_000))),
    "huge when unpacked": lambda: io.BytesIO(
        gzip.compress(archive_of((member("x"), bytes(3_000_000))).getvalue())
    ),
    "long header": lambda: archive_of((with_comment("x" * 1_500_000), b"")),
    "cut": lambda: io.BytesIO(archive_of((member("x"), bytes(99_999))).getvalue()[:2000]),
    "no archive": lambda: io.BytesIO(b"not a tar archive"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[SandboxSession]:
    """One session for archives that must leave it as it is."""
    client = SandboxKernelClient()

    async def begin() -> SandboxSession:
        session = await client.create()
        await session.start()
        await session.write(Path("keep.txt"), io.BytesIO(b"kept"))
        return session

    session = submit(begin()).result()
    yield session
    submit(session.shutdown()).result()
    submit(client.delete(session)).result()


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_archive_changes_nothing(
    kind: str, shared: SandboxSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is judged as a whole before a byte of it reaches the sandbox."""
    monkeypatch.setattr(workspace_tar, "MAX_BYTES", 2_000_000)
    with pytest.raises(WorkspaceArchiveWriteError):
        await shared.hydrate_workspace(HOSTILE[kind]())
    assert (await shared.exec("ls -A")).stdout == b"keep.txt\n"
    assert await content(shared, "keep.txt") == b"kept"


async def test_a_hostile_sandbox_gives_no_hostile_archive(shared: SandboxSession) -> None:
    """Its python may pack what it likes; the host takes files, folders and links only."""
    inner: Any = shared._inner
    packed = archive_of((member("../../etc/cron.d/x"), b"evil"))

    async def forged(*_: Any) -> io.BytesIO:
        return packed

    taken, inner._taken = inner._taken, forged
    try:
        with pytest.raises(WorkspaceArchiveReadError):
            await shared.persist_workspace()
    finally:
        inner._taken = taken


async def test_a_cancelled_unpacking_waits_for_the_thread(
    shared: SandboxSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave the archive may close it when the call has ended."""
    began, may_end = threading.Event(), threading.Event()
    check = workspace_tar.check

    def slow(archive: Any) -> None:
        began.set()
        assert may_end.wait(30)
        check(archive)

    monkeypatch.setattr(workspace_tar, "check", slow)
    task = asyncio.create_task(shared.hydrate_workspace(archive_of((member("x"), b"1"))))
    assert await asyncio.to_thread(began.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await shared.exec("ls -A")).stdout == b"keep.txt\n"


# --- ports


async def test_an_exposed_port_leads_into_the_sandbox() -> None:
    """Over commands, so it works without any network; it is gone when the session is."""
    async with a_session(exposed_ports=(8917,)) as session:
        server = "python3 -u -m http.server --bind 127.0.0.1 8917 2>&1"
        await session.write(Path("index.html"), io.BytesIO(b"from the sandbox"))
        begun = await session.pty_exec_start(server, tty=True, yield_time_s=0.3)
        while b"Serving" not in begun.output and begun.exit_code is None:
            begun = await session.pty_write_stdin(session_id=begun.process_id or 0, chars="\n")
        endpoint = await session.resolve_exposed_port(8917)
        fetched = await asyncio.to_thread(_get, endpoint.host, endpoint.port)
        assert fetched.endswith(b"from the sandbox")
    with pytest.raises(OSError, match="refused"):
        _get(endpoint.host, endpoint.port)


def _get(host: str, port: int) -> bytes:
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        found = b""
        while chunk := connection.recv(4096):
            found += chunk
    return found


# --- with the SDK's runner


async def test_a_run_that_waits_for_approval_goes_on_from_json() -> None:
    """A run is interrupted, stored as JSON, and resumed; nothing is left of either sandbox."""

    def ask_first(tools: ShellToolSet) -> None:
        tools.exec_command.needs_approval = True

    model = ScriptedModel(
        [
            [function_call("exec_command", {"cmd": "echo approved > out; cat out"}, call_id="1")],
            [assistant_message("done", item_id="2")],
        ]
    )
    agent = SandboxAgent(name="a", model=model, capabilities=[Shell(configure_tools=ask_first)])
    client, before = SandboxKernelClient(), await sandboxes()
    config = RunConfig(
        sandbox=SandboxRunConfig(client=client, options=SandboxKernelClientOptions())
    )
    first = await Runner.run(agent, "go", run_config=config)
    assert len(first.interruptions) == 1
    state = await RunState.from_json(agent, json.loads(json.dumps(first.to_state().to_json())))
    state.approve(state.get_interruptions()[0])
    resumed = await Runner.run(agent, state, run_config=config)
    assert resumed.final_output == "done"
    assert any("approved" in str(getattr(item, "output", "")) for item in resumed.new_items)
    assert await sandboxes() == before


def test_the_example(tmp_path: Path) -> None:
    """Its agent counts in a jail, and sees nothing of the host."""
    example = Path(__file__).parents[2] / "examples" / "openai_agents.py"
    ran = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert "\n237000\n" in ran.stdout
    assert ran.stdout.endswith("237000 people live in the three cities.\n")
    assert os.listdir(tmp_path) == []


def test_the_documented_example_runs(tmp_path: Path) -> None:
    """What docs/frameworks.md shows is whole and works."""
    page = Path(__file__).parents[2] / "docs" / "frameworks.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    scripted = "from agents.testing import ScriptedModel, assistant_message\n" + code.replace(
        "model=MODEL", 'model=ScriptedModel([[assistant_message("done")]])'
    )
    ran = subprocess.run(
        [sys.executable, "-c", scripted], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\n"
