"""The host process is killed at random points: nothing is lost, and the next try works."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_kernel.workspace.garbage import verify
from sandbox_kernel.workspace.store import Store
from tests.workspace.conftest import NewGuest
from tests.workspace.guests import Guest, snapshot

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("killed.py")


def run(what: str, store: Store, guest: Guest, point: int) -> subprocess.CompletedProcess[str]:
    """Persist or hydrate in a process of its own, which dies at ``point``."""
    with guest.connect() as sock:
        return subprocess.run(
            [
                *(sys.executable, str(SCRIPT), what, store.url, str(guest.folder)),
                *(str(sock.fileno()), str(point)),
            ],
            pass_fds=[sock.fileno()],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )


def fill(guest: Guest, number: int) -> None:
    """Some files; most of them are other ones for each number."""
    folder = guest.folder / f"d{number % 3}"
    folder.mkdir(exist_ok=True)
    for name in range(12):
        (folder / f"f{name}").write_bytes(os.urandom(2000))
    (guest.folder / "big").write_bytes(os.urandom(3_000_000))


def check(store: Store) -> None:
    """The store is clean, and its newest save is whole."""
    assert verify(store).problems == []
    save = store.latest("work")
    assert save is not None
    for _, entry in store.files(save):
        for _, hash_, length in entry.pieces():
            assert len(store.read(hash_)) == length


def kill_persists(store: Store, guest: Guest, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    fill(guest, 0)
    counted = run("persist", store, guest, 0)
    assert counted.returncode == 0, counted.stderr
    points = int(counted.stdout)
    assert points > 500
    killed = number = 0
    while killed < kills:
        number += 1
        assert number < 4 * kills
        fill(guest, number)
        before = store.saves("work")
        died = run("persist", store, guest, dice.randint(1, points))
        fresh = Store.open(store.url)
        check(fresh)
        after = fresh.saves("work")
        assert after[: len(before)] == before
        if died.returncode == 0:
            continue  # this change took less than that point
        assert died.returncode == -signal.SIGKILL, died.stderr
        killed += 1
        guest.persist(fresh)
        newest = fresh.find("work")
        files = {path for path, _ in fresh.files(newest)}
        assert files == snapshot(guest.folder).keys()
        check(fresh)


def kill_hydrates(store: Store, new_guest: NewGuest, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    source = new_guest("source")
    for number in range(2):
        fill(source, number)
    source.persist(store)
    wanted = snapshot(source.folder)
    counted = run("hydrate", store, new_guest("counted"), 0)
    assert counted.returncode == 0, counted.stderr
    points = int(counted.stdout)
    killed = number = 0
    while killed < kills:
        number += 1
        assert number < 4 * kills
        guest = new_guest(f"guest{number}")
        (guest.folder / "before").write_text("is replaced by the save")
        died = run("hydrate", store, guest, dice.randint(1, points))
        assert died.returncode in (0, -signal.SIGKILL), died.stderr
        killed += died.returncode != 0
        check(Store.open(store.url))
        # Nothing half-written is to be seen: the save is there as a whole, or not at all.
        guest.hydrate(Store.open(store.url))
        assert snapshot(guest.folder) == wanted
        guest.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_fifty_points_of_persist(store: Store, guest: Guest) -> None:
    kill_persists(store, guest, 50, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_fifty_points_of_hydrate(store: Store, new_guest: NewGuest) -> None:
    kill_hydrates(store, new_guest, 50, seed=4)


PERSIST = """
import sys
from pathlib import Path
from sandbox_kernel.workspace.store import Store
from tests.workspace.guests import Guest
store, guest = Store.open(sys.argv[1]), Guest(Path(sys.argv[2]))
for number in range(5):
    (guest.folder / "mine").write_text(sys.argv[2] + str(number))
    print(guest.persist(store).save.id, flush=True)
guest.close()
"""


def test_two_processes_at_once(store: Store, tmp_path: Path) -> None:
    """Both processes' saves of one workspace are there, each as it was."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PERSIST, store.url, str(tmp_path / name)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    made = [process.communicate(timeout=150)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    ids = {save.id for save in store.saves("work")}
    assert ids == {*made[0], *made[1]}
    assert len(ids) == 10
    check(store)
    for name, saves in zip(("one", "two"), made, strict=True):
        for number, id_ in enumerate(saves):
            entry = store.lookup(store.find("work", id_), "mine")
            assert entry is not None
            data = b"".join(store.read(hash_) for _, hash_, _ in entry.pieces())
            assert data.decode() == f"{tmp_path / name}{number}"
