"""The local jail as a backend: its life from creation to removal, and the commands in it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandbox_kernel
from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxExists,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
    SpecError,
    SpecRefused,
)
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.local import LocalClient, bubblewrap
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.sandboxes.untrusted_files import remove_tree
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.waiting import until

from .jails import NOBODY, SYSTEM_PYTHON, public_bwrap, public_folder
from .sandboxes import client_that_leaves_nothing, running, sandbox, traces


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    with client_that_leaves_nothing(own_dirs) as client:
        yield client


@pytest.fixture
def marker() -> str:
    """An argument that no other process on this host has."""
    return f"marker-{uuid.uuid4()}"


# --- commands ---


async def test_exec_gives_output_and_exit_code(client: LocalClient) -> None:
    """stdout, stderr and the exit code come back apart."""
    async with sandbox(client) as handle:
        result = await handle.shell("echo out; echo err >&2; exit 7")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)


async def test_a_sandbox_finds_itself_by_its_name(client: LocalClient) -> None:
    """Libraries look up the address of the machine that they run on."""
    async with sandbox(client) as handle:
        code = "import socket; print(socket.gethostbyname(socket.gethostname()))"
        assert (await handle.exec("python3", ["-c", code])).stdout == "127.0.0.1\n"


async def test_exec_feeds_stdin(client: LocalClient) -> None:
    """Bytes go through unchanged, and the end of input is seen."""
    async with sandbox(client) as handle:
        code = "import sys, hashlib; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
        data = os.urandom(3 * 2**20)
        result = await handle.exec("python3", ["-c", code], stdin=data)
        assert result.stdout.strip() == hashlib.sha256(data).hexdigest()


async def test_large_output_is_cut_and_said_so(client: LocalClient) -> None:
    """What is more than max_output is read and dropped, so the command can end."""
    async with sandbox(client) as handle:
        result = await handle.exec("head", ["-c", "30000000", "/dev/zero"], max_output=1000)
        assert result.ok
        assert result.truncated
        assert len(result.stdout) == 1000


async def test_streams_push_back(client: LocalClient) -> None:
    """A command whose output nobody reads stops, and goes on when it is read."""
    async with sandbox(client) as handle:
        code = "import sys\nfor i in range(100000): print('x' * 99); sys.stderr.write('.')"
        async with await handle.open_stream(["python3", "-c", code]) as stream:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.wait(), 0.5)
            errors = asyncio.create_task(drain(stream.read_stderr))
            assert len(await drain(stream.read)) == 10_000_000
            assert len(await errors) == 100_000
            assert await stream.wait() == 0
        async with await handle.open_stream(["sleep", "100"]) as stream:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.write(bytes(10 * 2**20)), 0.5)


async def drain(read: object) -> bytes:
    found = bytearray()
    while piece := await read():  # type: ignore[operator]
        found += piece
    return bytes(found)


async def test_exit_by_signal_is_negative(client: LocalClient) -> None:
    """A command that signal N ended has the exit code -N."""
    async with sandbox(client) as handle:
        assert (await handle.shell("kill -SEGV $$")).exit_code == -signal.SIGSEGV
        async with await handle.open_stream(["sleep", "100"]) as stream:
            await stream.send_signal(signal.SIGTERM)
            assert await stream.wait() == -signal.SIGTERM
            await stream.send_signal(signal.SIGTERM)


async def test_signals_reach_the_whole_group(client: LocalClient) -> None:
    """A signal goes to the children of the command, too, as from a terminal."""
    async with sandbox(client) as handle:
        script = "trap 'echo caught; exit 3' TERM; sh -c 'echo ready; sleep 100' & wait"
        async with await handle.open_stream(["sh", "-c", script]) as stream:
            assert await stream.read() == b"ready\n"
            await stream.send_signal(signal.SIGTERM)
            assert await drain(stream.read) == b"caught\n"
            assert await stream.wait() == 3


async def test_default_signals_in_commands(client: LocalClient) -> None:
    """Nothing of jailinit's own signal handling is passed on."""
    async with sandbox(client) as handle:
        status = (await handle.exec("cat", ["/proc/self/status"])).stdout
        masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
        assert int(masks["SigBlk"], 16) == 0
        own_to_libc = 1 << 31 | 1 << 32  # glibc's posix_spawn ignores its internal signals
        assert int(masks["SigIgn"], 16) & ~own_to_libc == 0
        assert (await handle.shell("yes | head -1")).stdout == "y\n"


async def test_timeout_kills_the_command(client: LocalClient, marker: str) -> None:
    """A command that takes too long is ended with all of its group, even if it resists."""
    async with sandbox(client) as handle:
        script = "trap '' HUP TERM; sh -c 'sleep 1000' child; sleep 1000"
        with pytest.raises(SandboxTimeout, match="did not end within"):
            await handle.exec("sh", ["-c", script, marker], timeout=0.5)
        await until(lambda: not running(marker))
        assert (await handle.exec("true")).ok


async def test_closing_a_stream_spares_other_processes(client: LocalClient, marker: str) -> None:
    """Only the command's own process group ends with its stream."""
    async with sandbox(client) as handle:
        await handle.spawn(["sh", "-c", "while :; do sleep 1; done", marker])
        stream = await handle.open_stream(["sh", "-c", "sleep 1000", marker + "-attached"])
        await stream.close()
        await stream.close()
        await until(lambda: not running(marker + "-attached"))
        assert running(marker)


async def test_unknown_program(client: LocalClient) -> None:
    """What cannot be run is an ExecFailed that says what and why."""
    async with sandbox(client) as handle:
        with pytest.raises(ExecFailed, match=r"'no-such-program' could not be run.*No such file"):
            await handle.exec("no-such-program")
        with pytest.raises(ExecFailed, match="Permission denied"):
            await handle.exec("/etc/passwd")
        with pytest.raises(ExecFailed, match="/nowhere"):
            await handle.exec("true", cwd="/nowhere")
        with pytest.raises(ExecFailed):
            await handle.spawn(["no-such-program"])
        with pytest.raises(SandboxError, match="too long"):
            await handle.exec("true", ["x" * 2**20])


async def test_environment_holds_only_what_was_named(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's variables stay out; the spec's and the call's are there."""
    monkeypatch.setenv("HOST_SECRET", "hush")
    async with sandbox(client, env={"FROM_SPEC": "1"}) as handle:
        result = await handle.exec("env", env={"FROM_CALL": "2"})
        found = dict(line.split("=", 1) for line in result.stdout.splitlines())
        assert found["FROM_SPEC"] == "1"
        assert found["FROM_CALL"] == "2"
        assert found["HOME"] == "/home/sandbox"
        assert "HOST_SECRET" not in result.stdout
        assert "hush" not in (await handle.shell("cat /proc/1/environ")).stdout


async def test_commands_run_in_the_workspace(client: LocalClient) -> None:
    """/workspace is the current folder, and it and the home are writable."""
    async with sandbox(client) as handle:
        script = (
            "pwd; echo 1 > a && echo 2 > ~/b && echo 3 > /tmp/c && echo 4 > /run/sandbox-kernel/d"
        )
        result = await handle.shell(script)
        assert (result.stdout, result.exit_code) == ("/workspace\n", 0)
        assert not (await handle.shell("echo 1 > /usr/x")).ok


async def test_terminal(client: LocalClient) -> None:
    """A stream with a terminal has a size, job control and an end of input."""
    async with sandbox(client) as handle:
        script = "tty; stty size; read line; stty size; echo got $line; cat; echo done"
        async with await handle.open_stream(["sh", "-c", script], tty=(24, 80)) as stream:
            seen = await read_until(stream, b"24 80")
            assert b"/dev/pts/" in seen
            await stream.resize(50, 132)
            await stream.write(b"hello\n")
            await read_until(stream, b"got hello")
            await stream.close_stdin()
            seen = await drain(stream.read)
            assert b"done" in seen
            assert await stream.read_stderr() == b""
            assert await stream.wait() == 0
        async with await handle.open_stream(["sleep", "99"], tty=(9, 9)) as stream:
            await stream.write(b"\x03")
            assert await stream.wait() == -signal.SIGINT


async def read_until(stream: object, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        piece = await stream.read()  # type: ignore[attr-defined]
        assert piece, seen
        seen += piece
    return seen


async def test_duplex_socket(client: LocalClient) -> None:
    """One socket is the command's stdin and stdout; its stderr goes to the log."""
    async with sandbox(client) as handle:
        script = "echo to the log >&2; exec cat"
        loop = asyncio.get_running_loop()
        async with await handle.open_stream(["sh", "-c", script], duplex=True) as stream:
            assert stream.socket is not None
            data = os.urandom(2**20)
            sending = asyncio.create_task(loop.sock_sendall(stream.socket, data))
            back = bytearray()
            while len(back) < len(data):
                back += await loop.sock_recv(stream.socket, 2**18)
            await sending
            assert back == data
            assert await stream.read_stderr() == b""
            await stream.close_stdin()
            assert await stream.wait() == 0
        await until(lambda: log_has(handle, "to the log"))
        async with await handle.open_stream(["cat"], duplex=True) as stream:
            await stream.write(b"also this way")
            assert await stream.read() == b"also this way"


_ASK_ABOUT_THE_NETWORK = """
import array, errno, fcntl, json, os, socket, struct
buffer = array.array("B", bytes(4096))
def attempt(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
def ask(request):
    return attempt(fcntl.ioctl, 0, request, struct.pack("iL", 4096, buffer.buffer_info()[0]))
sock = socket.socket(fileno=0)
eth = struct.pack("16s24x", b"lo")
found = {
    "interfaces": ask(0x8912),
    "address": attempt(fcntl.ioctl, 0, 0x8915, eth),
    "hardware": attempt(fcntl.ioctl, 0, 0x8927, eth),
    "settings": attempt(fcntl.ioctl, 0, 0x8946, eth),
    "namespace": attempt(fcntl.ioctl, 0, 0x894C),
    "radio": attempt(fcntl.ioctl, 0, 0x8B01, eth),
    "name": attempt(sock.bind, chr(0) + "sandbox-kernel-squatter"),
    "listen": attempt(sock.listen, 1),
    "own": socket.if_nametoindex("lo"),
}
print(json.dumps(found), flush=True)
"""


async def test_a_socket_of_the_host_is_no_window_to_its_network(client: LocalClient) -> None:
    """The socket of a command, and a client's that is handed over, were made in the host's network
    namespace. They tell nothing of it, and take no name in it."""
    async with sandbox(client) as handle:
        command = ["python3", "-c", _ASK_ABOUT_THE_NETWORK]
        async with await handle.open_stream(command, duplex=True) as stream:
            found = json.loads(await read_until(stream, b"\n"))
    for what in ("interfaces", "address", "hardware", "settings", "namespace", "radio"):
        assert found[what] == "ENODEV", what
    assert (found["name"], found["listen"], found["own"]) == ("EINVAL", "EINVAL", 1)


async def log_has(handle: object, text: str) -> bool:
    return text in await handle.logs()  # type: ignore[attr-defined]


async def test_many_commands_at_once(client: LocalClient) -> None:
    """Commands do not get each other's output."""
    async with sandbox(client) as handle:
        results = await asyncio.gather(*(handle.exec("echo", [str(n)]) for n in range(100)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(100)]
        assert (await handle.info()).detail["processes"] == 0


async def test_guest_program_and_kernel_command(client: LocalClient) -> None:
    """The guest package runs without being copied; the host's interpreter becomes the jail's."""
    async with sandbox(client) as handle:
        await handle.install_guest(b"")
        program, *arguments = handle.guest_argv("nonsense", "a b")
        result = await handle.exec(program, arguments)
        assert result.exit_code == 2
        assert "usage" in result.stderr
        command = handle.kernel_argv([sys.executable, "-m", "ipykernel"])
        assert command == ["/home/sandbox/.venv/bin/python", "-m", "ipykernel"]
        assert handle.kernel_argv(["/usr/bin/R", "-x"]) == ["/usr/bin/R", "-x"]
        sibling = str(Path(sys.executable).with_name("python3"))
        if os.path.exists(sibling):
            assert handle.kernel_argv([sibling])[0] == "/home/sandbox/.venv/bin/python"
        code = "import sys; print(sys.prefix)"
        assert (await handle.exec(command[0], ["-c", code])).stdout == "/home/sandbox/.venv\n"


# --- life and death ---


async def test_spawned_command_writes_to_the_log(client: LocalClient) -> None:
    """The log has the output of spawned commands, bounded and without control characters."""
    async with sandbox(client) as handle:
        await handle.spawn(["sh", "-c", r"printf 'one\n\033[2Jtwo\nthree\n'"])
        await until(lambda: log_has(handle, "exit code 0"))
        log = await handle.logs()
        assert "one\n\\x1b[2Jtwo\n" in log
        assert len((await handle.logs(tail=2)).splitlines()) == 2
        await handle.spawn(["head", "-c", "20000000", "/dev/zero"])
        await until(lambda: log_has(handle, "'head' ended"))
        assert (await client.get(handle.name))._folders.log.stat().st_size < 5 * 2**20


async def test_end_of_the_main_command_ends_the_jail(client: LocalClient) -> None:
    """A jail can be told to live as long as one command."""
    async with sandbox(client) as handle:
        assert (await handle.shell("mkfifo go")).ok
        await handle.spawn(["sh", "-c", "read x < go"], main=True)
        with contextlib.suppress(SandboxGone):  # the shell may be overtaken by the end
            await handle.shell("echo > go")
        await until(lambda: has_stopped(handle))
        info = await handle.info()
        assert "main process 'sh' ended" in info.detail["reason"]


async def has_stopped(handle: LocalHandle) -> bool:
    return (await handle.info()).status == "stopped"


async def test_stop_keeps_folders_and_says_why(client: LocalClient) -> None:
    """A stopped sandbox answers for itself, but runs nothing."""
    async with sandbox(client) as handle:
        await handle.spawn(["sh", "-c", "trap 'echo orderly; exit' TERM; sleep 1000 & wait"])
        await handle.shell("echo kept > file")
        assert (await handle.info()).status == "running"
        await handle.stop()
        await handle.stop()
        again = await client.get(handle.name)
        info = await again.info()
        assert info.status == "stopped"
        assert info.detail["reason"] == "it was stopped"
        assert (Path(info.detail["workspace"]) / "file").read_text() == "kept\n"
        assert "orderly" in await again.logs()
        assert handle.name in await client.list()
        with pytest.raises(SandboxGone, match="it was stopped"):
            await again.exec("true")
        with pytest.raises(SandboxGone):
            await again.spawn(["true"])


async def test_kill_ends_everything_at_once(client: LocalClient, marker: str) -> None:
    """Kill leaves no process, and streams that were open say that the sandbox has gone."""
    async with sandbox(client) as handle:
        stream = await handle.open_stream(["sh", "-c", "trap '' TERM; sleep 1000", marker])
        await handle.kill()
        await handle.kill()
        assert not running(marker)
        assert await stream.read() == b""
        with pytest.raises(SandboxGone, match="it was killed"):
            await stream.wait()
        await stream.close()
        assert (await handle.info()).status == "stopped"


async def test_name_is_taken_once(client: LocalClient) -> None:
    """Of several that want a name at the same time, one gets it."""
    spec = SandboxSpec(name="twin")
    results = await asyncio.gather(*(client.create(spec) for _ in range(3)), return_exceptions=True)
    assert sum(isinstance(result, SandboxExists) for result in results) == 2
    assert await client.list() == ["twin"]
    assert (await (await client.get("twin")).exec("true")).ok
    await client.remove("twin")


async def test_remove_is_idempotent(client: LocalClient) -> None:
    """Removing twice, or what never was, is no error; then the sandbox is not found."""
    async with sandbox(client) as handle:
        await asyncio.gather(client.remove(handle.name), client.remove(handle.name))
        await client.remove(handle.name)
        with pytest.raises(SandboxNotFound):
            await client.get(handle.name)
        assert (await handle.info()).status == "gone"
        with pytest.raises(SandboxGone, match="it was removed"):
            await handle.exec("true")
    await client.remove("never-was")


async def test_remove_copes_with_hostile_folders(client: LocalClient, own_dirs: Path) -> None:
    """No links are followed, and neither permissions nor depth stop the removal."""
    precious = own_dirs / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    async with sandbox(client) as handle:
        code = (
            "import os\n"
            f"os.symlink({str(precious)!r}, 'link')\n"
            "for _ in range(1500): os.mkdir('d'); os.chdir('d')\n"
            "open('f', 'w').close(); os.chdir('/workspace'); os.mkdir('shut')\n"
            "open('shut/f', 'w').close(); os.chmod('shut', 0); os.mkfifo('pipe')\n"
        )
        assert (await handle.exec("python3", ["-c", code])).ok
    assert (precious / "file").read_text() == "keep me"


def test_remove_tree_of_nothing(tmp_path: Path) -> None:
    """A folder that is not there needs no removal."""
    remove_tree(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


CREATOR = """
import asyncio, os, signal, sys
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec

async def main():
    handle = await LocalClient().create(SandboxSpec(name="heir"))
    await handle.spawn(["sh", "-c", "echo $$ > pid; exec sleep 1000"])
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_jail_outlives_its_creator(client: LocalClient) -> None:
    """A jail and its spawned commands live on when its creator is killed, for others to use."""
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", CREATOR], check=False)
    assert ended.returncode == -signal.SIGKILL
    handle = await client.get("heir")
    try:
        await until(lambda: shell_ok(handle, "kill -0 $(cat pid)"))
        assert (await handle.info()).status == "running"
    finally:
        await client.remove("heir")
    assert await client.list() == []


async def shell_ok(handle: object, script: str) -> bool:
    return (await handle.shell(script)).ok  # type: ignore[attr-defined, no-any-return]


async def test_lease_ends_what_nobody_is_attached_to(client: LocalClient, marker: str) -> None:
    """An attached command keeps a jail; without one it ends, and the next creation clears it."""
    handle = await client.create(SandboxSpec(name="leased", lease_seconds=0.5))
    await handle.spawn(["sh", "-c", "sleep 1000", marker])
    assert (await handle.exec("sleep", ["1.2"])).ok
    await until(lambda: has_stopped(handle))
    assert not running(marker)
    assert "lease is over" in (await handle.info()).detail["reason"]
    assert "lease is over" in await handle.logs()
    assert await client.list() == ["leased"]
    async with sandbox(client, name="leased") as successor:
        assert (await successor.exec("true")).ok
        assert successor.id != handle.id


async def test_sweep_spares_what_was_stopped_on_purpose(client: LocalClient) -> None:
    """Only what ended by itself is cleared away."""
    async with sandbox(client) as handle:
        await handle.stop()
        await client.sweep()
        assert (await client.get(handle.name)).id == handle.id


async def test_named_workspace_outlives_its_sandbox(client: LocalClient) -> None:
    """What is in a named workspace is there for the next sandbox."""
    async with sandbox(client, volume="work") as handle:
        await handle.shell("echo 42 > answer; echo x > ~/home-file")
    async with sandbox(client, volume="work") as handle:
        assert (await handle.shell("cat answer; ls ~")).stdout == "42\n"


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.005, 0.01, 0.02, 0.03, 0.045, 0.06])
async def test_cancelled_creation_leaves_nothing(
    client: LocalClient, own_dirs: Path, marker: str, delay: float
) -> None:
    """Whenever a creation is cancelled, nothing is left; the name is free again."""
    # What a first creation finds out about the interpreter would be left to end by itself.
    await client.remove((await client.create(SandboxSpec())).name)
    before = traces(own_dirs)
    for _ in range(2):
        creation = asyncio.create_task(client.create(SandboxSpec(name=marker)))
        await asyncio.sleep(delay)
        creation.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await creation
            await client.remove(marker)  # it was faster
        after = traces(own_dirs)
        assert after["files"] == before["files"]
        assert after["processes"] == before["processes"]
        assert after["cgroups"] == before["cgroups"]
        assert not running(marker)


async def test_start_timeout(client: LocalClient) -> None:
    """A jail that does not start in time is an error, and gone."""
    with pytest.raises(SandboxTimeout, match="start_timeout"):
        await client.create(SandboxSpec(name="slow", start_timeout=0.001))
    assert await client.list() == []


async def test_failed_start_says_what_bwrap_said(
    client: LocalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bwrap that fails gives its words, and nothing is left."""
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\nif [ $1 = --version ]; then echo bubblewrap 0.11.0; exit; fi\n"
        "echo 'bwrap: no such luck' >&2; exit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match="no such luck"):
        await client.create(SandboxSpec(name="unlucky"))
    assert await client.list() == []
    found = await client.diagnose()
    assert any(line.ok is False and "no such luck" in line.fix for line in found)


async def test_interrupted_creation_is_swept(client: LocalClient, marker: str) -> None:
    """A creator that is killed half-way leaves a record that the next creation clears away."""
    code = (
        "import asyncio, os\n"
        "from sandbox_kernel.sandboxes.local import LocalClient, jail_start\n"
        "from sandbox_kernel.spec import SandboxSpec\n"
        "start = jail_start.Launch.start\n"
        "def die(self):\n    start(self); os._exit(9)\n"
        "jail_start.Launch.start = die\n"
        f"asyncio.run(LocalClient().create(SandboxSpec(name={marker!r})))\n"
    )
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=False)
    assert ended.returncode == 9
    assert await client.list() == [marker]
    handle = await client.get(marker)
    assert (await handle.info()).detail["reason"] == "its creation was interrupted"
    async with sandbox(client):
        assert marker not in await client.list()
    await until(lambda: not running(marker))


# --- the spec ---


@pytest.mark.parametrize("field", [{"image": "x"}, {"secrets": ("x",)}])
async def test_refuses_what_it_cannot_enforce(client: LocalClient, field: dict[str, str]) -> None:
    """A field that the jail has no means for is an error that names it."""
    with pytest.raises(SpecRefused, match=next(iter(field))):
        await client.create(SandboxSpec(**field))  # type: ignore[arg-type]


async def test_bad_specs(client: LocalClient, own_dirs: Path) -> None:
    """Errors in the spec are found before anything is left behind."""
    with pytest.raises(SpecError, match="does not exist"):
        await client.create(SandboxSpec(readable=("/no/such/path",)))
    with pytest.raises(SpecError, match="python"):
        await client.create(SandboxSpec(python="/no/such/python"))
    for own in ("/", "/proc", "/home", "/workspace", str(own_dirs / "data" / "records")):
        with pytest.raises(SpecError):
            await client.create(SandboxSpec(readable=(own,)))
    with pytest.raises(SpecRefused, match="open_files"):
        await client.create(SandboxSpec(open_files=2**40))


async def test_readable_paths(client: LocalClient, own_dirs: Path) -> None:
    """Named host paths can be read and not written; sandbox-kernel's own files stay hidden."""
    shared = own_dirs / "shared"
    shared.mkdir()
    (shared / "file").write_text("to be read")
    async with sandbox(client, readable=(str(shared), str(own_dirs))) as handle:
        assert (await handle.exec("cat", [f"{shared}/file"])).stdout == "to be read"
        assert not (await handle.shell(f"echo x > {shared}/file")).ok
        hidden = await handle.shell(f"ls -A {own_dirs}/data {own_dirs}/run")
        assert hidden.stdout.split() == [f"{own_dirs}/data:", f"{own_dirs}/run:"]


def test_backend_is_found_by_name() -> None:
    """The entry point leads here, if the distribution is installed."""
    from sandbox_kernel.sandboxes.backends import backend_names

    if "local" not in backend_names():
        pytest.skip("the distribution is not installed")
    assert isinstance(load_backend("local"), LocalClient)


async def test_diagnose(client: LocalClient) -> None:
    """All is well where these tests run."""
    found = await client.diagnose()
    assert [line for line in found if line.ok is False] == []
    assert any("bubblewrap" in line.what for line in found)
    assert any("jail starts" in line.what for line in found)
    assert any("limit" in line.what for line in found)


async def test_run_once(client: LocalClient) -> None:
    """The shortest way: code in a sandbox that is gone afterwards."""
    assert (await client.run_python("print(6 * 7)", timeout=60)).stdout == "42\n"
    assert await client.list() == []


# --- as an ordinary user ---

ORDINARY = """
import asyncio, json, os, signal
from sandbox_kernel.errors import SandboxTimeout
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec

BOMB = '''
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60); os._exit(0)
        made += 1
except OSError as error:
    print(made, error.strerror, flush=True)
    os.killpg(0, 9)
'''

async def main():
    client = LocalClient()
    handle = await client.create(SandboxSpec(name="ordinary", processes=50, memory_mib=256))
    seen = {"uid": os.getuid(), "limits": dict((await handle.info()).limits)}
    seen["echo"] = (await handle.exec("cat", stdin=b"hello")).stdout
    seen["bomb"] = (await handle.exec("python3", ["-c", BOMB], timeout=30)).stdout
    hog = await handle.exec("python3", ["-c", "x = b'x' * (1 << 29)"], timeout=60)
    seen["hog"] = [hog.exit_code, hog.stderr[-200:]]
    seen["info"] = (await handle.info()).detail
    await client.remove("ordinary")
    seen["left"] = await client.list()
    print(json.dumps(seen))

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
def test_as_an_ordinary_user() -> None:
    """Without any rights on the host everything works, and the limits hold."""
    with public_folder() as folder:
        bwrap = public_bwrap(folder)
        package = Path(sandbox_kernel.__file__).parent
        shutil.copytree(package, folder / "code" / package.name)
        home = folder / "home"
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        ran = subprocess.run(
            [SYSTEM_PYTHON, "-c", ORDINARY],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            env={
                "HOME": str(home),
                "PATH": f"{Path(bwrap.path).parent}:/usr/bin:/bin",
                "PYTHONPATH": str(folder / "code"),
                "SANDBOX_KERNEL_DATA_DIR": str(home / "data"),
                "SANDBOX_KERNEL_RUNTIME_DIR": str(home / "run"),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        seen = json.loads(ran.stdout)
        assert seen["uid"] == NOBODY
        assert seen["echo"] == "hello"
        made, _, why = seen["bomb"].partition(" ")
        assert int(made) < 50
        assert "temporarily unavailable" in why
        assert seen["hog"][0] != 0
        assert seen["left"] == []
        assert not list((home / "run").iterdir())
        assert bubblewrap.find().source in ("system", "wheel")
