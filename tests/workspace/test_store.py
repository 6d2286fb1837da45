"""The store: history, names, garbage, and what two processes do to it at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox_kernel.errors import SandboxError, StoreError, WorkspaceExists, WorkspaceNotFound
from sandbox_kernel.workspace import garbage as collecting
from sandbox_kernel.workspace.blobs import LocalBlobs
from sandbox_kernel.workspace.garbage import collect, verify
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.workspaces import name_for_notebook, new_id
from tests.workspace.conftest import NewGuest
from tests.workspace.guests import Guest, snapshot


def packs(store: Store) -> int:
    return len(store.packs.names())


def test_history(store: Store, new_guest: NewGuest) -> None:
    """Each save is kept; an earlier one comes back exactly, and a diff tells what changed."""
    guest = new_guest("one")
    trees = []
    for number in range(3):
        (guest.folder / f"added{number}").write_text("new")
        (guest.folder / "changing").write_text("x" * number)
        if number == 2:
            (guest.folder / "added0").unlink()
        trees.append(snapshot(guest.folder))
        guest.persist(store)
    saves = store.saves("work")
    assert [s.parent for s in saves] == ["", saves[0].id, saves[1].id]
    changes = [(c.kind, c.path) for c in store.diff(saves[1], saves[2])]
    assert changes == [("removed", "added0"), ("added", "added2"), ("changed", "changing")]
    for number, save in enumerate(saves):
        other = new_guest(f"at{number}")
        (other.folder / "stray").write_text("not in any save")
        other.hydrate(store, at=save.id)
        assert snapshot(other.folder) == trees[number]
    store.restore("work", saves[0].id)
    guest.hydrate(store)
    assert snapshot(guest.folder) == trees[0]
    assert len(store.saves("work")) == 4
    assert store.diff(saves[0], store.find("work")) == []


def test_finding_saves(store: Store, guest: Guest) -> None:
    """By the whole id, its start or its end; anything else says what to do."""
    with pytest.raises(WorkspaceNotFound, match="workspace list"):
        store.find("work")
    for text in "ab":
        (guest.folder / "f").write_text(text)
        guest.persist(store)
    first, second = store.saves("work")
    assert store.find("work", first.id[:25]).id == first.id
    assert store.find("work", second.id[-6:]).id == second.id
    for wrong in ("2", "nothing"):
        with pytest.raises(WorkspaceNotFound, match="workspace log work"):
            store.find("work", wrong)


def test_ids_follow_each_other_when_the_clock_does_not() -> None:
    """A save made after another one sorts behind it, even if the clock went back."""
    later = "29991231t235959-999999999-abcdef"
    assert new_id(later)[:25] > later[:25]
    assert new_id("")[:2] == "20"


def test_rename_copy_retire(store: Store, guest: Guest) -> None:
    """A notebook's moves take its workspace along; a deleted one's is kept for a grace time."""
    (guest.folder / "f").write_text("1")
    guest.persist(store)
    store.note_failure("work", "local", "s", SandboxError("it was full"))
    assert store.rename("work", "moved", "moved.ipynb")
    assert [failed.message for failed in store.failures("moved")] == ["it was full"]
    assert not store.failures("work")
    assert not store.rename("work", "moved")
    assert store.names() == ["moved"]
    assert store.find("moved").notebook == "moved.ipynb"
    assert store.copy("moved", "copy")
    with pytest.raises(WorkspaceExists):
        store.copy("moved", "copy")
    guest.persist(store, "other")
    with pytest.raises(WorkspaceExists):
        store.rename("other", "copy")
    assert store.retire("copy")
    assert not store.retire("nothing")
    assert "copy" not in store.names()
    assert "copy" in store.names(retired=True)
    assert collect(store, grace=3600).workspaces == []
    assert store.revive("copy")
    store.retire("copy")
    assert collect(store, now=lambda: time.time() + 8 * 24 * 3600).workspaces == ["copy"]
    store.retire("moved")
    assert guest.persist(store, "moved").save.workspace == "moved"
    assert verify(store).problems == []


def test_a_save_revives(store: Store, guest: Guest) -> None:
    """Saving a workspace that was retired means that it is in use again."""
    (guest.folder / "f").write_text("1")
    guest.persist(store)
    store.retire("work")
    (guest.folder / "f").write_text("2")
    guest.persist(store)
    assert store.names() == ["work"]


def test_names_of_notebooks() -> None:
    """Every path gives a valid name of its own; it can be read."""
    paths = [
        "a.ipynb",
        "A.ipynb",
        "x/a.ipynb",
        "x-a.ipynb",
        "übung 1.ipynb",
        "笔记.ipynb",
        "\udcff",
    ]
    names = {name_for_notebook(path) for path in [*paths, "long/" * 50 + "n.ipynb"]}
    assert len(names) == len(paths) + 1
    assert name_for_notebook("x/Übung 1.ipynb").startswith("x-ubung-1-")


def test_garbage(store: Store, guest: Guest) -> None:
    """What no save needs is deleted, but not before its grace time is over; the rest stays."""
    (guest.folder / "big").write_bytes(os.urandom(3_000_000))
    first = guest.persist(store).save
    (guest.folder / "big").write_bytes(os.urandom(10))
    guest.persist(store)
    store.remove("work", first.id)
    now = time.time()
    assert collect(store, grace=100, now=lambda: now).waiting == 1
    assert packs(store) == 2
    assert collect(store, grace=100, now=lambda: now + 50).packs_deleted == 0
    report = collect(store, grace=100, now=lambda: now + 101)
    assert report.packs_deleted == 1
    assert report.bytes_freed > 3_000_000
    assert verify(store).problems == []
    guest.hydrate(store)


def test_only_the_newest_saves_are_kept(store: Store, guest: Guest) -> None:
    """If that is asked for; what they have in common with older ones stays."""
    (guest.folder / "same").write_bytes(os.urandom(100_000))
    for number in range(5):
        (guest.folder / "changing").write_bytes(os.urandom(100_000) + b"%d" % number)
        guest.persist(store)
    ids = store.ids("work")
    assert collect(store).saves == 0
    report = collect(store, keep=2, grace=0)
    assert report.saves == 3
    assert store.ids("work") == ids[-2:]
    assert verify(store).problems == []
    for save in store.saves("work"):
        assert {path for path, _ in store.files(save)} == {"same", "changing"}
    assert guest.persist(store).new is False


def test_garbage_that_is_needed_again(store: Store, guest: Guest) -> None:
    """A pack that was unused, and is not any more, is kept."""
    data = os.urandom(3_000_000)
    (guest.folder / "big").write_bytes(data)
    first = guest.persist(store).save
    (guest.folder / "big").unlink()
    guest.persist(store)
    store.remove("work", first.id)
    now = time.time()
    collect(store, grace=100, now=lambda: now)
    (guest.folder / "big").write_bytes(data)
    assert guest.persist(store).new_bytes < 10_000
    assert collect(store, grace=100, now=lambda: now + 101).packs_deleted == 0
    assert verify(store).problems == []


def test_garbage_within_packs(store: Store, guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack of which little is needed, and many small packs, are rewritten."""
    monkeypatch.setattr(collecting, "_MANY", 4)
    for number in range(4):
        (guest.folder / f"f{number}").write_bytes(os.urandom(1_000_000))
    first = guest.persist(store).save
    for number in range(3):
        (guest.folder / f"f{number}").unlink()
    for number in range(6):
        (guest.folder / "small").write_text(str(number))
        guest.persist(store)
    before = snapshot(guest.folder)
    store.remove("work", first.id)
    report = collect(store, grace=0)
    assert report.packs_rewritten == 7
    assert packs(store) == 1
    fresh = Store.open(store.url)
    assert verify(fresh).problems == []
    guest.hydrate(fresh)
    assert snapshot(guest.folder) == before
    assert collect(fresh, grace=0).packs_rewritten == 0


def test_garbage_in_another_process(store: Store, guest: Guest) -> None:
    """A process that remembers what was deleted by another one does not rely on it."""
    data = os.urandom(3_000_000)
    (guest.folder / "big").write_bytes(data)
    guest.persist(store)
    other = Store.open(store.url)
    other.remove("work")
    collect(other, grace=0)
    assert packs(store) == 0
    assert guest.persist(store).new_bytes > 2_999_999
    assert verify(store).problems == []


def test_gc_does_not_touch_a_store_that_lacks_something(store: Store, guest: Guest) -> None:
    """Where something is missing already, nothing is deleted."""
    (guest.folder / "f").write_bytes(os.urandom(3_000_000))
    guest.persist(store)
    (guest.folder / "f").write_bytes(os.urandom(3_000_000))
    guest.persist(store)
    next(Path(store.url, "packs").iterdir()).unlink()
    fresh = Store.open(store.url)
    assert verify(fresh).problems
    with pytest.raises(StoreError):
        collect(fresh, grace=0)
    assert packs(fresh) == 1


def test_every_save_that_lacks_something_is_named(
    store: Store, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves share the folders that have not changed, and what those lack is lacking in each."""
    (guest.folder / "shared").mkdir()
    (guest.folder / "shared" / "f").write_bytes(b"lost" * 1000)
    for number in range(3):
        (guest.folder / "changing").write_text(str(number))
        guest.persist(store)
    fresh = Store.open(store.url)
    entry = fresh.lookup(fresh.find("work"), "shared/f")
    assert entry is not None
    lost = {hash_ for _, hash_, _ in entry.pieces()}
    records, find = fresh.packs.records, fresh.packs.find
    monkeypatch.setattr(
        fresh.packs, "records", lambda name: [r for r in records(name) if r[0] not in lost]
    )
    monkeypatch.setattr(fresh.packs, "find", lambda hash_: None if hash_ in lost else find(hash_))
    problems = verify(fresh).problems
    ids = [save.id for save in fresh.saves("work")]
    assert problems == [f"work {id_}: {len(lost)} chunks are missing" for id_ in ids]


def test_a_damaged_pack_is_named_once(store: Store, guest: Guest) -> None:
    """`workspace verify` reads on; then it names the saves that are damaged by it."""
    (guest.folder / "f").write_text("1")
    guest.persist(store)
    [pack] = Path(store.url, "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[-60] ^= 1  # in the index
    pack.chmod(0o600)
    pack.write_bytes(data)
    of_pack, of_save = verify(Store.open(store.url)).problems
    assert of_pack.startswith("The store ")
    assert of_save.startswith("work ")


def test_another_format_is_refused(store: Store) -> None:
    """A store of a later version is left alone."""
    path = Path(store.url, "format.json")
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(StoreError, match="2"):
        Store.open(store.url)


def test_modes_of_the_store(store: Store, guest: Guest) -> None:
    """Other users of the machine cannot read what is kept."""
    (guest.folder / "f").write_text("1")
    guest.persist(store)
    for path in (Path(store.url), *Path(store.url).rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_leftovers_of_writers_that_died(store: Store) -> None:
    """Temporary files are deleted once they are old, and are no problem before."""
    assert isinstance(store.blobs, LocalBlobs)
    old, new = Path(store.url, "tmp", "old"), Path(store.url, "tmp", "new")
    for path in (old, new):
        path.write_text("half a pack")
    os.utime(old, (0, 0))
    assert verify(store).problems == []
    collect(store)
    assert new.exists()
    assert not old.exists()


def test_the_format_can_be_read_without_us(store: Store, guest: Guest) -> None:
    """The program in docs/workspace.md reads a file, from nothing but the store's files."""
    docs = Path(__file__).parents[2] / "docs" / "workspace.md"
    program = docs.read_text().rpartition("```python\n")[2].partition("```")[0]
    (guest.folder / "d").mkdir()
    for number in range(400):
        (guest.folder / "d" / f"f{number}").touch()
    data = os.urandom(1_500_000) + b"compressible " * 100_000
    with (guest.folder / "d" / "file").open("wb") as file:
        file.write(data)
        file.truncate(7_000_000)
    guest.persist(store)
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program, store.url, "work", "d/file"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert ran.stdout == data + bytes(7_000_000 - len(data))
