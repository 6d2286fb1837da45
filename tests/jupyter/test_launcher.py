"""The argv launcher: clients without provisioners start it as they would start a kernel."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from jupyter_client.manager import KernelManager

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.jupyter.connections import check_free, read_connection_file
from sandbox_kernel.jupyter.kernelspec import write_kernelspec
from sandbox_kernel.jupyter.launcher import Parent
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import bubblewrap
from tests.cli.running import PROGRAM, Cli, at_terminal
from tests.helpers.waiting import wait_until
from tests.kernels.live import begin_cell, folders_in, jail_processes

WAIT = 60.0
BUSY = "import time; print('busy'); time.sleep(600)"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """The command, with folders of its own."""
    problem = bubblewrap.why_not()
    if problem:
        pytest.skip(problem)
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", f"{name}/data")
        monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", f"{name}/run")
        made = Cli(Path(name))
        yield made
        made.remove_all()


def connection_file(cli: Cli, transport: str) -> str:
    """A connection file as a client writes it."""
    path = str(cli.folder / "kernel.json")
    ip = "127.0.0.1" if transport == "tcp" else str(cli.folder / "ipc")
    write_connection_file(path, transport=transport, ip=ip, key=b"a key", kernel_name="any")
    return path


def connect(path: str) -> BlockingKernelClient:
    client = BlockingKernelClient(connection_file=path)
    client.load_connection_file()
    client.start_channels()
    return client


def wait_for_kernel(client: BlockingKernelClient) -> None:
    """Wait until the kernel answers. ``wait_for_ready`` alone gives up when a kernel takes more
    than a second to start, also with a plain local one."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return client.wait_for_ready(timeout=WAIT)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise


class Launched:
    """A launcher, and a client that knows nothing but its connection file and its pid."""

    def __init__(self, cli: Cli, path: str, *options: str) -> None:
        self.process = cli.start("launch", "-f", path, *options, stderr=subprocess.PIPE)
        self.client = connect(path)

    def execute(self, code: str, **options: Any) -> dict[str, Any]:
        reply = self.client.execute_interactive(code, timeout=WAIT, **options)
        content: dict[str, Any] = reply["content"]
        return content

    def value(self, expression: str) -> str:
        """The repr of an expression in the kernel."""
        reply = self.execute("", user_expressions={"value": expression})
        text: str = reply["user_expressions"]["value"]["data"]["text/plain"]
        return text

    def end(self) -> tuple[int, str]:
        """Wait for the launcher's end; its exit code and what it has printed."""
        _, err = self.process.communicate(timeout=WAIT)
        return self.process.returncode, err.decode()


Launch = Callable[..., Launched]


@pytest.fixture
def launch(cli: Cli) -> Iterator[Launch]:
    """Start launchers, with a kernel that answers."""
    with contextlib.ExitStack() as stack:

        def start(path: str, *options: str, ready: bool = True) -> Launched:
            launched = Launched(cli, path, *options)
            stack.callback(launched.process.communicate)
            stack.callback(launched.process.kill)
            stack.callback(launched.client.stop_channels)
            if ready:
                wait_for_kernel(launched.client)
            return launched

        yield start


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_client_of_a_connection_file(cli: Cli, launch: Launch, transport: str) -> None:
    """The endpoints are those of the file; the kernel runs in a sandbox, which ends with it."""
    path = connection_file(cli, transport)
    launched = launch(path, "--name", "launched", "--env", "A=1")
    assert launched.value("6 * 7") == "42"
    assert launched.value("__import__('os').environ['A']") == "'1'"
    assert launched.value("__import__('socket').gethostname()") == "'launched'"
    assert cli.names() == ["launched"]
    launched.client.shutdown()
    assert launched.end()[0] == 0
    assert cli.names() == []
    if transport == "ipc":
        assert not list(cli.folder.glob("ipc-*"))


def test_sigint_interrupts_the_cell(cli: Cli, launch: Launch) -> None:
    """As often as the client likes, also if that ignores SIGINT itself, as what a shell starts
    in the background does. The kernel and its variables stay."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launched = launch(connection_file(cli, "ipc"))
    finally:
        signal.signal(signal.SIGINT, before)
    launched.execute("x = 1")
    for _ in range(3):
        request = begin_cell(launched.client, BUSY)
        launched.process.send_signal(signal.SIGINT)
        reply = launched.client._recv_reply(request, timeout=WAIT)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert launched.value("x") == "1"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_leaves_nothing_behind(cli: Cli, launch: Launch, signum: signal.Signals) -> None:
    """Also while a cell runs that ignores signals."""
    launched = launch(connection_file(cli, "tcp"))
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    begin_cell(launched.client, ignore + BUSY)
    launched.process.send_signal(signum)
    assert launched.end() == (128 + signum, "")
    assert cli.names() == []


def test_sigterm_while_starting(cli: Cli, launch: Launch) -> None:
    """A launcher that is ended early leaves no sandbox either."""
    launched = launch(connection_file(cli, "ipc"), ready=False)
    wait_until(lambda: list(cli.records.glob("*.json")), "a record")
    launched.process.terminate()
    assert launched.end()[0] == 128 + signal.SIGTERM
    assert cli.names() == []


def test_control_c_twice_on_a_terminal(cli: Cli) -> None:
    """By hand, the first Ctrl-C is for the cell, as always, and a second one right after it ends
    the kernel with its sandbox."""
    path = connection_file(cli, "ipc")
    with at_terminal(cli, "launch", "-f", path) as terminal:
        client = connect(path)
        wait_for_kernel(client)
        request = begin_cell(client, BUSY)
        terminal.type("\x03")
        assert client._recv_reply(request, timeout=WAIT)["content"]["status"] == "error"
        terminal.type("\x03")
        assert terminal.process.wait(WAIT / 2) == 130
        client.stop_channels()
    assert cli.names() == []


def test_the_exit_code_is_the_kernels(cli: Cli, launch: Launch) -> None:
    """A kernel that dies takes its launcher with it, which says why."""
    launched = launch(connection_file(cli, "ipc"))
    launched.client.execute("import os; os._exit(5)")
    code, said = launched.end()
    assert code == 5
    assert "died: exit code 5" in said


def test_a_killed_kernel(cli: Cli, launch: Launch) -> None:
    """The exit code for a signal is that of a shell."""
    launched = launch(connection_file(cli, "ipc"))
    launched.client.execute("import os; os.kill(os.getpid(), 9)")
    code, said = launched.end()
    assert code == 128 + 9
    assert "killed by signal 9" in said


def test_the_launcher_ends_with_its_parent(cli: Cli) -> None:
    """A client that dies without a word takes its kernels with it."""
    path = connection_file(cli, "ipc")
    child = f"""
import subprocess, sys
started = subprocess.Popen({[*PROGRAM, "launch", "-f", path, "--name", "orphan"]!r})
print(started.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", child],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=cli.env,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    client = connect(path)
    wait_for_kernel(client)
    client.stop_channels()
    watch = os.pidfd_open(pid)
    parent.kill()
    parent.communicate()
    with open(watch) as ended:
        assert select.select([ended], [], [], WAIT)[0], "the launcher outlives its parent"
    assert cli.names() == []


def test_a_parent_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """JPY_PARENT_PID counts, too: a client may start kernels through a helper process."""
    other = subprocess.Popen(["sleep", "1000"])
    parent = Parent({"JPY_PARENT_PID": str(other.pid)})
    assert not parent.gone()
    other.kill()
    other.wait()
    assert parent.gone()
    assert not Parent({"JPY_PARENT_PID": "nonsense"}).gone()


def test_a_launcher_kernelspec(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain KernelManager with the default provisioner starts, restarts and ends it."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    write_kernelspec(
        name="launched",
        launcher=True,
        prefix=str(tmp_path),
        config={"env": {"WHERE": "sandbox"}},
    )
    manager = KernelManager(kernel_name="launched")
    manager.start_kernel()
    try:
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=WAIT)
        code = "import os; assert os.environ['WHERE'] == 'sandbox'"
        assert client.execute_interactive(code, timeout=WAIT)["content"]["status"] == "ok"
        assert len(cli.names()) == 1
        manager.restart_kernel()
        client.wait_for_ready(timeout=WAIT)
        reply = client.execute_interactive(code, timeout=WAIT)
        assert reply["content"]["status"] == "ok"
        assert reply["content"]["execution_count"] == 1
        assert len(cli.names()) == 1
        client.stop_channels()
    finally:
        manager.shutdown_kernel()
    assert cli.names() == []


def test_options_win_over_config(cli: Cli, launch: Launch) -> None:
    """--config is the kernelspec's; options change it; the lease is short unless given."""
    config = {"name": "from-config", "env": {"A": "config", "B": "config"}}
    options = ["--config", json.dumps(config), "--name", "from-option"]
    launched = launch(connection_file(cli, "ipc"), *options)
    assert launched.value("__import__('os').environ['B']") == "'config'"
    assert cli.names() == ["from-option"]
    record = json.loads((cli.records / "from-option.json").read_text())
    assert record["spec"]["lease_seconds"] == 60


def test_another_kernel(cli: Cli, launch: Launch) -> None:
    """Behind -- stands the kernel's own command line."""
    code = (
        "import builtins, sys; builtins.marked = 'mine'; sys.argv[1:] = ['-f', sys.argv[1]];"
        "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
    )
    argv = [sys.executable, "-c", code, "{connection_file}"]
    launched = launch(connection_file(cli, "ipc"), "--", *argv)
    assert launched.value("marked") == "'mine'"


# --- what cannot be launched ---------------------------------------------------------------------


def refused(cli: Cli, *options: str) -> str:
    ran = cli("launch", *options)
    assert ran.returncode in (1, 2), ran.stderr
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert cli.names() == []
    return ran.stderr


def test_an_endpoint_in_use_tcp(cli: Cli) -> None:
    """A port that another process has is an error that names it."""
    path = connection_file(cli, "tcp")
    port = json.loads(Path(path).read_text())["iopub_port"]
    with socket.create_server(("127.0.0.1", port)):
        assert f"iopub endpoint 127.0.0.1:{port} cannot be used" in refused(cli, "-f", path)


def test_an_endpoint_in_use_ipc(cli: Cli) -> None:
    """A socket that another process listens on is not taken from it; one left behind is."""
    path = connection_file(cli, "ipc")
    address = f"{cli.folder}/ipc-{json.loads(Path(path).read_text())['shell_port']}"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(address)
        other.listen()
        assert "another process listens there" in refused(cli, "-f", path)
        assert Path(address).exists()
    check_free({"shell": address})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-f", "/nowhere.json"], "/nowhere.json cannot be read: No such file"),
        (["-f", "/"], "cannot be read: Is a directory"),
        (["-f", "{path}", "--config", "{"], "--config is not valid JSON"),
        (["-f", "{path}", "--config", "[]"], "--config takes a JSON object"),
        (["-f", "{path}", "--config", '{"memory": 1}'], "unknown key 'memory'"),
        (["-f", "{path}", "--config-file", "/nowhere.json"], "Install the kernel again"),
        (["-f", "{path}", "--config-file", "/dev/null"], "/dev/null is not valid JSON"),
        (["-f", "{path}", "--config", "{{}}", "--config-file", "/x"], "not by both"),
        (["-f", "{path}", "--backend", "nowhere"], "no sandbox backend 'nowhere'"),
        (["-f", "{path}", "--image", "py"], "cannot enforce image"),
        (["-f", "{path}", "--", "/nowhere/kernel"], "/nowhere/kernel"),
    ],
)
def test_clear_errors(cli: Cli, options: list[str], said: str) -> None:
    """What is wrong is one line, and no sandbox is left."""
    path = connection_file(cli, "ipc")
    assert said in refused(cli, *(option.replace("{path}", path) for option in options))


GOOD = {f"{channel}_port": 5 for channel in ("shell", "iopub", "stdin", "control", "hb")}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON"),
        ("[1]", "does not hold a JSON object"),
        ("{}", "_port=None"),
        (json.dumps({**GOOD, "hb_port": 0}), "hb_port=0"),
        (json.dumps({**GOOD, "hb_port": True}), "hb_port=True"),
        (json.dumps({**GOOD, "hb_port": 99999}), "hb_port=99999"),
        (json.dumps({**GOOD, "transport": "udp"}), "transport 'udp'"),
        (json.dumps({**GOOD, "ip": 1}), "ip=1"),
        (json.dumps({**GOOD, "key": 1}), "key=1"),
        (" " * (2**20 + 1), "larger than"),
    ],
)
def test_malformed_connection_files(tmp_path: Path, content: str, said: str) -> None:
    """Whatever is in the file, the error names the file and what is wrong with it."""
    path = tmp_path / "kernel.json"
    path.write_text(content)
    with pytest.raises(SpecError, match=r"kernel\.json") as raised:
        read_connection_file(str(path))
    assert said in str(raised.value)


def test_a_connection_file_is_taken_as_it_is(tmp_path: Path) -> None:
    """Address and ports are the client's; only ZeroMQ's word for all addresses is translated."""
    path = tmp_path / "kernel.json"
    path.write_text(json.dumps({**GOOD, "ip": "*", "transport": "tcp", "key": "k", "extra": 1}))
    assert read_connection_file(str(path)) == {
        **GOOD,
        "ip": "0.0.0.0",
        "transport": "tcp",
        "key": "k",
        "extra": 1,
    }


def test_an_address_of_another_machine() -> None:
    """An address that is not ours is an error before any sandbox is made."""
    with pytest.raises(SandboxError, match=r"192\.0\.2\.1:5"):
        check_free({"shell": ("192.0.2.1", 5)})


def test_a_launcher_that_is_killed_leaves_nothing(cli: Cli, launch: Launch) -> None:
    """A client that loses its patience sends SIGKILL to the launcher's process group. The sandbox
    ends at once, with its record and folders, not only when its lease is over."""
    launched = launch(connection_file(cli, "ipc"))
    assert launched.value("1 + 1") == "2"
    assert Records().list("local")
    launched.process.kill()
    wait_until(lambda: not Records().list("local"), "the end of the sandbox", WAIT)
    assert jail_processes(cli.folder) == []
    assert folders_in(cli.folder / "data" / "sandboxes") == []


@pytest.mark.parametrize("warm", ["true", "false"])
def test_a_launcher_keeps_no_spare_interpreter(
    cli: Cli, launch: Launch, monkeypatch: pytest.MonkeyPatch, warm: str
) -> None:
    """It starts one kernel only, so there is nothing that a second warm interpreter could be for,
    and with warm_start=false there is none before that either."""
    monkeypatch.setenv("SANDBOX_KERNEL_WARM_START", warm)
    launched = launch(connection_file(cli, "ipc"))
    kernels = [line for line in jail_processes(cli.folder) if "ipykernel_launcher" in line]
    wait_until(
        lambda: len([p for p in jail_processes(cli.folder) if "ipykernel_launcher" in p]) == 1,
        f"only the kernel is left of {kernels}",
        WAIT,
    )
    assert launched.value("1 + 1") == "2"
