"""The sandbox that the doors into frameworks share: commands, files, and its life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sandbox_kernel.agents.bridge_files import BridgeFiles, FileTooLarge
from sandbox_kernel.agents.collected_output import Output, collected
from sandbox_kernel.agents.sandbox_bridge import Outcome, SandboxBridge, blocking
from sandbox_kernel.errors import ExecFailed, LinkLost, SandboxGone, SandboxNotFound, SpecError
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.egress_environment import PROXY_PORT
from sandbox_kernel.sandboxes.exec_stream import ExecStream
from sandbox_kernel.tunnel import background
from tests.helpers.coroutines import finish
from tests.helpers.waiting import wait_until

from .backends import BACKENDS, sandboxes, usable


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with usable(request.param) as name:
        yield name


@pytest.fixture(scope="module")
def shared(backend: str) -> Iterator[SandboxBridge]:
    """One sandbox for tests that leave it as they found it."""
    made = SandboxBridge(backend)
    yield made
    blocking(made.close())


@pytest.fixture
def bridge(backend: str) -> Iterator[SandboxBridge]:
    """A sandbox of a test's own."""
    made = SandboxBridge(backend)
    yield made
    blocking(made.close())


@pytest.fixture
def files(shared: SandboxBridge) -> BridgeFiles:
    return BridgeFiles(shared)


def sh(bridge: SandboxBridge, script: str, **options: Any) -> Outcome:
    return blocking(bridge.run(["/bin/sh", "-c", script], **options))


def alive(bridge: SandboxBridge, marker: str) -> bool:
    """Whether a process with this argument runs in the sandbox."""
    script = (
        "import os, sys\n"
        "def line(pid):\n"
        "    try: return open(f'/proc/{pid}/cmdline', 'rb').read().split(b'\\0')\n"
        "    except OSError: return []\n"
        "pids = [p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]\n"
        "sys.exit(not any(sys.argv[1].encode() in line(p) for p in pids))"
    )
    return blocking(bridge.run(["python3", "-c", script, marker])).exit_code == 0


# --- commands


def test_a_command_has_its_streams_and_exit_code(shared: SandboxBridge) -> None:
    """They are apart, and bytes stay what they are."""
    done = sh(shared, r"printf 'a\377'; echo b >&2; exit 7")
    assert (done.stdout, done.stderr, done.exit_code) == (b"a\xff", b"b\n", 7)


def test_merged_output_is_in_order(shared: SandboxBridge) -> None:
    """As a person would see it in a terminal."""
    done = sh(shared, "echo 1; echo 2 >&2; echo 3", merged=True)
    assert (done.out, done.err) == ("1\n2\n3\n", "")


def test_exit_codes_are_those_of_a_shell(shared: SandboxBridge) -> None:
    """A missing program, one that is none, a missing folder, and a signal."""
    assert blocking(shared.run(["no-such-program"])).exit_code == 127
    assert blocking(shared.run(["/etc/passwd"])).exit_code == 126
    assert "No such file" in blocking(shared.run(["true"], cwd="/no/such")).err
    assert sh(shared, "kill -TERM $$").exit_code == 143


def test_input_environment_and_folder_reach_the_command(shared: SandboxBridge) -> None:
    """A relative folder would be the agent's mistake; arguments are literal."""
    done = sh(shared, 'cat; printf "%s" "$A"; pwd', stdin=b"in ", env={"A": "$(x) "}, cwd="/tmp")
    assert done.out == "in $(x) /tmp\n"


def test_long_arguments_arrive(shared: SandboxBridge) -> None:
    """More than a request to some backends may hold."""
    chunk = "x" * 60_000
    done = blocking(shared.run(["printf", "%s", *[chunk] * 20]))
    assert done.out == chunk * 20


def test_output_beyond_the_limit_is_left_out(shared: SandboxBridge) -> None:
    """The command itself goes on to its end."""
    done = sh(shared, "head -c 300000 /dev/zero; echo end >&2", max_output=1000)
    assert (len(done.stdout), done.truncated, done.err) == (1000, True, "end\n")


def test_a_child_in_the_background_holds_nothing_up(bridge: SandboxBridge) -> None:
    """It has the command's streams open, and goes on."""
    done = sh(bridge, "sleep 54321 & echo done", timeout=60)
    assert (done.out, done.timed_out) == ("done\n", "")
    assert alive(bridge, "54321")


def test_the_time_limit_kills_the_whole_session(bridge: SandboxBridge) -> None:
    """Children too; what was printed until then is kept."""
    done = sh(bridge, "echo part; sleep 54322 & sleep 54323", timeout=2)
    assert (done.exit_code, done.out) == (124, "part\n")
    assert "did not end within 2 s and was killed" in done.timed_out
    assert bridge.name is not None
    assert bridge.name in done.timed_out
    assert not alive(bridge, "54322")
    assert not alive(bridge, "54323")


async def test_a_cancelled_caller_has_its_command_killed(bridge: SandboxBridge) -> None:
    """On the caller's own loop."""
    task = asyncio.create_task(bridge.run(["/bin/sh", "-c", "echo > began; exec sleep 54324"]))
    files = BridgeFiles(bridge)
    async with asyncio.timeout(60):
        while not await files.exists("began"):
            assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await asyncio.to_thread(alive, bridge, "54324")


class Broken(ExecStream):
    """Its provider fails in the middle of the output."""

    def __init__(self) -> None:
        self.said = [b"part"]

    async def read(self) -> bytes:
        if self.said:
            return self.said.pop()
        raise LinkLost("the stream broke")

    async def read_stderr(self) -> bytes:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def write(self, data: bytes) -> None:
        raise BrokenPipeError

    async def wait(self) -> int:
        raise NotImplementedError

    async def close_stdin(self) -> None: ...
    async def close(self) -> None: ...
    async def send_signal(self, signum: int) -> None: ...
    async def resize(self, rows: int, columns: int) -> None: ...


async def test_a_stream_that_breaks_is_an_error_of_its_own() -> None:
    """Not a group of errors; what came until then is kept, and nobody goes on reading."""
    output, before = Output(), asyncio.all_tasks()
    with pytest.raises(LinkLost, match="broke"):
        await collected(Broken(), b"in", 100, output)
    assert output.stdout == b"part"
    assert asyncio.all_tasks() == before


# --- files


def test_files_are_written_read_and_listed(files: BridgeFiles) -> None:
    """Folders on the way are made; any byte goes."""
    data = bytes(range(256)) * 5000
    blocking(files.write("one/two.bin", data))
    blocking(files.make_folder("one/three"))
    assert blocking(files.read("one/two.bin")) == data
    found = [(e.name, e.is_dir, e.size) for e in blocking(files.list("one"))]
    assert found == [("three", True, None), ("two.bin", False, len(data))]
    blocking(files.remove("one"))
    assert not blocking(files.exists("one"))


@pytest.mark.parametrize(
    ("operation", "path", "error"),
    [
        ("read", "missing", FileNotFoundError),
        ("read", ".", IsADirectoryError),
        ("list", "missing", FileNotFoundError),
        ("stat", "missing", FileNotFoundError),
        ("remove", "missing", FileNotFoundError),
        ("list", "/etc/passwd", NotADirectoryError),
        ("make_folder", "/etc/passwd/x", NotADirectoryError),
        ("read", "/dev/zero", OSError),
        ("read", "a\0b", OSError),
        ("remove", "/", OSError),
        ("remove", "../workspace", OSError),
    ],
)
def test_errors_are_pythons_own(
    files: BridgeFiles, operation: str, path: str, error: type[OSError]
) -> None:
    """With the path and the sandbox in the message."""
    with pytest.raises(error, match="in sandbox '"):
        blocking(getattr(files, operation)(path))


def test_a_pipe_is_not_waited_for(shared: SandboxBridge, files: BridgeFiles) -> None:
    """Nobody writes to it."""
    sh(shared, "mkfifo pipe")
    with pytest.raises(OSError, match="Invalid"):
        blocking(files.read("pipe"))
    with pytest.raises(OSError, match="Invalid"):
        blocking(files.write("pipe", b""))
    blocking(files.remove("pipe"))


def test_a_large_file_is_refused(files: BridgeFiles) -> None:
    """By the number of bytes that the caller takes."""
    blocking(files.write("large", bytes(1001)))
    with pytest.raises(FileTooLarge, match="larger than the limit"):
        blocking(files.read("large", most=1000))
    assert len(blocking(files.read("large", most=1001))) == 1001
    blocking(files.remove("large"))


class Liar:
    """A sandbox that answers what a test says."""

    name = "liar"

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def ask(self, request: Mapping[str, Any], stdin: bytes, most: int) -> tuple[bytes, str]:
        return self._answer[:most], self.name


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"nonsense \x1b[2J", b"[]", b"{}", b"null", b'{"contents": 1}'),
        *(b'{"contents": "*"}', b'{"contents": "AAAA"}', b'{"errno": "x"}', b'{"errno": -5}'),
        *(b'{"entries": {}}', b'{"entries": [1]}', b'{"entries": [{"name": "a/b", "dir": true}]}'),
        *(b"[" * 100_000, b'{"name": "a", "dir": true, "size": -1}'),
        *(b'{"entries": [{"name": 1}]}', b'{"path": "relative"}', b'{"path": 1}'),
        json.dumps({"entries": [{"name": "a", "dir": True}] * 20_000}).encode(),
    ],
)
def test_a_hostile_answer_is_an_error(answer: bytes) -> None:
    """Whatever was asked."""
    files = BridgeFiles(Liar(answer))  # type: ignore[arg-type]
    for asked in (files.read("x", most=2), files.list("x"), files.stat("x"), files.real_path("x")):
        with pytest.raises((ExecFailed, OSError)) as caught:
            asyncio.run(asked)
        assert "liar" in str(caught.value)
        assert "\x1b" not in str(caught.value)


# --- its life


def test_it_is_made_once_for_all_callers(backend: str) -> None:
    """Several threads use it first at the same time."""
    before = sandboxes(backend)
    bridge = SandboxBridge(backend)
    try:
        with ThreadPoolExecutor(4) as pool:
            said = list(pool.map(lambda n: sh(bridge, f"echo {n}").out, range(4)))
        assert said == ["0\n", "1\n", "2\n", "3\n"]
        assert set(sandboxes(backend)) - set(before) == {bridge.name}
    finally:
        blocking(bridge.close())
    assert sandboxes(backend) == before


def test_another_one_goes_on_after_detach(backend: str) -> None:
    """By the sandbox's name; its files are there."""
    first = SandboxBridge(backend)
    sh(first, "echo kept > file")
    blocking(first.detach())
    assert first.name in sandboxes(backend)
    blocking(first.close())  # as at the end of a block
    second = SandboxBridge(backend, attach=first.name)
    assert sh(second, "cat file").out == "kept\n"
    blocking(second.detach())
    blocking(SandboxBridge(backend, attach=first.name).close())
    assert first.name not in sandboxes(backend)


def test_a_closed_one_says_so(backend: str) -> None:
    """Closing twice is no error, nor is closing one that was never made."""
    bridge = SandboxBridge(backend)
    blocking(bridge.close())
    blocking(bridge.close())
    with pytest.raises(SandboxGone, match="was closed"):
        blocking(bridge.run(["true"]))


def test_a_sandbox_that_was_removed_is_gone(bridge: SandboxBridge, backend: str) -> None:
    """By another process, while the agent thought."""
    blocking(bridge.open())
    client = load_backend(backend)
    finish(client.remove(bridge.name or ""))
    with pytest.raises((SandboxGone, SandboxNotFound)):
        blocking(bridge.run(["true"]))
    finish(client.close())


def test_nothing_is_made_for_a_wrong_request(backend: str) -> None:
    """Unknown settings and sandboxes."""
    with pytest.raises(SpecError, match="memory_mb"):
        SandboxBridge(backend, memory_mb=512)
    with pytest.raises(SandboxNotFound):
        blocking(SandboxBridge(backend, attach="no-such-sandbox").open())


HOLDER = """
import sys, time
from sandbox_kernel.agents.sandbox_bridge import SandboxBridge, blocking
bridge = SandboxBridge("local", lease_seconds=1)
blocking(bridge.open())
print(bridge.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def jails() -> Iterator[None]:
    with usable("local"):
        yield


def test_a_killed_process_leaves_it_to_its_lease(jails: None) -> None:
    """Until then it is held, whatever the agent does."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        name = process.stdout.readline().strip()
        client = load_backend("local")
        handle = finish(client.get(name))
        assert finish(handle.info()).detail["attached"] == 1
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: finish(handle.info()).status != "running")
    assert "lease" in finish(handle.info()).detail["reason"]
    finish(client.remove(name))


def test_it_has_ways_out(jails: None) -> None:
    """Where our gateway enforces the rules, an agent in the sandbox leads to it."""
    bridge = SandboxBridge("local", egress=["allowed.invalid"])
    try:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {PROXY_PORT}))"
        assert blocking(bridge.run(["python3", "-c", connect])).err == ""
        blocking(bridge.detach())
        again = SandboxBridge("local", attach=bridge.name)
        assert blocking(again.run(["python3", "-c", connect])).err == ""
        blocking(again.close())
    finally:
        blocking(bridge.close())


async def test_it_works_from_the_background_loop_too(shared: SandboxBridge) -> None:
    """Where the provisioner and the notebook's API are."""
    done = await background.run(shared.run(["echo", "here"]))
    assert done.out == "here\n"
