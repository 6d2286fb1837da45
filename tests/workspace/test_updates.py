"""What changes beside a notebook comes into its workspace at the next start."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sandbox_kernel.workspace.exports import export
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.reports import UpdateReport, UploadPolicy
from sandbox_kernel.workspace.store import Store
from sandbox_kernel.workspace.updates import update_from_folder
from tests.workspace.guests import Guest

ALL = UploadPolicy("folder")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a notebook."""
    (tmp_path / "nb" / "sub").mkdir(parents=True)
    for name in ("n.ipynb", "both", "host", "ours", "gone", "kept", "sub/inner"):
        (tmp_path / "nb" / name).write_text(f"first {name}")
    return tmp_path / "nb"


def update(store: Store, folder: Path, policy: UploadPolicy = ALL) -> UpdateReport:
    return update_from_folder(store, "work", folder, policy, notebook=str(folder / "n.ipynb"))


def contents(folder: Path) -> dict[str, str]:
    files = [p for p in folder.rglob("*") if p.is_file() and ".sandbox-kernel-" not in str(p)]
    return {str(p.relative_to(folder)): p.read_text() for p in files}


def test_what_the_host_has_changed(store: Store, guest: Guest, folder: Path) -> None:
    """New, changed and deleted files of the host come in. What both have changed stays as the
    sandbox has it, and is named; what only the sandbox has changed stays, too. A second start has
    nothing to do but to name the conflict again."""
    import_folder(store, "work", folder, policy=ALL)
    guest.hydrate(store)
    for name in ("both", "ours", "n.ipynb", "result"):
        (guest.folder / name).write_text(f"by the sandbox {name}")
    (guest.folder / "kept").unlink()
    guest.persist(store)
    for name in ("both", "host", "n.ipynb", "new/deep"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"by the host {name}")
    (folder / "gone").unlink()
    (folder / ".env").write_text("secret")

    report = update(store, folder)
    assert sorted(report.taken) == ["host", "n.ipynb", "new", "new/deep"]
    assert (report.deleted, report.conflicts) == (["gone"], ["both"])
    guest.hydrate(store)
    expected = {
        "both": "by the sandbox both",
        "host": "by the host host",
        "n.ipynb": "by the host n.ipynb",
        "new/deep": "by the host new/deep",
        "ours": "by the sandbox ours",
        "result": "by the sandbox result",
        "sub/inner": "first sub/inner",
    }
    assert contents(guest.folder) == expected
    again = update(store, folder)
    assert (again.taken, again.deleted, again.conflicts) == ([], [], ["both"])
    assert again.save.id == report.save.id
    # The way back still knows who has changed what.
    written = export(store, "work", folder, mirror=True)
    assert sorted(written.written) == ["ours", "result"]
    assert [line.split(":")[0] for line in written.skipped] == ["both"]
    assert (folder / "both").read_text() == "by the host both"
    # The way out: who deletes the file in the sandbox gets the host's.
    (guest.folder / "both").unlink()
    guest.persist(store)
    assert update(store, folder).taken == ["both"]


def test_results_are_not_taken_for_the_hosts(store: Store, guest: Guest, folder: Path) -> None:
    """A mirror wrote results; the user tidies them away, and changes one: the workspace keeps the
    first, and takes the change. What globs do not choose is not taken for deleted."""
    import_folder(store, "work", folder, policy=UploadPolicy("globs", ("h*", "k*")))
    guest.hydrate(store)
    for name in ("result", "table"):
        (guest.folder / name).write_text(name)
    guest.persist(store)
    export(store, "work", folder, mirror=True)
    (folder / "result").unlink()
    (folder / "table").write_text("edited")
    report = update(store, folder, UploadPolicy("globs", ("h*", "t*")))
    assert (report.taken, report.deleted, report.conflicts) == (["table"], [], [])
    guest.hydrate(store)
    assert sorted(contents(guest.folder)) == ["host", "kept", "result", "table"]
    # It is the host's now, so no deletion in the sandbox deletes it.
    for name in ("result", "table"):
        (guest.folder / name).unlink()
    guest.persist(store)
    assert export(store, "work", folder, mirror=True, delete=True).deleted == []
    assert (folder / "table").read_text() == "edited"


def test_names_that_cannot_be_together(store: Store, guest: Guest, folder: Path) -> None:
    """Where one has a file and the other a folder, and where hard links were: nothing is lost."""
    os.link(folder / "host", folder / "linked")
    import_folder(store, "work", folder, policy=ALL)
    guest.hydrate(store)
    (guest.folder / "place").write_text("a file")
    (guest.folder / "more").mkdir()
    (guest.folder / "more" / "x").write_text("x")
    guest.persist(store)
    (folder / "place").mkdir()
    (folder / "place" / "inner").write_text("in a folder")
    (folder / "more").write_text("a file")
    (folder / "host").unlink()
    report = update(store, folder)
    assert sorted(report.conflicts) == ["more", "place", "place/inner"]
    guest.hydrate(store)
    found = contents(guest.folder)
    assert (found["place"], found["more/x"]) == ("a file", "x")
    assert found["linked"] == "first host"
    assert "host" not in found


def test_what_cannot_be_seen_is_not_gone(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder beside the notebook cannot be read at one start (permissions, a share that is not
    there): what it has is not taken for deleted. A folder that a file has replaced is."""
    import_folder(store, "work", folder, policy=ALL)
    opened = os.open

    def refused(path: object, *rest: object, **more: object) -> int:
        if path in ("sub", b"sub"):
            raise PermissionError(errno.EACCES, "Permission denied", "sub")
        return opened(path, *rest, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        report = update(store, folder)
        assert (report.taken, report.deleted) == ([], [])
        assert any(problem.startswith("sub: ") for problem in report.problems)
    (folder / "sub" / "inner").unlink()
    (folder / "sub").rmdir()
    (folder / "sub").symlink_to("elsewhere")
    assert update(store, folder).deleted == ["sub/inner"]


def test_only_what_has_changed_is_read(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with much data does not cost its reading at every start."""
    for name in ("kept", "host"):
        os.utime(folder / name, (10**9, 10**9))
    import_folder(store, "work", folder, policy=ALL)
    (folder / "host").write_text("by the host!")
    read: list[str] = []
    opened = os.open

    def watched(path: object, *rest: object, **more: object) -> int:
        read.append(os.fsdecode(path) if isinstance(path, (str, bytes)) else "")
        return opened(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", watched)
    assert update(store, folder).taken == ["host"]
    assert "host" in read
    assert "kept" not in read
