"""Spares between processes: what one process leaves, the next one starts its kernel in, once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.host_processes import ProcessId, reap
from sandbox_kernel.kernels import spare_holder, spare_shelf
from sandbox_kernel.kernels.spare_holder import Holder
from sandbox_kernel.kernels.spare_plan import SparePlan
from sandbox_kernel.kernels.spare_shelf import Offer, Shelf
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.sandboxes.unattended import is_spare
from sandbox_kernel.spec import SETTINGS, SandboxSpec
from sandbox_kernel.tunnel.background import submit
from tests.helpers.waiting import until, wait_until

from .conftest import StartKernel
from .live import PATIENCE, jail_processes

START = """
import sys
from jupyter_client import KernelManager
from traitlets.config import Config
settings = eval(sys.argv[1])
manager = KernelManager(kernel_name="sandbox", config=Config({"SandboxProvisioner": settings}))
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(90)
client.execute_interactive(sys.argv[2])
print(manager.provisioner.sandbox_name)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@pytest.fixture(autouse=True)
def _wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SETTINGS["warm_spares"].variable)
    yield
    monkeypatch.undo()  # also what a test has patched, so that holders end in order
    spare_shelf.end_holders()
    reap()
    shutil.rmtree(folder / "run" / "spares", ignore_errors=True)


def process(code: str = "", **settings: object) -> subprocess.Popen[str]:
    """A process that starts a kernel, runs a cell and ends."""
    command = [sys.executable, "-c", START, repr(settings), code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ran(process: subprocess.Popen[str]) -> list[str]:
    """What its cell printed, and the name of the kernel's sandbox."""
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    return out.splitlines()


def sandbox_of(process: subprocess.Popen[str]) -> str:
    return ran(process)[-1]


def spares() -> list[str]:
    return [record.name for record in Records().list("local") if is_spare(record)]


def offered(folder: Path) -> list[str]:
    return [
        json.loads(path.read_text())["name"] for path in (folder / "run/spares").glob("*.spare")
    ]


def spare(folder: Path, but: str = "") -> str:
    """The only spare that is offered in a while, other than that one."""
    wait_until(lambda: len(offered(folder)) == 1 and offered(folder) != [but], "a spare")
    return offered(folder)[0]


def command(*arguments: str) -> str:
    command = [sys.executable, "-m", "sandbox_kernel", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def holder(folder: Path) -> ProcessId:
    (lock,) = (folder / "run" / "spares").glob("*.lock")
    return ProcessId(*json.loads(lock.read_text()))


def test_the_next_process_takes_the_spare_and_another_is_made(folder: Path) -> None:
    """One holder serves them all, each spare once."""
    sandbox_of(process())
    first = spare(folder)
    held_by = holder(folder)
    assert sandbox_of(process()) == first
    second = spare(folder, but=first)
    assert sandbox_of(process()) == second
    assert holder(folder) == held_by


def test_spares_are_listed_and_removed_together(folder: Path) -> None:
    """``rm --warm`` ends the holder, too."""
    sandbox_of(process())
    name, held_by = spare(folder), holder(folder)
    (found,) = json.loads(command("ps", "--json"))
    assert (found["name"], found["spare"], found["kernel"]) == (name, True, False)
    command("rm", "--warm")
    assert Records().list("local") == []
    assert not held_by.alive
    assert not (folder / "run" / "spares").exists()


def test_a_spare_that_somebody_removes_is_not_made_again(folder: Path) -> None:
    """Until the next kernel starts."""
    sandbox_of(process())
    name, held_by = spare(folder), holder(folder)
    command("rm", name)
    assert held_by.wait(PATIENCE)
    assert sandbox_of(process()) != name


def test_two_processes_never_get_the_same_spare(folder: Path) -> None:
    """They start their kernels at the same time: one has the spare, the other a new sandbox."""
    sandbox_of(process())
    name = spare(folder)
    rivals = [process(), process()]
    names = [sandbox_of(rival) for rival in rivals]
    assert len(set(names)) == 2
    assert name in names


def test_a_kernel_starts_where_spares_cannot_be_looked_for(
    folder: Path, start_kernel: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hardened container hides what a spare must have in common with its process."""

    def hidden() -> dict[str, object]:
        raise PermissionError("/proc/self/ns/cgroup")

    monkeypatch.setattr(spare_shelf, "_surroundings", hidden)
    assert start_kernel(warm_spares=True).ok("6 * 7").value == "42"
    assert not (folder / "run" / "spares").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b'{"name": "x", "more": 1}'])
def test_an_offer_that_cannot_be_read_is_no_spare(folder: Path, content: bytes) -> None:
    """Another version may have written it. It is gone, and the kernel starts without a spare."""
    shelves = folder / "run" / "spares"
    shelves.mkdir(parents=True)
    (shelves / "kind.spare").write_bytes(content)
    assert Shelf("kind").take() is None
    assert list(shelves.iterdir()) == []
    shelves.rmdir()


def _take(key: str, rounds: int) -> list[str]:
    shelf = Shelf(key)
    return [offer.name for _ in range(rounds) if (offer := shelf.take()) is not None]


def test_an_offer_is_taken_once_however_many_try(folder: Path) -> None:
    """Four processes take from one shelf as fast as they can, while offers are put there."""
    (folder / "run" / "spares").mkdir(mode=0o700, parents=True)
    put: list[str] = []
    shelf = Shelf("0" * 32)
    with concurrent.futures.ProcessPoolExecutor(4) as rivals:
        taking = [rivals.submit(_take, shelf.key, 20_000) for _ in range(4)]
        while not all(rival.done() for rival in taking):
            if not shelf.offered:
                put.append(f"s{len(put)}")
                shelf.offer(Offer("local", put[-1], "", ""))
        taken = [name for rival in taking for name in rival.result()]
    assert len(put) > 50
    assert sorted(taken + _take(shelf.key, 1)) == sorted(put)


def test_what_has_changed_since_gets_a_new_sandbox(folder: Path) -> None:
    """A file that the sandbox shows was replaced. The stale spare goes, and a new one is made."""
    shown = folder / "shown.txt"
    shown.write_text("old")
    settings: dict[str, Any] = {"readable": [str(shown)]}
    sandbox_of(process(**settings))
    stale = spare(folder)
    (folder / "new.txt").write_text("new")
    os.replace(folder / "new.txt", shown)
    text, name = ran(process(f"print(open({str(shown)!r}).read())", **settings))
    assert text == "new"
    assert name != stale
    fresh = spare(folder, but=stale)
    wait_until(lambda: stale not in spares(), "its removal")
    text, name = ran(process(f"print(open({str(shown)!r}).read())", **settings))
    assert (text, name) == ("new", fresh)


def test_other_settings_and_surroundings_get_another_sandbox(folder: Path) -> None:
    """A spare has the limits, the environment and the priority that it was made with."""
    sandbox_of(process(env={"WHO": "one"}))
    name = spare(folder)
    assert ran(process("import os; print(os.environ['WHO'])", env={"WHO": "two"}))[0] == "two"
    nicer = ["nice", "-n", "5", sys.executable, "-c", START, repr({"env": {"WHO": "one"}}), ""]
    out = subprocess.run(nicer, check=True, capture_output=True, text=True).stdout
    assert out.split()[-1] != name
    assert name in spares()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_spare_outlives_its_holder(folder: Path, how: signal.Signals) -> None:
    """Not for longer than its short lease, if the holder is killed."""
    sandbox_of(process())
    name = spare(folder)
    held_by = holder(folder)
    os.kill(held_by.pid, how)
    assert held_by.wait(PATIENCE)
    wait_until(lambda: not jail_processes(folder), "the end of the spare")
    if how == signal.SIGKILL:
        asyncio.run(LocalClient().remove(name))
    assert Records().list("local") == []


def test_the_holder_ends_when_its_folder_goes(folder: Path) -> None:
    """As at a logout, if the folder is one of the session's."""
    sandbox_of(process())
    spare(folder)
    held_by = holder(folder)
    shutil.rmtree(folder / "run" / "spares")
    assert held_by.wait(PATIENCE)
    wait_until(lambda: not jail_processes(folder), "the end of the spare")
    asyncio.run(LocalClient().sweep())


@pytest.mark.parametrize("setting", [{"warm_spares": False}, {"name": "mine"}, {"disk_mib": 64}])
def test_no_holder_unless_it_is_wanted(folder: Path, setting: dict[str, Any]) -> None:
    """Nor for a sandbox with a name of its own, or with disk space that is set aside."""
    sandbox_of(process(**setting))
    assert not (folder / "run" / "spares").exists()


# --- the holder itself, in this process


PLAN = SparePlan.of("local", SandboxSpec(name="x"), ())


class Held:
    """A holder that runs on the background loop."""

    def __init__(self) -> None:
        self.shelf = Shelf.of(PLAN)
        self.shelf._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.shelf._lock.touch()
        self.done = submit(Holder(self.shelf, PLAN).hold())

    def end(self) -> None:
        self.done.result(PATIENCE)
        self.shelf.end()
        reap()


def test_a_spare_does_not_outlive_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends ten minutes after the last use. Each use restarts that time."""
    held = Held()
    wait_until(lambda: held.shelf.offered, "the offer")
    monkeypatch.setattr(spare_holder, "LIMIT", 0.0)
    held.end()
    assert Records().list("local") == []


def test_no_spare_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits is dropped, and none is made."""
    held = Held()
    wait_until(lambda: held.shelf.offered, "the offer")
    monkeypatch.setattr(spare_holder, "memory_left", lambda: 0.1)
    held.end()
    assert Records().list("local") == []
    held = Held()
    held.end()
    assert Records().list("local") == []


async def test_who_takes_a_spare_and_dies_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody attaches to it, so it ends with its lease; the holder makes another one."""
    held = Held()
    await until(lambda: held.shelf.offered, "the offer")
    taken = held.shelf.take()
    assert taken is not None
    await until(lambda: held.shelf.offered, "another offer")
    handle = await LocalClient().get(taken.name)

    async def ended() -> bool:
        return (await handle.info()).status != "running"

    await until(ended, "its end")
    monkeypatch.setattr(spare_holder, "LIMIT", 0.0)
    await asyncio.to_thread(held.end)
    await LocalClient().remove(taken.name)


def test_a_start_does_not_fail_for_a_spare_that_is_gone(
    folder: Path, start_kernel: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offer names a sandbox that does not exist: the kernel gets a new one."""
    (folder / "run" / "spares").mkdir(mode=0o700, parents=True)
    take = Shelf.take

    def took(shelf: Shelf) -> Offer | None:
        assert take(shelf) is None
        return Offer("local", "gone", "1", "alike")

    monkeypatch.setattr(Shelf, "take", took)
    monkeypatch.setattr(LocalClient, "_likeness", lambda self, spec: "alike")
    assert start_kernel().ok("6 * 7").value == "42"


def test_a_holder_that_can_make_no_spare_ends(folder: Path) -> None:
    """Its log says why; the next start shows the same to its user."""
    plan = SparePlan.of("local", SandboxSpec(name="x", readable=("/does/not/exist",)), ())
    shelf = Shelf.of(plan)
    shelf.ask_for_one(plan)
    log = folder / "run" / "spares" / "holder.log"
    with contextlib.suppress(FileNotFoundError):  # the holder has ended, and takes its log along
        wait_until(lambda: "/does/not/exist" in log.read_text(), "its complaint")
    wait_until(lambda: not list(log.parent.glob("*.lock")), "its end")
    assert Records().list("local") == []
