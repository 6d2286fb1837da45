"""What a save keeps, what it leaves out, and what it costs."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from sandbox_kernel.errors import QuotaExceeded, WorkspaceError
from sandbox_kernel.guest.workspace.ignore_file import Rules
from sandbox_kernel.guest.workspace.scan import Scan
from sandbox_kernel.guest.workspace.scan_cache import Folder
from sandbox_kernel.guest.workspace.tree_format import CHUNK, PAGE_MOST, build_tree, pack, unpack
from sandbox_kernel.workspace.garbage import verify
from sandbox_kernel.workspace.imports import import_folder
from sandbox_kernel.workspace.reports import UploadPolicy
from sandbox_kernel.workspace.store import Store
from tests.workspace.conftest import NewGuest
from tests.workspace.guests import Guest, snapshot


def settle() -> None:
    """Files that were changed just now are read again next time; let some time pass."""
    time.sleep(0.15)


def test_everything_comes_back(store: Store, new_guest: NewGuest) -> None:
    """Contents, modes, times to the nanosecond, links, holes, empty folders and odd names."""
    guest, other = new_guest("one"), new_guest("two")
    root = guest.folder
    (root / "empty").mkdir(mode=0o700)
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "exact").write_bytes(os.urandom(CHUNK))
    (root / "deep" / "more").write_bytes(os.urandom(2 * CHUNK + 1))
    (root / "nothing").touch(mode=0o600)
    (root / "text").write_text("compressible " * 10_000)
    (root / "text").chmod(0o4755)
    os.utime(root / "text", ns=(1, 981173106_789_012_345))
    (root / "link").symlink_to("deep/er")
    (root / "broken").symlink_to("/nowhere/at all")
    os.link(root / "text", root / "deep" / "hard")
    Path(os.fsdecode(os.fsencode(root) + b"/not\xffutf8")).write_text("x")
    (root / "grüße \U0001f600\nline").write_text("x")
    (root / "e\u0301").write_text("decomposed")
    (root / "\u00e9").write_text("composed")
    (root / "Case").write_text("1")
    (root / "case").write_text("2")
    with (root / "sparse").open("wb") as file:
        file.seek(5 * CHUNK + 17)
        file.write(b"data")
        file.truncate(9 * CHUNK + 5)
    (root / "deep").chmod(0o550)
    assert guest.persist(store).problems == []
    report = other.hydrate(store)
    assert not report.problems
    assert snapshot(other.folder) == snapshot(root)
    assert (other.folder / "sparse").stat().st_blocks * 512 < 3 * CHUNK
    assert not other.persist(store).new
    assert verify(store).problems == []
    for folder in (root, other.folder):
        (folder / "deep").chmod(0o750)


def test_cost_of_a_change(store: Store, guest: Guest) -> None:
    """A change of one file costs that file, and little more; no change costs one message."""
    for number in range(300):
        (guest.folder / f"f{number}").write_bytes(os.urandom(5_000))
    settle()
    assert guest.persist(store).moved_bytes > 1_500_000
    settle()
    (guest.folder / "f7").write_bytes(os.urandom(300_000))
    changed = guest.persist(store)
    assert changed.moved_bytes < 1.05 * 300_000 + 20_000
    unchanged = guest.persist(store)
    assert not unchanged.new
    assert unchanged.moved_bytes < 1000
    assert len(store.saves("work")) == 2


def test_only_a_part_of_a_file_changes(store: Store, new_guest: NewGuest) -> None:
    """Of a large file the chunks that changed travel, both ways."""
    guest, other = new_guest("one"), new_guest("two")
    data = bytearray(os.urandom(8 * CHUNK))
    (guest.folder / "big").write_bytes(data)
    guest.persist(store)
    other.hydrate(store)
    data[3 * CHUNK] ^= 1
    (guest.folder / "big").write_bytes(data)
    assert guest.persist(store).moved_bytes < 1.1 * CHUNK
    assert other.hydrate(store).moved_bytes < 1.1 * CHUNK
    assert (other.folder / "big").read_bytes() == data


def test_a_row_is_inserted(store: Store, new_guest: NewGuest) -> None:
    """What follows an insertion stays, both ways: in the store, and in a sandbox that has it."""
    guest, other = new_guest("one"), new_guest("two")
    rows = "".join(f"{n},{n * n % 9973},{os.urandom(6).hex()}\n" for n in range(300_000)).encode()
    packed = len(pack(rows)[1])
    (guest.folder / "table.csv").write_bytes(rows)
    assert guest.persist(store).moved_bytes > 0.9 * packed
    other.hydrate(store)
    (guest.folder / "table.csv").write_bytes(b"a new row,0,0\n" + rows)
    assert guest.persist(store).moved_bytes < packed / 6
    assert other.hydrate(store).moved_bytes < packed / 6
    assert (other.folder / "table.csv").read_bytes() == b"a new row,0,0\n" + rows
    assert not other.persist(store).new


def test_zeros_are_alike_however_they_are_stored(store: Store, new_guest: NewGuest) -> None:
    """Chunks follow from the contents alone, so a copy with other holes is the same file."""
    guest, other = new_guest("one"), new_guest("two")
    data = b"begin" + bytes(3 * CHUNK) + os.urandom(CHUNK) + bytes(2 * CHUNK + 5)
    for one, seek in ((guest, False), (other, True)):
        with (one.folder / "file").open("wb") as file:
            if seek:
                file.write(b"begin")
                file.seek(3 * CHUNK + 5)
                file.write(data[3 * CHUNK + 5 : 4 * CHUNK + 5])
                file.truncate(len(data))
            else:
                file.write(data)
        os.utime(one.folder / "file", ns=(1, 1))
    assert (guest.folder / "file").read_bytes() == (other.folder / "file").read_bytes() == data
    first = guest.persist(store)
    assert first.moved_bytes < 3.1 * CHUNK
    second = other.persist(store, "elsewhere")
    assert second.save.root == first.save.root


def test_another_process_of_the_host(store: Store, guest: Guest) -> None:
    """A host that has never seen the sandbox needs hashes only, not the contents again."""
    for number in range(200):
        (guest.folder / f"f{number}").write_bytes(os.urandom(10_000))
    settle()
    guest.persist(store)
    (guest.folder / "f0").write_bytes(os.urandom(10_000))
    report = guest.persist(Store.open(store.url))
    assert report.new
    assert report.moved_bytes < 60_000


def test_another_store(store: Store, tmp_path: Path, guest: Guest) -> None:
    """A second store gets everything, although the sandbox has sent it to the first."""
    (guest.folder / "f").write_bytes(os.urandom(100_000))
    settle()
    guest.persist(store)
    other = Store.open(str(tmp_path / "second"))
    assert guest.persist(other).moved_bytes > 100_000
    assert verify(other).problems == []


def test_many_small_files_are_few_objects(store: Store, new_guest: NewGuest) -> None:
    """Thousands of files make a handful of files in the store."""
    guest = new_guest("one")
    for number in range(3000):
        (guest.folder / f"f{number}").write_text(str(number))
    guest.persist(store)
    assert sum(1 for path in Path(store.url).rglob("*") if path.is_file()) < 10
    other = new_guest("two")
    other.hydrate(store)
    assert snapshot(other.folder) == snapshot(guest.folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_files(store: Store, new_guest: NewGuest) -> None:
    """And so do a hundred thousand."""
    guest, other = new_guest("one"), new_guest("two")
    for number in range(100_000):
        folder = guest.folder / str(number // 1000)
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_text(str(number))
    report = guest.persist(store)
    assert report.save.files == 100_000
    assert sum(1 for path in Path(store.url).rglob("*") if path.is_file()) < 20
    other.hydrate(store)
    assert snapshot(other.folder) == snapshot(guest.folder)


def test_a_huge_sparse_file(store: Store, new_guest: NewGuest) -> None:
    """A terabyte that is mostly holes costs what is in it."""
    guest, other = new_guest("one"), new_guest("two")
    with (guest.folder / "huge").open("wb") as file:
        file.truncate(2**40)
        file.seek(2**39)
        file.write(b"middle")
    report = guest.persist(store)
    assert report.moved_bytes < 1.1 * CHUNK
    other.hydrate(store)
    with (other.folder / "huge").open("rb") as file:
        assert os.fstat(file.fileno()).st_size == 2**40
        file.seek(2**39)
        assert file.read(10) == b"middle" + bytes(4)


def test_times_out_of_this_world(store: Store) -> None:
    """A file system in memory takes any time; what cannot be saved becomes the nearest that can."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        guest = Guest(Path(memory) / "w")
        try:
            for name, when in (("far", 2**40), ("past", -(2**40)), ("now", 10**9)):
                (guest.folder / name).write_text(name)
                os.utime(guest.folder / name, (when, when))
            save = guest.persist(store).save
            times = {path: entry.mtime for path, entry in store.files(save)}
            assert times == {"far": 2**63 - 1, "past": -(2**63), "now": 10**18}
            settle()
            assert not guest.persist(store).new
            (guest.folder / "now").write_text("later")
            assert guest.persist(store).new
        finally:
            guest.close()


def test_special_files_are_listed(store: Store, guest: Guest) -> None:
    """What cannot be saved is left out, and said so."""
    os.mkfifo(guest.folder / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        where = os.getcwd()
        os.chdir(guest.folder)
        try:
            sock.bind("socket")
        finally:
            os.chdir(where)
        (guest.folder / "kept").write_text("x")
        report = guest.persist(store)
    assert sorted(report.problems) == [
        "pipe: a named pipe; not saved",
        "socket: a socket; not saved",
    ]
    assert [path for path, _ in store.files(report.save)] == ["kept"]


def test_permission_errors_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or folder that cannot be read does not keep the others from being saved."""
    (tmp_path / "locked").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "open").write_text("y")
    real = os.open

    def refuse(path: object, *args: object, **kwargs: object) -> int:
        if path in (b"secret", b"locked"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)

    class Nothing:
        def add(self, *_: object) -> None: ...
        def progress(self, files: int, size: int) -> None: ...

    cache = Folder()
    scan = Scan(cache, Rules(()), Nothing(), full=False, max_files=100, max_bytes=100)
    scan.run(str(tmp_path))
    assert sorted(scan.problems) == ["locked: Permission denied", "secret: Permission denied"]
    assert list(cache.items) == ["open"]


def test_files_that_change_while_they_are_read(store: Store, guest: Guest) -> None:
    """A file under constant change is saved as it was read, and marked; the rest is exact."""
    (guest.folder / "calm").write_bytes(os.urandom(1000))
    path = guest.folder / "log"
    stop = threading.Event()

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            while not stop.is_set():
                file.write(os.urandom(1000))
                if file.tell() > 20_000_000:
                    file.seek(0)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        reports = [guest.persist(store) for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    assert any("log: kept changing" in p for report in reports for p in report.problems)
    settle()
    assert guest.persist(store).problems == []
    assert verify(store).problems == []


def test_ignored(store: Store, guest: Guest) -> None:
    """Caches are never saved; .sandboxignore has git's syntax, and counts when it changes."""
    root = guest.folder
    for path in (
        "__pycache__/a.pyc",
        "a/.ipynb_checkpoints/x",
        "big.tmp",
        "keep.tmp",
        "a/out/x",
        "b",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)

    def saved() -> list[str]:
        save = guest.persist(store).save
        return [path for path, entry in store.files(save) if entry.kind == "f"]

    assert saved() == ["a/out/x", "b", "big.tmp", "keep.tmp"]
    (root / ".sandboxignore").write_text("# temporary\n*.tmp\n!keep.tmp\n/a/out/\n!__pycache__/\n")
    assert saved() == [".sandboxignore", "__pycache__/a.pyc", "b", "keep.tmp"]
    (root / ".sandboxignore").unlink()
    assert saved() == ["a/out/x", "b", "big.tmp", "keep.tmp"]
    # What is ignored is not deleted when a save is brought in.
    guest.hydrate(store, at=store.saves("work")[0].id)
    assert (root / "__pycache__" / "a.pyc").exists()


def test_an_ignore_file_that_cannot_be_obeyed(guest: Guest, store: Store) -> None:
    """A .sandboxignore that is too long, or cannot be read, might exclude what would be taken: the
    save in the sandbox, and the upload from the host, are refused, and name the file. So is a
    symlink, which would lead nowhere in the sandbox, and a file in UTF-16, whose lines match
    nothing. One whose patterns are not UTF-8, or that begins with a byte order mark, is obeyed."""
    secret = os.fsencode(guest.folder) + b"/secret-\xff"
    Path(os.fsdecode(secret)).write_text("secret")
    path = guest.folder / ".sandboxignore"

    def refuses(why: str) -> None:
        with pytest.raises(WorkspaceError, match=rf"\.sandboxignore cannot be obeyed \(({why})"):
            guest.persist(store)
        with pytest.raises(WorkspaceError, match=rf"\.sandboxignore cannot be obeyed \(({why})"):
            import_folder(store, "work", guest.folder)
        assert store.latest("work") is None

    path.write_bytes(b"#" * 70_000 + b"\nsecret-*\n")
    refuses("it has more than 65536 bytes")
    path.unlink()
    path.mkdir()
    refuses("it is not a regular file")
    path.rmdir()
    os.mkfifo(path)
    refuses("it is not a regular file")
    path.unlink()
    for target in ("elsewhere", "secret-link"):
        (guest.folder / "secret-link").touch()
        path.symlink_to(target)
        refuses("it is a symlink")
        path.unlink()
    (guest.folder / "secret-link").unlink()
    path.write_text("secret-*\n", encoding="utf-16")
    refuses("it is not UTF-8 text")
    path.write_bytes(b"\xef\xbb\xbfsecret-\xff\n")
    save = guest.persist(store).save
    assert [name for name, _ in store.files(save)] == [".sandboxignore"]
    for policy in (UploadPolicy("folder"), UploadPolicy("folder", hidden=True)):
        save = import_folder(store, "from-host", guest.folder, policy=policy).save
        assert [name for name, _ in store.files(save)] == [".sandboxignore"]


def test_quotas(store: Store, guest: Guest) -> None:
    """Too many bytes or files are refused, with the biggest offenders, before anything is sent."""
    (guest.folder / "small").write_text("x")
    (guest.folder / "data").mkdir()
    (guest.folder / "data" / "huge.bin").write_bytes(bytes(5_000_000))
    with pytest.raises(QuotaExceeded, match=r"Biggest: data/huge.bin \(500") as refused:
        guest.persist(store, max_bytes=1_000_000)
    assert "small (" in str(refused.value)
    for number in range(50):
        (guest.folder / "data" / f"f{number}").touch()
    with pytest.raises(QuotaExceeded, match=r"Biggest: data/ \(51\)"):
        guest.persist(store, max_files=20)
    assert guest.persist(store).new
    (guest.folder / "data" / "more").write_bytes(bytes(5_000_000))
    with pytest.raises(QuotaExceeded, match=r"huge\.bin"):
        guest.persist(store, max_bytes=6_000_000)
    assert len(store.saves("work")) == 1


def test_a_full_disk_in_the_sandbox_is_told(store: Store, guest: Guest) -> None:
    """An error while files are written comes to the host with its reason."""
    (guest.folder / "f").write_text("x")
    guest.persist(store)
    (guest.folder / "f").unlink()
    guest.folder.rename(guest.folder.parent / "gone")
    with pytest.raises(WorkspaceError, match="No such file"):
        guest.hydrate(store)
    (guest.folder.parent / "gone").rename(guest.folder)
    guest.hydrate(store)
    assert (guest.folder / "f").read_text() == "x"


def test_a_large_folder_changes_by_pages() -> None:
    """Where the pages of a folder begin depends on its names only."""
    entries = [(b"%06d" % n, b'["%06d","l",0,"x"]' % n) for n in range(5000)]
    _, before = build_tree(entries)
    assert all(len(data) < 40 * PAGE_MOST for _, data in before)
    entries[2500] = (entries[2500][0], b'["002500","l",0,"y"]')
    del entries[10]
    _, after = build_tree(entries)
    assert len(dict(after).keys() - dict(before).keys()) <= 3
    long = [(b"%06d" % n, b"x" * 300_000) for n in range(100)]
    assert all(len(data) < 2**21 for _, data in build_tree(long)[1])


def test_codecs() -> None:
    """Data that gets smaller is compressed, other data is not; both come back within a bound."""
    for data in (b"", b"x", b"compress me " * 1000, os.urandom(10_000)):
        codec, packed = pack(data)
        assert bytes(unpack(codec, packed, len(data))) == data
    assert pack(b"a" * 10_000)[0] == 1
    assert pack(os.urandom(10_000))[0] == 0
    with pytest.raises(ValueError, match="more than"):
        unpack(*pack(b"a" * 10_000), 9_999)


def test_mode_of_what_is_written(store: Store, new_guest: NewGuest) -> None:
    """Only a changed mode or time costs no contents."""
    guest, other = new_guest("one"), new_guest("two")
    (guest.folder / "f").write_bytes(os.urandom(100_000))
    guest.persist(store)
    other.hydrate(store)
    (guest.folder / "f").chmod(0o600)
    assert guest.persist(store).moved_bytes < 5_000
    report = other.hydrate(store)
    assert report.moved_bytes < 10_000
    assert stat.S_IMODE((other.folder / "f").stat().st_mode) == 0o600
    assert snapshot(other.folder) == snapshot(guest.folder)
