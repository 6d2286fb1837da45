"""A store that others clean up, or delete, while a process works with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.errors import StoreError
from sandbox_kernel.workspace.garbage import collect, verify
from sandbox_kernel.workspace.reports import SaveInfo
from sandbox_kernel.workspace.store import Store
from tests.workspace.conftest import NewGuest
from tests.workspace.guests import Guest, snapshot

CLI = Path(sys.executable).with_name("sandbox-kernel")


def gc(store: Store, *options: str) -> str:
    """Garbage is collected by another process; what it says."""
    command = [str(CLI), "workspace", "gc", "--grace", "0", "--store", store.url, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def before_publishing(
    store: Store, monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]
) -> None:
    """Once, when a save has all that it needs and is about to appear."""
    publish = store.publish

    def late(*arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(store, "publish", publish)
        do()
        return publish(*arguments, **more)

    monkeypatch.setattr(store, "publish", late)


def packs(store: Store) -> set[Path]:
    return set(Path(store.url, "packs").iterdir())


def test_a_process_that_lives_on_after_a_gc(store: Store, new_guest: NewGuest) -> None:
    """A server has a workspace open for days. Another process's gc rewrites its many small
    packs, and deletes them: the server still brings the files in, and saves."""
    guest = new_guest("one")
    for number in range(35):
        (guest.folder / f"f{number}").write_text(str(number))
        guest.persist(store)
    assert len(packs(store)) == 35
    assert "35 rewritten" in gc(store)
    assert len(packs(store)) == 1
    for kept in (store, Store.open(store.url)):
        other = new_guest(f"for-{id(kept)}")
        other.hydrate(kept)
        assert snapshot(other.folder) == snapshot(guest.folder)
    (guest.folder / "more").write_text("more")
    assert guest.persist(store).new_bytes < 10_000
    assert verify(store).problems == []


def test_a_gc_in_the_middle_of_a_save(
    store: Store, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox was told that it need not send what the store has; then the workspace is removed
    and its garbage collected, before the save is there. The gc waits for the save, and nothing is
    missing in it; a gc that has seen nothing of it, or somebody who deletes packs by hand, makes
    the sandbox send everything again."""
    (guest.folder / "f").write_bytes(os.urandom(2_000_000))
    guest.persist(store)
    Store.open(store.url).remove("work")
    said: list[str] = []
    before_publishing(store, monkeypatch, lambda: said.append(gc(store)))
    assert guest.persist(store).new_bytes < 10_000
    assert said[0].startswith("0 packs deleted")
    assert verify(Store.open(store.url)).problems == []
    gc(store)
    assert verify(Store.open(store.url)).problems == []

    Store.open(store.url).remove("work")

    def lose_packs() -> None:
        for path in packs(store):
            path.unlink()

    before_publishing(store, monkeypatch, lose_packs)
    assert guest.persist(store).new_bytes > 1_999_999
    assert verify(Store.open(store.url)).problems == []
    assert not list(Path(store.url, "claims").iterdir())


def test_a_pack_that_waits_for_its_end(store: Store, new_guest: NewGuest) -> None:
    """Somebody saves while gc rewrites a pack, so the old one is not deleted yet, and must not
    be relied on. A process that knows only that one finds the new one, and its next save is not
    refused as if the sandbox had not sent everything; nor if the new one is lost."""
    guest, other = new_guest("one"), new_guest("two")
    for name in ("a", "b", "c"):
        (guest.folder / name).write_bytes(os.urandom(900_000))
    guest.persist(store)
    (guest.folder / "a").unlink()
    (guest.folder / "b").unlink()
    guest.persist(store)
    with Store.open(store.url).saving():
        assert "1 rewritten" in gc(store, "--keep", "1")
    assert store.doomed()
    (guest.folder / "d").write_text("d")
    assert guest.persist(store).new_bytes < 10_000
    assert verify(Store.open(store.url)).problems == []
    other.hydrate(Store.open(store.url))
    assert snapshot(other.folder) == snapshot(guest.folder)
    for path in packs(store):
        if path.stem not in store.doomed():
            path.unlink()
    (guest.folder / "e").write_text("e")
    guest.persist(store)
    for path in packs(store):
        if path.stem in store.doomed():
            path.unlink()
    other.hydrate(Store.open(store.url))
    assert snapshot(other.folder) == snapshot(guest.folder)


def test_a_gc_beside_a_rename(store: Store, guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook is renamed while gc deletes all but its newest save, whichever is first: none of
    them fails for what the other has done, and the newest save is there."""
    for number in range(3):
        (guest.folder / "f").write_text(str(number))
        guest.persist(store)
    load, others = store.load, Store.open(store.url)

    def late(name: str, id_: str) -> SaveInfo:
        monkeypatch.setattr(store, "load", load)
        assert collect(others, keep=1).saves == 2
        return load(name, id_)

    monkeypatch.setattr(store, "load", late)
    assert store.rename("work", "new")
    assert len(store.ids("new")) == 1
    for number in range(3):
        (guest.folder / "f").write_text(f"again {number}")
        guest.persist(store, "new")
    remove = others.remove

    def later(name: str, at: str = "") -> bool:
        monkeypatch.setattr(others, "remove", remove)
        assert store.rename("new", "newer")
        return remove(name, at)

    monkeypatch.setattr(others, "remove", later)
    collect(others, keep=1)
    assert len(store.ids("newer")) == 4
    assert verify(store).problems == []


@pytest.mark.parametrize(("look", "step"), [(collect, "sizes"), (verify, "check")])
def test_a_save_beside_a_look_at_all(
    store: Store,
    new_guest: NewGuest,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[Store], Any],
    step: str,
) -> None:
    """A notebook is saved while another process collects garbage, or verifies, and has just listed
    the packs. Its save is not taken for a damaged one."""
    guest = new_guest("one")
    (guest.folder / "f").write_text("first")
    guest.persist(store)
    looking = Store.open(store.url)
    usual = getattr(looking.packs, step)

    def saved_meanwhile(*arguments: Any) -> Any:
        found = usual(*arguments)
        monkeypatch.setattr(looking.packs, step, usual)
        (guest.folder / "f").write_text("second")
        guest.persist(store)
        return found

    monkeypatch.setattr(looking.packs, step, saved_meanwhile)
    report = look(looking)
    assert getattr(report, "problems", []) == []
    assert verify(store).problems == []
    assert verify(store).saves == 2


def test_a_hint_that_leads_nowhere(
    store: Store, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save names packs in which its objects may be found. That one of them is deleted, of which
    it needs nothing, is no reason to fail."""
    (guest.folder / "f").write_bytes(os.urandom(2_000_000))
    guest.persist(store)
    (first,) = packs(store)
    (guest.folder / "f").write_text("2")
    guest.persist(store)
    store.remove("work", store.ids("work")[0])
    (guest.folder / "f").write_text("3")
    before_publishing(store, monkeypatch, first.unlink)
    assert guest.persist(store).new
    assert verify(Store.open(store.url)).problems == []


def test_a_store_that_was_deleted(store: Store, new_guest: NewGuest) -> None:
    """Somebody deletes the store's folder, to start over, while a server runs. Its next save makes
    the store again, with everything in it; and so it does if only the packs were deleted."""
    guest, other = new_guest("one"), new_guest("two")
    (guest.folder / "f").write_bytes(os.urandom(2_000_000))
    guest.persist(store)
    before = store.id
    shutil.rmtree(store.url)
    (guest.folder / "g").write_text("g")
    assert guest.persist(store).new_bytes > 1_999_999
    fresh = Store.open(store.url)
    assert fresh.id == store.id != before
    other.hydrate(fresh)
    assert snapshot(other.folder) == snapshot(guest.folder)
    for path in packs(store):
        path.unlink()
    (guest.folder / "h").write_text("h")
    assert guest.persist(store).new_bytes > 1_999_999
    other.hydrate(Store.open(store.url))
    assert snapshot(other.folder) == snapshot(guest.folder)


def test_claims_of_others(store: Store, guest: Guest) -> None:
    """A claim of a process that has died, or is a day old, holds nothing up; one of another machine
    does. Two collectors at once are refused."""
    (guest.folder / "f").write_bytes(os.urandom(100_000))
    guest.persist(store)
    store.remove("work")
    claim = {"kind": "save", "since": time.time(), "machine": "elsewhere", "pid": 1, "start": 1}
    place = Path(store.url, "claims", "save-1.json")
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(claim))
    report = collect(store, grace=0)
    assert (report.packs_deleted, report.waiting, report.saving) == (0, 1, 1)
    place.write_text(json.dumps({**claim, "kind": "gc"}))
    with pytest.raises(StoreError, match="elsewhere"):
        collect(store, grace=0)
    place.write_text(json.dumps({**claim, "since": time.time() - 25 * 3600}))
    assert collect(store, grace=0).packs_deleted == 1
    assert not place.exists()
    # A process that is killed while it saves leaves its claim; it is known to be dead.
    code = (
        "import os, sys; from sandbox_kernel.workspace import Store\n"
        "with Store.open(sys.argv[1]).saving(): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, store.url], check=True)
    assert len(list(place.parent.iterdir())) == 1
    guest.persist(store)
    store.remove("work")
    assert collect(store, grace=0).packs_deleted == 1
