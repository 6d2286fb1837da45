"""When a spare is made, and when it is given up."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.guest import spares
from sandbox_kernel.guest.spares import (
    LEAST_MEMORY,
    QUIET,
    REST,
    START_LIMIT,
    KernelPlan,
    Spares,
)
from sandbox_kernel.guest.warm import READY, TAKEN

PLAN = KernelPlan(["python", "-m", "ipykernel_launcher", "-f", "x"], {"A": "b"}, "/")


class Timer:
    def __init__(self, seconds: float, callback: Callable[[], object]) -> None:
        self.seconds = seconds
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A loop whose timers are run by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.readers: dict[int, Any] = {}

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], object], *_: object) -> Timer:
        self.timers.append(Timer(seconds, callback))
        return self.timers[-1]

    def add_reader(self, fd: int, callback: Any, *_: object) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        self.readers.pop(fd, None)

    @property
    def waits(self) -> list[float]:
        return [timer.seconds for timer in self.timers if not timer.cancelled]

    def pass_time(self) -> None:
        """Run the timer that is set, which is one at the most."""
        (timer,) = (timer for timer in self.timers if not timer.cancelled)
        self.timers.clear()
        self.now += timer.seconds
        timer.callback()


class FakeWarm:
    """A warm interpreter that records launches and forks nothing."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.there = False

    def prepare(self, command: list[str]) -> bool:
        self.there = True
        return True

    def close(self) -> None:
        self.there = False

    def launch(self, *request: Any, **options: Any) -> None:
        self.launches.append((request, options))


class Sandbox:
    """Spares with a memory and a calm that a test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.warm = FakeLoop(), FakeWarm()
        self.memory = (4 * LEAST_MEMORY, 3 * LEAST_MEMORY)
        self.is_calm = self.is_running = True
        loop: Any = self.loop
        warm: Any = self.warm
        self.spares = Spares(loop, str(folder), warm, -1, lambda: self.is_running)
        self.spares.calm = lambda: self.is_calm
        monkeypatch.setattr(spares, "_memory", lambda: self.memory)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path, monkeypatch)
    yield sandbox
    sandbox.spares.close()
    assert os.listdir(tmp_path) == []
    assert sandbox.loop.readers == {}
    assert sandbox.loop.waits == []


def warm(sandbox: Sandbox) -> bool:
    return sandbox.warm.there


def test_a_spare_is_made_when_it_is_calm(sandbox: Sandbox) -> None:
    """Not while messages pass: a cell has the machine for itself."""
    sandbox.is_calm = False
    sandbox.spares.keep(PLAN)
    for _ in range(3):
        assert sandbox.loop.waits == [QUIET]
        sandbox.loop.pass_time()
        assert sandbox.warm.launches == []
        assert warm(sandbox)  # for a restart in the meantime
    sandbox.is_calm = True
    sandbox.loop.pass_time()
    assert len(sandbox.warm.launches) == 1


def test_a_small_sandbox_has_none(sandbox: Sandbox) -> None:
    sandbox.memory = (LEAST_MEMORY - 1, LEAST_MEMORY - 1)
    sandbox.spares.keep(PLAN)
    sandbox.loop.pass_time()
    assert sandbox.warm.launches == []
    assert sandbox.loop.waits == []
    assert warm(sandbox)


def test_none_is_made_while_memory_is_short(sandbox: Sandbox) -> None:
    sandbox.memory = (4 * LEAST_MEMORY, LEAST_MEMORY // 2)
    sandbox.spares.keep(PLAN)
    sandbox.loop.pass_time()
    assert sandbox.warm.launches == []
    sandbox.memory = (4 * LEAST_MEMORY, 3 * LEAST_MEMORY)
    sandbox.loop.pass_time()
    assert len(sandbox.warm.launches) == 1


def test_one_that_does_not_start_is_given_up(sandbox: Sandbox) -> None:
    sandbox.spares.keep(PLAN)
    sandbox.loop.pass_time()
    assert sandbox.loop.waits == [START_LIMIT]
    sandbox.loop.pass_time()
    assert sandbox.loop.waits == []
    assert sandbox.loop.readers == {}


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "ipykernel_launcher", "--debug", "-f", "x", "--pylab"],
        ["python", "-m", "bash_kernel", "-f", "x"],
        ["ir", "x"],
        [],
    ],
)
def test_only_the_plain_command_line_has_spares(sandbox: Sandbox, command: list[str]) -> None:
    """The others have a warm interpreter, if they can."""
    sandbox.spares.keep(PLAN._replace(command=command))
    assert warm(sandbox)
    assert sandbox.loop.waits == []


def ready(sandbox: Sandbox) -> int | None:
    return sandbox.spares.ready


class Forked:
    """A spare that has started: the far ends of what the agent gave it."""

    def __init__(self, sandbox: Sandbox) -> None:
        sandbox.spares.keep(PLAN)
        sandbox.loop.pass_time()
        ((_, _, _, fds, started), _) = sandbox.warm.launches[-1]
        self.sock = socket.socket(fileno=os.dup(fds[-1]))
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.kill(os.getpid(), 19)
            os._exit(0)
        os.waitpid(self.pid, os.WUNTRACED)
        started(self.pid)
        self.answer(sandbox, READY)

    def answer(self, sandbox: Sandbox, data: bytes) -> None:
        self.sock.send(data)
        (reader,) = sandbox.loop.readers.values()
        reader()

    @property
    def ended(self) -> bool:
        try:
            return os.waitpid(self.pid, 0)[0] == self.pid
        except ChildProcessError:
            return True


def test_a_spare_is_given_up_when_memory_gets_short(sandbox: Sandbox) -> None:
    """And made again when there is enough."""
    spare = Forked(sandbox)
    assert ready(sandbox) == spare.pid
    sandbox.loop.pass_time()
    assert ready(sandbox) == spare.pid
    sandbox.memory = (4 * LEAST_MEMORY, LEAST_MEMORY // 4)
    sandbox.loop.pass_time()
    assert ready(sandbox) is None
    assert spare.ended
    sandbox.memory = (4 * LEAST_MEMORY, 3 * LEAST_MEMORY)
    sandbox.loop.pass_time()
    assert len(sandbox.warm.launches) == 2
    spare.sock.close()


def test_the_warm_interpreter_ends_when_a_spare_has_waited_for_long(sandbox: Sandbox) -> None:
    """Not before: whoever restarts a kernel may do it again soon. There is one again for the next
    spare."""
    spare = Forked(sandbox)
    while sandbox.loop.now < REST:
        assert warm(sandbox)
        sandbox.loop.pass_time()
    sandbox.loop.pass_time()
    assert not warm(sandbox)
    assert ready(sandbox) == spare.pid
    sandbox.spares.keep(PLAN)
    assert not warm(sandbox)  # the kernel that starts has the machine for itself
    sandbox.loop.pass_time()
    assert warm(sandbox)
    assert len(sandbox.warm.launches) == 2
    spare.sock.close()


def test_the_warm_interpreter_stays_as_long_as_no_kernel_runs(sandbox: Sandbox) -> None:
    """A spare sandbox is there to be used, and has its own limit."""
    sandbox.is_running = False
    spare = Forked(sandbox)
    while sandbox.loop.now < 3 * REST:
        sandbox.loop.pass_time()
        assert warm(sandbox)
    spare.sock.close()


def test_the_warm_interpreter_does_not_come_back_while_memory_is_short(sandbox: Sandbox) -> None:
    """It has ended, and now the spare does, too."""
    spare = Forked(sandbox)
    while warm(sandbox) and sandbox.loop.now < 3 * REST:
        sandbox.loop.pass_time()
    assert not warm(sandbox)
    sandbox.memory = (4 * LEAST_MEMORY, LEAST_MEMORY // 4)
    for _ in range(3):
        sandbox.loop.pass_time()
    assert ready(sandbox) is None
    assert not warm(sandbox)
    sandbox.memory = (4 * LEAST_MEMORY, 3 * LEAST_MEMORY)
    sandbox.loop.pass_time()
    assert warm(sandbox)
    assert len(sandbox.warm.launches) == 2
    spare.sock.close()


def test_a_spare_is_taken_once(sandbox: Sandbox) -> None:
    """It gets its identity in one message, and is no spare any more."""
    spare = Forked(sandbox)
    taken: list[int | None] = []
    connection = {"key": "secret"}
    fitting = sandbox.spares.fitting(PLAN, connection, "ipc")
    assert fitting is not None
    sandbox.spares.take(PLAN, connection, taken.append)
    assert b'"key": "secret"' in spare.sock.recv(4096)
    spare.answer(sandbox, TAKEN)
    assert taken == [spare.pid]
    assert ready(sandbox) is None
    assert sandbox.spares.fitting(PLAN, connection, "ipc") is None
    os.kill(spare.pid, 9)
    assert spare.ended
    spare.sock.close()
    os.close(fitting.output)
    os.rmdir(fitting.folder)


@pytest.mark.parametrize("last_words", [b"", b"nonsense", READY, bytes(64)])
def test_one_that_does_not_become_a_kernel_is_ended(sandbox: Sandbox, last_words: bytes) -> None:
    """The caller of ``take`` gets None, and starts another kernel."""
    spare = Forked(sandbox)
    taken: list[int | None] = []
    sandbox.spares.take(PLAN, {}, taken.append)
    if last_words:
        spare.answer(sandbox, last_words)
    if not taken:
        sandbox.loop.pass_time()
    assert taken == [None]
    assert spare.ended
    spare.sock.close()


@pytest.mark.parametrize(
    ("change", "connection", "transport"),
    [
        ({"cwd": "/tmp"}, {}, "ipc"),
        ({"command": ["python3", *PLAN.command[1:]]}, {}, "ipc"),
        ({"environment": {"A": "b", "HOME": "/root"}}, {}, "ipc"),
        ({"environment": {"A": "b", "PYTHONHASHSEED": "1"}}, {}, "ipc"),
        ({}, {"curve_secretkey": "x"}, "ipc"),
        ({}, {}, "tcp"),
    ],
    ids=["folder", "command", "home", "python", "encrypted", "tcp"],
)
def test_a_spare_serves_only_what_it_can_become(
    sandbox: Sandbox, change: Any, connection: dict[str, str], transport: str
) -> None:
    """What a kernel reads in its start is the same."""
    spare = Forked(sandbox)
    plan = PLAN._replace(**change)
    assert sandbox.spares.fitting(plan, connection, transport) is None
    other = PLAN._replace(environment={"A": "c", "JPY_SESSION_NAME": "a.ipynb"})
    assert sandbox.spares.fitting(other, {}, "ipc") is not None
    spare.sock.close()
