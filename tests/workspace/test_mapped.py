"""Files that are written through memory: np.memmap, LMDB, SQLite. No store may be missed."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.workspace.store import Store
from tests.workspace.conftest import NewGuest
from tests.workspace.guests import Guest

from .guests import WRITER


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk; and one on a file system that lives in memory, which gives no sign."""
    if request.param == "disk":
        yield tmp_path / "workspace"
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="workspace-"))
    yield folder
    shutil.rmtree(folder)


def test_stores_to_a_mapped_file(place: Path, store: Store, new_guest: NewGuest) -> None:
    """A process keeps a file mapped, and stores to the same page again and again, between saves:
    each save has what was stored last. A save between two of them has nothing new."""
    guest, other = Guest(place, "mapping"), new_guest("other")
    path = place / "sub" / "array"
    path.parent.mkdir()
    path.write_bytes(bytes(8192))
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdin
        assert writer.stdout
        for number in range(1, 4):
            writer.stdin.write(f"{number} {number}\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == f"{number}\n"
            time.sleep(0.15)  # until its time is one that is trusted
            assert guest.persist(store).new, number
            assert not guest.persist(store).new
        writer.stdin.close()
    guest.close()
    other.hydrate(store)
    assert (other.folder / "sub" / "array").read_bytes()[:4] == bytes(range(4))


def test_a_database_in_use(store: Store, new_guest: NewGuest) -> None:
    """SQLite in WAL mode, with its connection open: what was committed before a save is in it."""
    guest, other = new_guest("one"), new_guest("two")
    with sqlite3.connect(guest.folder / "db") as database:
        database.execute("pragma journal_mode = wal")
        database.execute("create table t (x)")
        database.commit()
        for number in range(3):
            database.execute("insert into t values (?)", [number])
            database.commit()
            time.sleep(0.15)
            guest.persist(store)
            other.hydrate(store)
            copy = sqlite3.connect(other.folder / "db")
            assert copy.execute("select count(*) from t").fetchone() == (number + 1,)
            copy.close()
    database.close()
