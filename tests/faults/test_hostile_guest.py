"""The sandbox is hostile: whatever it sends, it can end its own session and nothing more.

No exception leaves the tunnel, memory and logs stay bounded, nothing spins, and a kernel next to
it in the same process does not notice. What an honest agent does with a hostile host is tested
with the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import (
    LinkLost,
    ProtocolError,
    SandboxError,
    SandboxTimeout,
    SessionRefused,
)
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel import links, outlet
from sandbox_kernel.wire.fdlink import FdLink
from sandbox_kernel.wire.frames import DATA, Frame, encode
from sandbox_kernel.wire.mux import BULK
from sandbox_kernel.wire.peer import Peer
from tests.helpers.coroutines import finish
from tests.helpers.named_hosts import NamedHosts
from tests.helpers.waiting import until
from tests.kernels.conftest import KernelStarter, own_folder
from tests.wire.sides import welcomed

from .conftest import assert_idle
from .hostile import HostileClient
from .traffic import Traffic

MEMORY = 64 * 2**20
"""Bytes by which this process may grow; the tunnel's bounds add up to less."""


def memory() -> int:
    """Bytes of real memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class LogLines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def neighbour() -> Iterator[SandboxedKernel]:
    """An honest sandbox in the same process."""
    with pytest.MonkeyPatch.context() as patch, own_folder(patch):
        kernel = finish(
            SandboxedKernel.create(LocalClient(), SandboxSpec(), logging.getLogger("neighbour"))
        )
        yield kernel
        finish(kernel.remove())


@pytest.fixture
def log() -> Iterator[LogLines]:
    """What is logged must not be a flood."""
    handler = LogLines()
    logging.getLogger().addHandler(handler)
    logging.getLogger("hostile").setLevel(logging.INFO)
    yield handler
    logging.getLogger().removeHandler(handler)
    assert len(handler.lines) <= 20, handler.lines[:30]
    assert max(map(len, handler.lines), default=0) < 10_000


@pytest.fixture(autouse=True)
def bounded(neighbour: SandboxedKernel, log: LogLines) -> Iterator[None]:
    """After each test the process has not grown, does nothing, and the neighbour is well."""
    before = memory()
    yield
    assert memory() - before < MEMORY
    assert finish(neighbour.tunnel.control.call("info"))["version"] == 1
    assert neighbour.tunnel.reconnects == 0
    assert_idle()


async def hostile(
    behaviour: str, *, start_timeout: float = 30.0, egress: Sequence[str] = ()
) -> SandboxedKernel:
    spec = SandboxSpec(start_timeout=start_timeout, egress=EgressPolicy.of(*egress))
    return await SandboxedKernel.create(
        HostileClient(behaviour), spec, logging.getLogger("hostile")
    )


async def launch(kernel: SandboxedKernel) -> None:
    await kernel.launch(["python"], env={}, cwd="/", connection={})


@contextlib.asynccontextmanager
async def removed_at_last(kernel: SandboxedKernel) -> AsyncIterator[SandboxedKernel]:
    """Its sandbox is removed at the end of the block."""
    try:
        yield kernel
    finally:
        await kernel.remove()


def connectors(kernel: SandboxedKernel) -> int:
    """How many links the host has asked for."""
    return int(kernel.handle.connectors)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("banner without end", LinkLost),
        ("garbage for an answer", LinkLost),
        ("silence", LinkLost),
        ("a welcome of another version", ProtocolError),
        ("a welcome for another session", ProtocolError),
        ("a welcome that has received too much", ProtocolError),
        ("a welcome with wrong types", ProtocolError),
        ("a refusal full of control characters", ProtocolError),
        ("refused:version", SessionRefused),
        ("refused:token", SessionRefused),
        ("refused:superseded", SessionRefused),
    ],
)
async def test_a_bad_handshake_is_one_error(
    behaviour: str, error: type[SandboxError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is not used, and is removed."""
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", 5.0 if behaviour != "silence" else 0.3)
    with pytest.raises(error, match="sandbox-") as caught:
        await hostile(behaviour)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "behaviour",
    [
        "an old welcome again and again",
        "acknowledges what was never sent",
        "too much data",
        "data on a stream that never was",
        "opens an odd stream",
        "too much credit",
        "closes the control stream",
        "resets the control stream",
        "control line without end",
        "deep control line",
        "a number of a million digits",
        *(
            f"control message {text}"
            for text in ('"event"', '["event"]', "null", "7", '{"id": []}', "{}", '{"id": 1}')
        ),
        "an error with wrong types",
        "status is a string",
    ],
)
async def test_what_breaks_the_protocol_ends_the_session(behaviour: str) -> None:
    """A call under way ends with that error at once, not with a timeout."""
    async with removed_at_last(await hostile(behaviour)) as kernel:
        with pytest.raises(ProtocolError, match="sandbox-") as caught:
            await launch(kernel)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("behaviour", ["garbage", "closes after each welcome", "answers nothing"])
async def test_what_breaks_links_is_tried_again_with_pauses(behaviour: str) -> None:
    """Links that bring nothing are made ever more rarely, and the call ends in a timeout."""
    async with removed_at_last(await hostile(behaviour, start_timeout=4.0)) as kernel:
        with pytest.raises(SandboxTimeout):
            await launch(kernel)
        assert connectors(kernel) <= 9


@pytest.mark.parametrize("behaviour", ["status with wrong types", "status with huge numbers"])
async def test_a_status_of_nonsense_is_made_harmless(behaviour: str) -> None:
    """What is no sensible number counts as 0."""
    async with removed_at_last(await hostile(behaviour)) as kernel:
        await launch(kernel)
        assert kernel.pid == 0
        assert kernel.exit_code in (0, None)


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ("a thousand ends of one kernel", -9),
        ("a kernel that ends with wrong types", 0),
        ("a log without end", -9),
        ("opens streams without end", -9),
    ],
)
async def test_the_end_of_a_kernel_is_told_once(behaviour: str, code: int, log: LogLines) -> None:
    """Once to the owner, and once, in bounded words, to the log."""
    told = []
    async with removed_at_last(await hostile(behaviour)) as kernel:
        kernel.on_exit = lambda: told.append(kernel.exit_code)
        await launch(kernel)
        assert await kernel.wait() == code
        with contextlib.suppress(ProtocolError):  # of a session that has ended
            await kernel.tunnel.control.call("info")  # its answer comes after all else
        assert told == [code]
    assert len([line for line in log.lines if "The kernel in sandbox" in line]) == 1


@pytest.mark.parametrize(
    "behaviour",
    [
        "acknowledges without end",
        "credits of nothing without end",
        "the same frame without end",
        "pings without end",
        "events without end",
    ],
)
async def test_a_flood_that_moves_nothing_ends_the_session(behaviour: str) -> None:
    """An agent that keeps the host busy without bringing anything loses its link, then, with
    pauses, the next ones, and soon its session; the fixtures see that nothing spins after it."""
    async with removed_at_last(await hostile(behaviour)) as kernel:
        await launch(kernel)
        await kernel.wait()
        assert isinstance(kernel.tunnel.failure, ProtocolError)
        assert "too many" in str(kernel.tunnel.failure)
        assert connectors(kernel) <= 4


async def test_a_recording_of_nothing_costs_nothing() -> None:
    """Sixteen mebibytes that say "a message without parts" four million times are refused before
    the messages fill the memory."""
    async with removed_at_last(await hostile("a recording of nothing")) as kernel:
        await launch(kernel)
        with pytest.raises(ProtocolError, match="too many parts"):
            await kernel.recorded(16 * 2**20)


async def test_names_to_ask_for_without_end() -> None:
    """Questions that carry nothing are counted as other floods are."""
    behaviour = "names to ask for without end"
    async with removed_at_last(await hostile(behaviour, egress=["a.example"])) as kernel:
        await launch(kernel)
        await kernel.wait()
        assert "too many" in str(kernel.tunnel.failure)


async def test_odd_ways_out() -> None:
    """What is no way out is refused, and the session goes on."""
    behaviour = "odd ways out"
    async with removed_at_last(await hostile(behaviour, egress=["a.example"])) as kernel:
        await launch(kernel)
        assert await kernel.wait() == -9
        assert kernel.tunnel.failure is None
        assert kernel.tunnel.reconnects == 0
        await until(lambda: kernel.tunnel.outlet.connections == 0)


async def test_requests_without_end() -> None:
    """Each is answered or refused; few are under way at once, and the neighbours go on."""
    behaviour, most = "requests without end", 0
    async with removed_at_last(await hostile(behaviour, egress=["a.example"])) as kernel:
        await launch(kernel)
        session = kernel.tunnel._peer.session
        while session.received < 50_000:
            most = max(most, kernel.tunnel.outlet.connections)
            await asyncio.sleep(0)
        assert 0 < most <= outlet.MOST_CONNECTIONS


async def test_uploads_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sandbox sends is kept only as far as its credit goes."""
    silent = socket.create_server(("127.0.0.1", 0))  # accepts nothing, so takes little
    hosts = NamedHosts(monkeypatch)
    hosts.add("a.example", 7, silent.getsockname()[1])
    behaviour = "uploads that nobody takes"
    async with removed_at_last(await hostile(behaviour, egress=["a.example:7"])) as kernel:
        await launch(kernel)
        assert await kernel.wait() == -9
        assert kernel.tunnel.outlet.connections <= outlet.MOST_CONNECTIONS
    silent.close()


async def test_a_flood_of_frames_leaves_turns_to_others() -> None:
    """However many frames a link brings at once, the loop is not kept from its other work until
    all are handled."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    link = FdLink(loop, ours.detach(), os.open("/dev/null", os.O_WRONLY))
    peer = Peer(loop, host=True)
    stream = peer.mux.open("x", BULK)
    broken: list[str] = []
    peer.on_broken = broken.append
    peer.attach(link, welcomed(peer.mux, now=loop.time()))
    link.start()
    frames = 6000
    sent = b"".join(encode(Frame(DATA, stream.id, n + 1, 0, b"x")) for n in range(frames))
    sending = loop.run_in_executor(None, theirs.sendall, sent)
    turns = 0
    while peer.session.received < frames:
        turns += 1
        await asyncio.sleep(0)
    await sending
    peer.detach()
    theirs.close()
    assert broken == []
    assert turns >= frames // 256


def test_a_flood_does_not_reach_the_neighbours(start_kernel: KernelStarter) -> None:
    """Another kernel of the process goes on, and the flooding one can be removed."""
    kernel = finish(hostile("answers twice"))
    finish(launch(kernel))
    live = start_kernel()
    traffic = Traffic(live, seed=1)
    traffic.round()
    finish(kernel.send_signal(2))
    assert kernel.exit_code is None
    finish(kernel.remove())
