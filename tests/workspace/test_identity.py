"""A workspace belongs to a notebook, not to a path."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_kernel.workspace import notebook_identity
from sandbox_kernel.workspace.exports import export
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.reports import SaveInfo
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.workspaces import name_for_notebook
from tests.workspace.guests import Guest


class Desk:
    """A folder of notebooks, and the store with their workspaces."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        folder.mkdir()

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def write(self, name: str, *cells: tuple[str, str]) -> None:
        """Cells are pairs of an id and what is in it."""
        content = [{"id": id_, "source": [source]} for id_, source in cells]
        Path(self.path(name)).write_text(json.dumps({"cells": content, "nbformat": 4}))

    def open(self, name: str) -> tuple[str, list[str]]:
        """As a kernel does; its id, and the files that it would have."""
        place = name_for_notebook(self.path(name))
        id_, self.told = notebook_identity.claim(self.store, place, self.path(name))
        save = self.store.latest(place)
        return id_, [path for path, _ in self.store.files(save)] if save else []

    def save(self, name: str, file: str, id_: str = "") -> str:
        """A kernel's save, with one more file; where it went."""
        place = notebook_identity.place_of(self.store, name_for_notebook(self.path(name)), id_)
        files = self.folder / "files" / name
        files.mkdir(parents=True, exist_ok=True)
        (files / file).write_text(file)
        return import_folder(self.store, place, files, notebook=self.path(name)).save.workspace


@pytest.fixture
def desk(store: Store, tmp_path: Path) -> Desk:
    return Desk(store, tmp_path / "desk")


def test_a_new_notebook_inherits_nothing(desk: Desk) -> None:
    """Untitled.ipynb was deleted in a shell, and a new one is made: it has none of the files, not
    even if both are empty still. The old files are kept, under a name that is told, and come back
    with the notebook."""
    desk.write("Untitled.ipynb")
    id_, _ = desk.open("Untitled.ipynb")
    desk.save("Untitled.ipynb", "private", id_)
    assert desk.open("Untitled.ipynb") == (id_, ["private"])  # the same file, still without a cell
    desk.write("Untitled.ipynb", ("a", "x = 1"), ("b", "y = 2"))
    notebook_identity.note(
        desk.store, name_for_notebook(desk.path("Untitled.ipynb")), id_, desk.path("Untitled.ipynb")
    )
    shutil.move(desk.path("Untitled.ipynb"), desk.path("backup"))

    desk.write("Untitled.ipynb")
    second, files = desk.open("Untitled.ipynb")
    assert (second != id_, files) == (True, [])
    assert " is kept as " in desk.told[0]
    # A kernel of the first one that still runs saves to the first one's.
    place = desk.save("Untitled.ipynb", "late", id_)
    assert place in desk.told[0]
    assert desk.store.ids(name_for_notebook(desk.path("Untitled.ipynb"))) == []
    desk.save("Untitled.ipynb", "mine", second)

    os.replace(desk.path("backup"), desk.path("Untitled.ipynb"))
    assert desk.open("Untitled.ipynb") == (id_, ["late", "private"])


def test_edits_keep_the_workspace(desk: Desk) -> None:
    """By git or another editor, with one cell left; by a script that rewrites the notebook, with
    other ids; while it cannot be read; and one that an older version made: all keep their files."""
    desk.write("n.ipynb", ("a", "x = 1"), ("b", "y = 2"))
    id_, _ = desk.open("n.ipynb")
    desk.save("n.ipynb", "file", id_)
    desk.write("n.ipynb", ("b", "all else is new"), ("c", "z = 3"))
    assert desk.open("n.ipynb") == (id_, ["file"])
    desk.write("n.ipynb", ("1", "all else is new"), ("2", "z = 3"), ("3", "more"))
    assert desk.open("n.ipynb") == (id_, ["file"])
    Path(desk.path("n.ipynb")).write_text("<<<<<<< a conflict of git")
    assert desk.open("n.ipynb") == (id_, ["file"])
    desk.store.blobs.delete(f"workspaces/{name_for_notebook(desk.path('n.ipynb'))}/notebook.json")
    assert desk.open("n.ipynb")[1] == ["file"]


def test_moved_in_a_shell(desk: Desk) -> None:
    """`mv a.ipynb b.ipynb`: it is known by its cells, and has its files; a copy, whose original is
    there still, has none; nor has a notebook with cells of its own."""
    desk.write("a.ipynb", ("a1", "x = 1"))
    id_, _ = desk.open("a.ipynb")
    desk.save("a.ipynb", "file", id_)
    shutil.copy(desk.path("a.ipynb"), desk.path("copy.ipynb"))
    assert desk.open("copy.ipynb")[1] == []
    os.rename(desk.path("a.ipynb"), desk.path("b.ipynb"))
    desk.write("other.ipynb", ("o", "x = 2"))
    assert desk.open("other.ipynb")[1] == []
    assert desk.open("b.ipynb")[1] == ["file"]
    desk.write("a.ipynb")
    assert desk.open("a.ipynb")[1] == []


def test_copies_of_a_template(desk: Desk) -> None:
    """Last month's copy of a template was deleted in a shell, and this month's is made: it has the
    same cells, but is another notebook. The old files are spoken of."""
    desk.write("template.ipynb", ("t", "x = 1"), ("u", "y = 2"))
    shutil.copy(desk.path("template.ipynb"), desk.path("may.ipynb"))
    id_, _ = desk.open("may.ipynb")
    desk.write("may.ipynb", ("t", "x = 1"), ("u", "y = 3"))
    name = name_for_notebook(desk.path("may.ipynb"))
    notebook_identity.note(desk.store, name, id_, desk.path("may.ipynb"))
    desk.save("may.ipynb", "private", id_)
    os.unlink(desk.path("may.ipynb"))
    shutil.copy(desk.path("template.ipynb"), desk.path("june.ipynb"))
    assert desk.open("june.ipynb")[1] == []
    assert f"workspace export {name} " in desk.told[0]


def test_swapped_in_a_shell(desk: Desk) -> None:
    """Two notebooks change their names by `mv`, also across a checkout that touches both: each has
    its own files under its new name."""
    for name in ("a.ipynb", "b.ipynb"):
        desk.write(name, (name, f"{name} = 1"))
        desk.save(name, f"of-{name}", desk.open(name)[0])
    os.rename(desk.path("a.ipynb"), desk.path("c"))
    os.rename(desk.path("b.ipynb"), desk.path("a.ipynb"))
    os.rename(desk.path("c"), desk.path("b.ipynb"))
    os.utime(desk.path("a.ipynb"))
    assert desk.open("a.ipynb")[1] == ["of-b.ipynb"]
    assert desk.open("b.ipynb")[1] == ["of-a.ipynb"]


def test_renamed_onto_a_leftover(desk: Desk) -> None:
    """Where a notebook is renamed to, another one has left a workspace: that is set aside, and the
    renamed one's own takes the name. A save that was made during the rename is where the others
    are."""
    desk.write("old.ipynb", ("o", "x"))
    leftover, _ = desk.open("old.ipynb")
    desk.save("old.ipynb", "theirs", leftover)
    os.unlink(desk.path("old.ipynb"))
    desk.write("n.ipynb", ("n", "y"))
    id_, _ = desk.open("n.ipynb")
    desk.save("n.ipynb", "ours", id_)
    name, new = (name_for_notebook(desk.path(n)) for n in ("n.ipynb", "old.ipynb"))

    os.rename(desk.path("n.ipynb"), desk.path("old.ipynb"))
    told = notebook_identity.move(desk.store, name, new, desk.path("old.ipynb"))
    assert "-old-" in told[0]
    assert desk.open("old.ipynb") == (id_, ["ours"])
    # As a save ends that had begun before: it is published under the name that it knew.
    save = replace(desk.store.find(new), workspace=name, id="")
    late = desk.store.publish(replace(save, extra={"late": True}))
    settled = notebook_identity.settle(desk.store, late, id_)
    assert settled.workspace == new
    assert desk.store.ids(name) == []
    assert desk.store.find(new).extra == {"late": True}
    assert [n for n in desk.store.names(retired=True) if desk.store.retired(n)] == [
        told[0].split(" kept as ")[1].split()[0]
    ]


def test_moved_with_its_folder(desk: Desk, guest: Guest) -> None:
    """What the host and the sandbox have of a folder is still known when it has another name: a
    result that was mirrored before is written again, and is no conflict."""
    (desk.folder / "a").mkdir()
    desk.write("a/n.ipynb", ("n", "y"))
    desk.open("a/n.ipynb")
    name, new = (name_for_notebook(desk.path(n)) for n in ("a/n.ipynb", "b/n.ipynb"))
    (guest.folder / "result").write_text("1")
    guest.persist(desk.store, name)
    export(desk.store, name, desk.folder / "a", mirror=True)
    os.rename(desk.folder / "a", desk.folder / "b")
    notebook_identity.move(desk.store, name, new, desk.path("b/n.ipynb"))
    (guest.folder / "result").write_text("22")
    guest.persist(desk.store, new)
    report = export(desk.store, new, desk.folder / "b", mirror=True)
    assert (report.written, report.skipped) == (["result"], [])


def test_a_store_with_one_workspace_renamed_in_the_middle_of_a_save(
    desk: Desk, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is saved under the old name while it is moved is deleted."""
    desk.write("n.ipynb", ("n", "y"))
    id_, _ = desk.open("n.ipynb")
    name = name_for_notebook(desk.path("n.ipynb"))
    (guest.folder / "f").write_text("1")
    guest.persist(desk.store, name)
    copied = desk.store._copy_save

    def slow(save: SaveInfo, new: str, notebook: str) -> None:
        copied(save, new, notebook)
        monkeypatch.undo()
        (guest.folder / "f").write_text("22")
        guest.persist(desk.store, name)

    monkeypatch.setattr(desk.store, "_copy_save", slow)
    notebook_identity.move(desk.store, name, "new", desk.path("m.ipynb"))
    assert len(desk.store.ids("new")) == 2
    assert desk.store.ids(name) == []
    assert notebook_identity.place_of(desk.store, name, id_) == "new"
