"""Kernels in real microsandbox microVMs: what only they can do, and that nothing is left of them.

One kernel is shared by most tests, in the order of this file: a VM takes long to start in the rig.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from jupyter_client import BlockingKernelClient, KernelManager

pytest.importorskip("microsandbox")

from sandbox_kernel import Notebook
from sandbox_kernel.audit.reading import read
from sandbox_kernel.audit.trail import audit_path
from sandbox_kernel.errors import SandboxExists, SandboxGone, SessionRefused, SpecRefused
from sandbox_kernel.jupyter.connections import addresses, endpoint_folder
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.microsandbox import MicrosandboxClient, machine
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import background
from sandbox_kernel.tunnel.endpoints import PRIORITY
from tests.conformance.kernels import kernel
from tests.helpers.coroutines import finish
from tests.helpers.own_folders import own_folders
from tests.helpers.waiting import LIMIT, wait_until
from tests.kernels.live import provisioner_of

LOG = logging.getLogger(__name__)
MB = 1_000_000


def machines() -> list[str]:
    """The command lines of all processes on this host that run a microVM."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [b"machine"] and words[0].endswith(b"msb"):
            found.append(b" ".join(words).decode())
    return found


@pytest.fixture(scope="module", autouse=True)
def folders() -> Iterator[None]:
    """Records of this run apart from the user's; afterwards no VM that was not there before."""
    before = len(machines())
    with own_folders():
        yield
    assert len(machines()) == before, machines()


@pytest.fixture(scope="module")
def spec(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Fields of every sandbox here: --backend-spec names the image of the rig."""
    return dict(pytestconfig.getoption("--backend-spec", None) or {})


@pytest.fixture(scope="module")
def client() -> MicrosandboxClient:
    return MicrosandboxClient()


@pytest.fixture(scope="module")
def chosen(spec: dict[str, Any]) -> Iterator[None]:
    """The kernelspec ``sandbox`` runs in this backend."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"backend": "microsandbox", **spec}.items():
            text = value if isinstance(value, str) else json.dumps(value)
            patch.setenv(f"SANDBOX_KERNEL_{key.upper()}", text)
        yield


Running = tuple[KernelManager, BlockingKernelClient]


@pytest.fixture(scope="module")
def running(chosen: None) -> Iterator[Running]:
    """The kernel that the tests share, through our provisioner."""
    with kernel() as running:
        yield running


def sandboxed(running: Running) -> SandboxedKernel:
    found = provisioner_of(running[0]).kernel
    assert isinstance(found, SandboxedKernel)
    return found


def execute(
    jupyter: BlockingKernelClient, code: str, on_output: Callable[[str], object] | None = None
) -> tuple[dict[str, Any], str]:
    """Run a cell; its reply and all that it printed."""
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
            if on_output is not None:
                on_output(message["content"]["text"])

    reply = jupyter.execute_interactive(code, output_hook=output, timeout=LIMIT)
    return reply["content"], "".join(printed)


def printed(jupyter: BlockingKernelClient, code: str) -> str:
    reply, text = execute(jupyter, code)
    assert reply["status"] == "ok", reply
    return text.strip()


class Copy:
    """A client of a kernel that was forked or restored, on endpoints of its own."""

    def __init__(self, kernel: SandboxedKernel, connection: Mapping[str, Any]) -> None:
        self.kernel = kernel
        folder = endpoint_folder()
        ports = {f"{name}_port": n for n, name in enumerate(PRIORITY, 1)}
        own: Any = {**connection, **ports, "transport": "ipc", "ip": f"{folder}/k"}

        async def listen() -> None:
            kernel.listen(addresses(own), folder)

        finish(listen())
        self.client = BlockingKernelClient()
        self.client.load_connection_info(own)
        # A client without a manager takes a kernel whose heart does not beat for dead.
        self.client.hb_channel.time_to_dead = LIMIT
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT)

    def close(self) -> None:
        self.client.stop_channels()
        finish(self.kernel.remove())


# --- a kernel like any other


def test_it_runs_on_a_kernel_of_its_own(running: Running) -> None:
    """The guest's Linux is not the host's."""
    release = printed(running[1], "import platform; print(platform.release())")
    print(f"the guest's kernel: Linux {release}; the host's: {os.uname().release}")
    assert release != os.uname().release


def test_rich_output(running: Running) -> None:
    """Mime bundles arrive, with binary data as it was."""
    data = bytes(range(256)) * 40
    found: list[dict[str, Any]] = []
    code = (
        "from IPython.display import display\n"
        "data = bytes(range(256)) * 40\n"
        "import base64\n"
        "display({'image/png': base64.b64encode(data).decode(), 'text/html': '<b>é</b>'}, raw=True)"
    )
    running[1].execute_interactive(
        code,
        output_hook=lambda m: (
            found.append(m["content"]["data"]) if m["msg_type"] == "display_data" else None
        ),
        timeout=LIMIT,
    )
    assert base64.b64decode(found[0]["image/png"]) == data
    assert found[0]["text/html"] == "<b>é</b>"


@pytest.mark.parametrize("size", [2 * MB, pytest.param(20 * MB, marks=pytest.mark.slow)])
def test_big_output_is_exact(running: Running, size: int) -> None:
    """Every character comes, once and in order."""
    lines = size // 8
    code = f"import sys\nfor i in range(0, {lines}, 5000):\n"
    code += "    sys.stdout.write(''.join('%07d\\n' % n for n in range(i, i + 5000)))"
    _, text = execute(running[1], code)
    assert len(text) == size
    assert text == "".join(f"{n:07d}\n" for n in range(lines))


def test_input(running: Running) -> None:
    """A cell that asks gets an answer."""
    answers: list[str] = []

    def answer(message: dict[str, Any]) -> None:
        answers.append(message["content"]["prompt"])
        running[1].input("from the host")

    running[1].allow_stdin = True
    found: list[str] = []
    running[1].execute_interactive(
        "print('got', input('who? '))",
        allow_stdin=True,
        stdin_hook=answer,
        output_hook=lambda m: found.append(m["content"].get("text", "")),
        timeout=LIMIT,
    )
    assert answers == ["who? "]
    assert "got from the host" in "".join(found)


def test_interrupt(running: Running) -> None:
    """A cell that would run for ever is interrupted, and the kernel is as before."""
    manager, jupyter = running
    execute(jupyter, "kept = 'here'")
    # One piece of output, and so one interrupt; print would write its line in two.
    code = "import sys, time; sys.stdout.write('started')\nwhile True: time.sleep(0.01)"
    reply, _ = execute(jupyter, code, lambda _: manager.interrupt_kernel())
    assert reply["ename"] == "KeyboardInterrupt"
    assert printed(jupyter, "print(kept)") == "here"


def test_cut_streams(running: Running) -> None:
    """The exec stream breaks in the middle of output: all of it comes, once and in order."""
    tunnel = sandboxed(running).tunnel
    before = tunnel.reconnects
    cuts: list[str] = []

    def cut(text: str) -> None:
        if len(cuts) < 3:
            cuts.append(text)
            background.background_loop().call_soon_threadsafe(tunnel.cut)

    code = "import time\nfor i in range(600):\n    print(i, flush=True)\n    time.sleep(0.005)"
    reply, text = execute(running[1], code, cut)
    assert reply["status"] == "ok"
    assert text.split() == [str(n) for n in range(600)]
    assert tunnel.reconnects > before


def test_the_network_is_off(running: Running) -> None:
    """A port of the host's that is open to all cannot be reached, nor is there a name server."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        reached: list[Any] = []
        threading.Thread(target=lambda: reached.append(server.accept()), daemon=True).start()
        addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout
        hosts = ["127.0.0.1", *addresses.split()]
        code = (
            "import socket\n"
            f"gateway = [w for w in open('/proc/net/route').read().split() if len(w) == 8]\n"
            f"for host in {hosts!r} + ['172.16.0.1', '1.1.1.1', 'example.org']:\n"
            f"    try: socket.create_connection((host, {port}), 3); print('REACHED', host)\n"
            "    except OSError as error: print('no', host)"
        )
        text = printed(running[1], code)
        assert "REACHED" not in text
        assert text.count("no ") == len(hosts) + 3
        assert not reached


# --- pausing, forks and snapshots


def test_pause_and_resume(running: Running) -> None:
    """A paused kernel prints nothing; after it, it goes on where it was, with nothing lost."""
    kernel = sandboxed(running)
    paused: list[float] = []
    heard: list[str] = []

    def pause(text: str) -> None:
        heard.append(text)  # a line may come in two pieces
        if "20\n" in "".join(heard) and not paused:
            finish(kernel.handle.pause())
            assert finish(kernel.handle.info()).status == "paused"
            finish(kernel.handle.pause())
            paused.append(time.monotonic())
            time.sleep(2)  # long enough for the kernel to print, if it could
            finish(kernel.handle.resume())
            finish(kernel.handle.resume())

    code = "import time\nfor i in range(100):\n    print(i, flush=True)\n    time.sleep(0.02)"
    reply, text = execute(running[1], code, pause)
    assert paused
    assert reply["status"] == "ok"
    assert text.split() == [str(n) for n in range(100)]
    assert finish(kernel.handle.info()).status == "running"


def test_live_fork(running: Running) -> None:
    """Two kernels go on from one memory: same variables, then nothing shared, each with its own
    token, name and random numbers."""
    manager, jupyter = running
    parent = sandboxed(running)
    execute(jupyter, "import os, random; x = [1, 2, 3]; open('note', 'w').write('before')")
    started = time.monotonic()
    child = finish(parent.fork(), LIMIT)
    print(f"forked and attached in {time.monotonic() - started:.1f} s")
    copy = Copy(child, manager.get_connection_info())
    try:
        assert child.handle.name != parent.handle.name
        assert child.pid == parent.pid, "the child's kernel is the same process, in another VM"
        assert printed(copy.client, "print(x, os.getpid())") == printed(
            jupyter, "print(x, os.getpid())"
        )
        # Random numbers: first thing after the fork, from the same states of memory.
        assert printed(copy.client, "print(os.urandom(16).hex())") != printed(
            jupyter, "print(os.urandom(16).hex())"
        )
        execute(copy.client, "x.append('child'); open('note', 'w').write('child')")
        execute(jupyter, "x.append('parent'); y = 'only here'")
        assert printed(copy.client, "print(x, open('note').read())") == "[1, 2, 3, 'child'] child"
        assert printed(jupyter, "print(x, open('note').read())") == "[1, 2, 3, 'parent'] before"
        assert execute(copy.client, "y")[0]["ename"] == "NameError"
        _tokens_are_apart(parent, child)
        finish(parent.handle.exec("true", timeout=60))
        finish(child.handle.exec("true", timeout=60))
    finally:
        copy.close()
    assert not machine.processes(child.handle._vm)  # type: ignore[attr-defined]
    assert printed(jupyter, "print(x)") == "[1, 2, 3, 'parent']"


def test_a_notebook_is_forked(client: MicrosandboxClient, spec: dict[str, Any]) -> None:
    """Through the API: a second notebook goes on from its variables, and both go on apart. A
    checkpoint of it is a snapshot."""

    async def run() -> None:
        settings = {"backend": "microsandbox", "persist": False, "warm_spares": False, **spec}
        async with Notebook.open(**settings) as notebook:
            await notebook.run("x = [1]", timeout=LIMIT)
            async with await notebook.fork() as copy:
                assert copy.sandbox != notebook.sandbox
                assert (await copy.run("x.append('copy'); x", timeout=LIMIT)).text == "[1, 'copy']"
                assert (await notebook.run("x.append(2); x", timeout=LIMIT)).text == "[1, 2]"
                assert {live.sandbox for live in Notebook.live()} == {
                    copy.sandbox,
                    notebook.sandbox,
                }
            name = f"kept-{secrets.token_hex(3)}"
            await notebook.checkpoint(name)
            try:
                found = await background.run(client.snapshots())
                assert name in {snapshot.name for snapshot in found}
            finally:
                await background.run(client.remove_snapshot(name))
            assert (await notebook.run("len(x)", timeout=LIMIT)).text == "2"

    asyncio.run(asyncio.wait_for(run(), 4 * LIMIT))
    assert Notebook.live() == []


ASK = """
import socket
print(socket.gethostbyname("data.example").startswith("127."))
with socket.create_connection(("127.0.0.1", 3128), timeout=60) as sock:
    sock.sendall(b"CONNECT elsewhere.example:443 HTTP/1.1\\r\\nHost: elsewhere.example\\r\\n\\r\\n")
    print(sock.recv(1000).split(b"\\r\\n")[0].decode())
"""


def test_ways_out_of_a_fork(client: MicrosandboxClient, spec: dict[str, Any]) -> None:
    """The copy has the same rules, and an audit of its own."""

    async def main() -> tuple[str, list[list[str]]]:
        fields = {**spec, "name": f"open-{secrets.token_hex(3)}", "egress": ["data.example:443"]}
        parent = await SandboxedKernel.create(client, SandboxSpec.from_mapping(fields), LOG)
        try:
            child = await parent.fork()
            try:
                asked = await child.handle.exec("python3", ["-c", ASK], timeout=LIMIT)
            finally:
                await child.remove()
            audits = [audit_path("microsandbox", one.handle.name) for one in (parent, child)]
            hosts = [[event.get("host", "") for event in read(audit)] for audit in audits]
            return asked.output, hosts
        finally:
            await parent.remove()

    output, (of_the_parent, of_the_child) = finish(main())
    assert output.startswith("True\nHTTP/1.1 403 egress denied: elsewhere.example:443"), output
    assert "elsewhere.example" in of_the_child
    assert "elsewhere.example" not in of_the_parent


def _tokens_are_apart(parent: SandboxedKernel, child: SandboxedKernel) -> None:
    """Neither agent takes the other's token."""

    async def open_with_the_token_of(one: SandboxedKernel, other: SandboxedKernel) -> None:
        stranger = SandboxedKernel(one.client, one.handle, LOG)
        token = Records().load(other.handle.backend, other.handle.name).kernel["token"]
        await stranger._open_tunnel(token)

    for one, other in ((parent, child), (child, parent)):
        with pytest.raises(SessionRefused, match="token"):
            finish(open_with_the_token_of(one, other))


def test_snapshot_and_restore(running: Running, client: MicrosandboxClient) -> None:
    """The memory of a running kernel is kept, and comes back, as often as one likes."""
    manager, jupyter = running
    kernel = sandboxed(running)
    execute(jupyter, "import os; kept = {'a': 1}")
    info = finish(kernel.handle.snapshot("taken"), LIMIT)
    try:
        assert (info.name, info.sandbox, info.memory) == ("taken", kernel.handle.name, True)
        assert [s.name for s in finish(client.snapshots())] == ["taken"]
        with pytest.raises(SandboxExists, match="taken"):
            finish(kernel.handle.snapshot("taken"), LIMIT)
        execute(jupyter, "kept['a'] = 2")
        fields = {"name": f"restored-{secrets.token_hex(3)}", "start_timeout": 300}
        with pytest.raises(SpecRefused, match="memory_mib"):
            finish(client.restore("taken", SandboxSpec.from_mapping({**fields, "memory_mib": 128})))
        seen = []
        for _ in range(2):
            restored = finish(
                SandboxedKernel.restore(client, "taken", SandboxSpec.from_mapping(fields), LOG)
            )
            copy = Copy(restored, manager.get_connection_info())
            try:
                seen.append(printed(copy.client, "print(os.urandom(16).hex())"))
                assert printed(copy.client, "print(kept)") == "{'a': 1}"
                execute(copy.client, "kept['a'] = 3")
            finally:
                copy.close()
        assert seen[0] != seen[1]
        assert printed(jupyter, "print(kept)") == "{'a': 2}"
    finally:
        finish(client.remove_snapshot("taken"), LIMIT)
    finish(client.remove_snapshot("taken"))
    assert finish(client.snapshots()) == []


# --- ends


def test_restart(running: Running) -> None:
    """Variables are gone, files are there."""
    manager, jupyter = running
    execute(jupyter, "x = 1; open('note', 'w').write('kept')")
    manager.restart_kernel()
    jupyter.wait_for_ready(timeout=LIMIT)
    reply, text = execute(jupyter, "print(open('note').read()); x")
    assert (reply["ename"], text) == ("NameError", "kept\n")


def test_kernel_death(running: Running) -> None:
    """A kernel that dies is noticed, with its signal, and can be started again."""
    manager, jupyter = running
    jupyter.execute("import os; os.kill(os.getpid(), 9)")
    wait_until(lambda: not manager.is_alive())
    assert "SIGKILL" in str(provisioner_of(manager).death)
    manager.restart_kernel(now=True)
    jupyter.wait_for_ready(timeout=LIMIT)
    assert printed(jupyter, "print('again')") == "again"


def test_a_stopped_sandbox_is_started_again(running: Running) -> None:
    """Its files are there, its processes are not; before that, commands are told that it ended."""
    manager, jupyter = running
    handle = sandboxed(running).handle
    execute(jupyter, "open('note', 'w').write('from before')")
    finish(handle.stop())
    assert not machine.processes(handle._vm)  # type: ignore[attr-defined]
    with pytest.raises(SandboxGone, match="stopped"):
        finish(handle.exec("true", timeout=60))
    wait_until(lambda: not manager.is_alive())
    manager.restart_kernel(now=True)
    jupyter.wait_for_ready(timeout=LIMIT)
    assert printed(jupyter, "print(open('note').read())") == "from before"


_START = """
import json, os, signal, sys
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="sandbox")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=900)
client.execute_interactive("x = 41", timeout=900)
info = manager.get_connection_info()
print(json.dumps([manager.provisioner.sandbox_name, info], default=lambda b: b.decode()))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_host_process_is_killed(chosen: None, client: MicrosandboxClient) -> None:
    """Another process goes on with the kernel and its variables, without a second sandbox; when
    it removes it, no process is left."""
    before = len(machines())
    ran = subprocess.run(
        [sys.executable, "-c", _START], capture_output=True, text=True, timeout=LIMIT + 60
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    name, connection = json.loads(ran.stdout)
    assert len(machines()) == before + 1
    attached = finish(SandboxedKernel.attach(client, name, LOG))
    copy = Copy(attached, connection)
    try:
        assert printed(copy.client, "print(x + 1)") == "42"
        assert len(machines()) == before + 1
    finally:
        copy.close()
    assert len(machines()) == before
    assert name not in finish(client.list())
    assert not machine.folder(attached.handle._vm).exists()  # type: ignore[attr-defined]


_CUT_SHORT = """
import asyncio, json, os, signal, sys, threading
from sandbox_kernel.sandboxes.microsandbox import MicrosandboxClient, machine
from sandbox_kernel.spec import SandboxSpec
spec = SandboxSpec.from_mapping(json.loads(sys.argv[1]))
def die():
    from sandbox_kernel.records import Records
    while True:
        for record in Records().list("microsandbox"):
            if record.name == spec.name and machine.processes(record.data["vm"]):
                os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=die, daemon=True).start()
asyncio.run(MicrosandboxClient().create(spec))
"""


@pytest.mark.slow
def test_a_creation_that_was_cut_short_is_cleared_away(
    spec: dict[str, Any], client: MicrosandboxClient
) -> None:
    """Its creator is killed while the VM boots; the next creation removes what is left."""
    before = len(machines())
    name = f"cut-{secrets.token_hex(3)}"
    ran = subprocess.run(
        [sys.executable, "-c", _CUT_SHORT, json.dumps({**spec, "name": name})],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert name in finish(client.list())
    finish(client.sweep(), LIMIT)
    assert name not in finish(client.list())
    assert len(machines()) == before
