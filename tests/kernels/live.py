"""Driving real kernels in tests: run cells, wait for things, see what is left over."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupyter_client
import zmq
from jupyter_client import BlockingKernelClient, KernelManager

from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.tunnel.background import background_loop, submit
from tests.helpers.waiting import LIMIT, wait_until

PATIENCE = LIMIT


@dataclass
class Ran:
    """What a cell gave: its reply's content and the iopub messages, in order."""

    reply: dict[str, Any]
    messages: list[dict[str, Any]]

    def contents(self, kind: str) -> list[dict[str, Any]]:
        return [m["content"] for m in self.messages if m["msg_type"] == kind]

    def text(self, name: str = "stdout") -> str:
        return "".join(c["text"] for c in self.contents("stream") if c["name"] == name)

    @property
    def value(self) -> Any:
        """The plain text of the cell's result."""
        return self.contents("execute_result")[-1]["data"]["text/plain"]


def run_cell(
    client: BlockingKernelClient,
    code: str,
    *,
    answers: Sequence[str] = (),
    timeout: float = PATIENCE,
) -> Ran:
    """Execute a cell to its end, with an answer to each of its input requests."""
    messages: list[dict[str, Any]] = []
    left = iter(answers)
    reply = client.execute_interactive(
        code,
        allow_stdin=bool(answers),
        timeout=timeout,
        output_hook=messages.append,
        stdin_hook=lambda request: client.input(next(left)),
    )
    return Ran(reply["content"], messages)


def provisioner_of(manager: KernelManager) -> SandboxProvisioner:
    """The provisioner of a manager whose kernel runs in a sandbox."""
    found = manager.provisioner
    assert isinstance(found, SandboxProvisioner)
    return found


@dataclass
class Live:
    """A started kernel with a client."""

    manager: KernelManager
    client: BlockingKernelClient

    @property
    def provisioner(self) -> SandboxProvisioner:
        return provisioner_of(self.manager)

    @property
    def kernel(self) -> SandboxedKernel:
        found = self.provisioner.kernel
        assert found is not None
        return found

    @property
    def sandbox(self) -> str:
        assert self.provisioner.sandbox_name is not None
        return self.provisioner.sandbox_name

    def run(self, code: str, **options: Any) -> Ran:
        return run_cell(self.client, code, **options)

    def ok(self, code: str, **options: Any) -> Ran:
        """Run a cell that must not fail."""
        ran = self.run(code, **options)
        assert ran.reply["status"] == "ok", ran.reply.get("traceback", ran.reply)
        return ran

    def begin(self, code: str) -> str:
        """Send a cell, and come back as soon as it has printed a line; its message id."""
        return begin_cell(self.client, code)

    def reconnect(self) -> None:
        """A client for new ports."""
        self.client.stop_channels()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def cut(self) -> None:
        """Break the stream to the sandbox, as a network would."""
        background_loop().call_soon_threadsafe(self.kernel.tunnel.cut)


def spare_of(kernel: SandboxedKernel) -> int:
    """The pid of the spare, when it has started."""

    def status() -> Any:
        return submit(kernel.tunnel.control.call("status")).result(PATIENCE)

    return int(wait_until(lambda: status()["spare"], "a spare"))


def restart_from_spare(manager: KernelManager, client: BlockingKernelClient) -> None:
    """Restart the kernel when its spare has started, so that it is that spare from now on."""
    kernel = provisioner_of(manager).kernel
    assert kernel is not None
    spare = spare_of(kernel)
    manager.restart_kernel(now=True)
    client.wait_for_ready(timeout=PATIENCE)
    assert submit(kernel.tunnel.control.call("status")).result(PATIENCE)["pid"] == spare


def begin_cell(client: BlockingKernelClient, code: str) -> str:
    """Send a cell, and come back as soon as it has printed a line; its message id. If it is to be
    interrupted then, it must not flush the line itself: an interrupt during the flush may get
    lost, also in a plain local kernel."""
    # Without stop_on_error: what is sent right after an interrupt would be aborted, too.
    message_id: str = client.execute(code, stop_on_error=False)
    until_message(client, message_id, "stream")
    return message_id


def raw_messages(client: BlockingKernelClient, message_id: str) -> Iterator[dict[str, Any]]:
    """The iopub messages that answer a request, until the kernel is idle. Unlike the client's own
    methods it keeps up with a kernel that sends thousands in a second."""
    channel: zmq.Socket[bytes] = zmq.Socket.shadow(client.iopub_channel.socket)
    while channel.poll(int(PATIENCE * 1000)):
        _, parts = client.session.feed_identities(channel.recv_multipart())
        message = client.session.deserialize(parts)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        if message["content"].get("execution_state") == "idle":
            return
        yield message
    raise TimeoutError(f"no message for {PATIENCE:g} s")


def until_message(
    client: BlockingKernelClient, message_id: str, kind: str, **content: Any
) -> dict[str, Any]:
    """The next iopub message of that kind that answers that request, with that content."""
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if (
            message["msg_type"] == kind
            and message["parent_header"].get("msg_id") == message_id
            and content.items() <= message["content"].items()
        ):
            return message


def until_reply(client: BlockingKernelClient, message_id: str) -> dict[str, Any]:
    """The content of the shell reply to a request."""
    while True:
        message = client.get_shell_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") == message_id:
            return dict(message["content"])


# --- what a kernel may leave behind


def jail_processes(folder: Path) -> list[str]:
    """Processes on this machine that are part of a jail whose folders are in ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
            command = line.replace(b"\0", b" ").decode(errors="replace")
            ours = "bwrap" in command and str(folder) in command
            ours = ours or f"{folder}/" in (process / "mountinfo").read_text(errors="replace")
        except OSError:
            continue  # it ended meanwhile, or is not ours to read
        if ours:
            found.append(f"{process.name}: {command[:200]}")
    return found


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def folders_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.iterdir()) if folder.exists() else []


def descriptors() -> dict[int, str]:
    """What this process has open. Locks and wake-ups of the interpreter's own are not counted."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own
    return found


def threads() -> list[str]:
    """Threads, but for the background loop's."""
    return sorted(t.name for t in threading.enumerate() if not t.name.startswith("sandbox-kernel"))


LEAKS = jupyter_client.version_info < (8, 8)
"""Older managers leave sockets and event loops of their own behind when they are restarted."""


class Leftovers:
    """Compares this process and a test's folder before and after."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors = descriptors()
        self._threads = threads()

    def found(self) -> dict[str, Any]:
        """What there is that should not be; empty if all is clean."""
        gc.collect()
        extra = {fd: to for fd, to in descriptors().items() if self._descriptors.get(fd) != to}
        counted = len(descriptors()) - len(self._descriptors)
        every = {
            "processes": jail_processes(self._folder),
            "records": files_in(self._folder / "data" / "records"),
            "sandboxes": folders_in(self._folder / "data" / "sandboxes"),
            "runtime files": folders_in(self._folder / "run"),
            "threads": list(_without(threads(), self._threads)),
            "descriptors": extra if counted > 0 and not LEAKS else {},
        }
        return {kind: what for kind, what in every.items() if what}

    def check(self) -> None:
        """Fail if anything is left a while after all has been shut down."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.found(), limit=15)
        left = self.found()
        assert not left, f"left behind: {left}"


def _without(names: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    rest = list(known)
    for name in names:
        if name in rest:
            rest.remove(name)
        else:
            yield name


def plain(text: str) -> str:
    """Without terminal colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def send_comm(live: Live, kind: str, content: dict[str, Any], buffers: list[bytes]) -> None:
    """What a widget in the browser sends."""
    message = live.client.session.msg(kind, content)
    live.client.session.send(live.client.shell_channel.socket, message, buffers=buffers)


def next_comm(live: Live) -> dict[str, Any]:
    while True:
        message = live.client.get_iopub_msg(timeout=PATIENCE)
        if message["msg_type"] == "comm_msg":
            return message
