"""What comes from a sandbox is hostile: a table of attacks, each refused, with nothing written."""

from __future__ import annotations

import json
import os
import stat
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_kernel.errors import (
    ExportConflict,
    QuotaExceeded,
    SandboxError,
    WorkspaceError,
    WorkspaceRefused,
)
from sandbox_kernel.guest.workspace.messages import HEADER, Kind, Messages, Stalled
from sandbox_kernel.guest.workspace.tree_format import CHUNK, CHUNK_KIND, TREE_KIND, digest
from sandbox_kernel.workspace.export_guard import stays_inside
from sandbox_kernel.workspace.exports import export
from sandbox_kernel.workspace.garbage import verify
from sandbox_kernel.workspace.host_folder import HostFolder
from sandbox_kernel.workspace.store import Store
from tests.workspace.guests import Guest, snapshot
from tests.workspace.hostile import (
    ATTACKS,
    DATA,
    HASH,
    Liar,
    Trees,
    file,
    offer,
    page,
    plant,
    result,
    send_all,
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder next to the one that is exported to, whose contents must not change."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "passwd").write_text("untouched")
    return tmp_path / "outside"


def test_the_table_is_long() -> None:
    assert len(ATTACKS) + len(WIRE) >= 30


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_tree_is_not_saved(attack: str, store: Store) -> None:
    """A sandbox that sends such a tree gets nothing into the store's history."""
    trees = Trees()
    ATTACKS[attack](trees)

    def script(messages: Messages) -> None:
        send_all(messages, *dict.fromkeys(trees.objects))
        result(messages, digest(trees.objects[-1][1]).hex())

    with pytest.raises(WorkspaceError, match="Sandbox 'liar' sent"):
        Liar(script).persist(store)
    assert store.latest("work") is None


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_save_is_not_written(
    attack: str, store: Store, tmp_path: Path, outside: Path
) -> None:
    """Even if such a tree stood in the store, nothing of it would reach the host or a sandbox."""
    trees = Trees()
    ATTACKS[attack](trees)
    plant(store, "work", trees)
    target = tmp_path / "target"
    with pytest.raises(WorkspaceError):
        export(store, "work", target)
    assert not target.exists()
    assert snapshot(outside).keys() == {"passwd"}


def _bomb(messages: Messages) -> None:
    data = bytes(64 * 2**20)
    offer(messages, (CHUNK_KIND, data))
    messages.send(Kind.OBJECT, b"\1", zlib.compress(data))


def _other_hash(messages: Messages) -> None:
    offer(messages, (CHUNK_KIND, b"what was offered"))
    messages.send(Kind.OBJECT, b"\0", b"what was not")


def _truncated(messages: Messages) -> None:
    offer(messages, (CHUNK_KIND, DATA * 100))
    messages.send(Kind.OBJECT, b"\1", zlib.compress(DATA * 100)[:-8])


def _codec(messages: Messages) -> None:
    offer(messages, (CHUNK_KIND, DATA))
    messages.send(Kind.OBJECT, b"\7", DATA)


def _flood(messages: Messages) -> None:
    for number in range(200):
        send_all(messages, (CHUNK_KIND, number.to_bytes(4, "big") + bytes(CHUNK - 4)))


def _chunk_never_sent(messages: Messages) -> None:
    tree = page(file("x"))
    send_all(messages, (TREE_KIND, tree))
    result(messages, digest(tree).hex())


def _chunk_of_another_length(messages: Messages) -> None:
    tree = page(file("x", "f", 0o644, 0, 5, [HASH]))
    send_all(messages, (CHUNK_KIND, DATA), (TREE_KIND, tree))
    result(messages, digest(tree).hex())


def _chunk_as_tree(messages: Messages) -> None:
    tree = page()
    send_all(messages, (CHUNK_KIND, tree))
    result(messages, digest(tree).hex())


def _small_trees(messages: Messages) -> None:
    """Half a mebibyte of trees that would unpack to half a gibibyte."""
    for number in range(64):
        tree = b'{"entries": []}' + b" " * (8 * 2**20 - 100) + b"%d" % number
        offer(messages, (TREE_KIND, tree))
        messages.send(Kind.OBJECT, b"\1", zlib.compress(tree, 9))


def _offers_without_end(messages: Messages) -> None:
    """Of what is gone when it is asked for: nothing is sent, and nothing adds up."""
    for number in range(10_000):
        hashes = (digest(b"%d %d" % (number, n)) for n in range(100))
        messages.send(Kind.OFFER, b"".join(b"\0" + hash_ for hash_ in hashes))
        messages.receive()
        for _ in range(100):
            messages.send(Kind.OBJECT, b"\xff")


def _ignores_without_end(messages: Messages) -> None:
    for number in range(1000):
        messages.send(Kind.IGNORE, b"*.%d" % number)
        messages.receive()


WIRE: dict[str, Callable[[Messages], None]] = {
    "object that was not asked for": lambda m: m.send(Kind.OBJECT, b"\0", DATA),
    "object with another hash": _other_hash,
    "compressed bomb": _bomb,
    "compressed data cut off": _truncated,
    "unknown codec": _codec,
    "more than the quota": _flood,
    "tree that was never sent": lambda m: result(m, "ab" * 32),
    "chunk that was never sent": _chunk_never_sent,
    "chunk of another length": _chunk_of_another_length,
    "chunk taken for a tree": _chunk_as_tree,
    "root that is no hash": lambda m: result(m, "../../etc"),
    "result without a root": lambda m: m.send_json(Kind.RESULT, {}),
    "result that is no JSON": lambda m: m.send(Kind.RESULT, b"\xff"),
    "result that is a list": lambda m: m.send(Kind.RESULT, b"[]"),
    "result nested without end": lambda m: m.send(Kind.RESULT, b"[" * 100_000),
    "half an offer": lambda m: m.send(Kind.OFFER, b"\0" * 50),
    "offer of an unknown kind": lambda m: m.send(Kind.OFFER, b"\5" + bytes(32)),
    "offer without end": lambda m: m.send(Kind.OFFER, bytes(33 * 10_000)),
    "message of four gigabytes": lambda m: m.sock.sendall(HEADER.pack(2**32 - 1, Kind.RESULT)),
    "message of an unknown kind": lambda m: m.send(200, b""),
    "message of the host's": lambda m: m.send(ord("P"), b"{}"),
    "small trees that become large": _small_trees,
    "offers without end": _offers_without_end,
    "ignore files without end": _ignores_without_end,
}


@pytest.mark.parametrize("attack", WIRE)
def test_a_lying_guest_is_refused(attack: str, store: Store) -> None:
    """Whatever a sandbox says on the wire, it ends with a clear error and an unchanged store."""
    with pytest.raises(WorkspaceRefused, match="Sandbox 'liar' sent"):
        Liar(WIRE[attack]).persist(store, max_bytes=10 * 2**20, max_files=1000)
    assert store.latest("work") is None
    assert verify(store).problems == []


END: dict[str, Callable[[Messages], None]] = {
    "result that is no JSON": lambda m: m.send(Kind.RESULT, b"\xff"),
    "result that is a list": lambda m: m.send(Kind.RESULT, b"[]"),
    "result nested without end": lambda m: m.send(Kind.RESULT, b"[" * 100_000),
    "result without a root": lambda m: m.send_json(Kind.RESULT, {}),
    "root that is no hash": lambda m: result(m, "../../etc"),
    "problems that are a number": lambda m: m.send_json(Kind.RESULT, {"tree": "", "problems": 5}),
    "failure that is no JSON": lambda m: m.send(Kind.FAILED, b"\0"),
    "failure that is text": lambda m: m.send(Kind.FAILED, b'"no"'),
    "message of four gigabytes": lambda m: m.sock.sendall(HEADER.pack(2**32 - 1, Kind.RESULT)),
    "message of an unknown kind": lambda m: m.send(200, b"{}"),
    "another offer": lambda m: m.send(Kind.OFFER, b"\0" * 33),
}


@pytest.mark.parametrize("attack", END)
def test_a_lying_guest_is_refused_when_it_gets_files(
    attack: str, store: Store, guest: Guest
) -> None:
    (guest.folder / "file").write_text("contents")
    guest.persist(store)
    with pytest.raises(WorkspaceRefused, match="Sandbox 'liar' sent an invalid result"):
        Liar(END[attack]).hydrate(store)


@pytest.mark.parametrize(
    "note",
    [
        lambda n: {"files": 0, "bytes": 0},
        lambda n: {"files": n, "bytes": n},
        lambda n: {"files": 10**12, "bytes": 10**15 + n},
    ],
    ids=["nothing", "hardly anything", "more than there can be"],
)
def test_notes_do_not_keep_a_save_alive(note: Callable[[int], object], store: Store) -> None:
    """A sandbox that says for ever that it is at work, and offers nothing, is not waited for any
    longer than one that is silent; nor is one in which the scan gets on by a file a second."""
    sent = 0

    def script(messages: Messages) -> None:
        nonlocal sent
        while True:
            sent += 1
            messages.send_json(Kind.NOTE, note(sent))
            time.sleep(0.01)

    with pytest.raises(Stalled, match="no progress"):
        Liar(script).persist(store, patience=0.5)
    assert sent > 10
    assert store.latest("work") is None


def test_holes_are_not_free(store: Store) -> None:
    """Ten thousand files of a gibibyte each that hold nothing fit any disk, but whoever copies or
    looks through them as they seem is busy for long: there is a bound, told as a quota."""
    tree = page(*(file(f"f{n:05}", "f", 0o644, 0, 2**30, [1024]) for n in range(10_000)))

    def script(messages: Messages) -> None:
        send_all(messages, (TREE_KIND, tree))
        result(messages, digest(tree).hex())

    with pytest.raises(QuotaExceeded, match="with their holes"):
        Liar(script).persist(store, max_bytes=2**30)
    assert Liar(script).persist(store, max_bytes=2**38).new


def test_numbers_that_cannot_be(store: Store, guest: Guest) -> None:
    """They are only told to people, so they are nothing to fail for."""
    (guest.folder / "file").write_text("contents")
    root = guest.persist(store).save.root
    numbers = {"files": 1e400, "deleted": -1}
    lie = Liar(lambda m: m.send_json(Kind.RESULT, {"tree": root, "problems": [], **numbers}))
    report = lie.hydrate(store)
    assert (report.files, report.deleted) == (0, 0)


def test_one_workspace_learns_nothing_of_another(store: Store) -> None:
    """The host asks for contents that the store has from another workspace as if it had not, and
    a tree that names them without sending them is refused."""

    def honest(messages: Messages) -> None:
        tree = page(file("secret"))
        send_all(messages, (CHUNK_KIND, DATA), (TREE_KIND, tree))
        result(messages, digest(tree).hex())

    assert Liar(honest).persist(store, "theirs").new
    answers: list[bytes] = []

    def curious(messages: Messages) -> None:
        answers.append(offer(messages, (CHUNK_KIND, DATA)))
        messages.send(200, b"")

    with pytest.raises(SandboxError):
        Liar(curious).persist(store, "mine")
    assert answers == [b"\1"]
    with pytest.raises(WorkspaceRefused):
        Liar(_chunk_never_sent).persist(store, "mine")


def test_words_of_a_sandbox_cannot_drive_a_terminal(store: Store) -> None:
    """Problems and errors that a sandbox reports are bounded, and printable."""
    tree = page()

    def script(messages: Messages) -> None:
        send_all(messages, (TREE_KIND, tree))
        result(messages, digest(tree).hex(), problems=["\x1b[2J" * 1000] * 1000, problem_count=9)

    problems = Liar(script).persist(store).problems
    assert len(problems) <= 201
    assert all(len(p) < 3000 and "\x1b" not in p for p in problems)

    def fails(messages: Messages) -> None:
        value = {"kind": "quota", "message": "\x1b[31m" * 10_000, "offenders": [[1, 2], 3, [4]]}
        messages.send_json(ord("E"), value)

    with pytest.raises(WorkspaceError) as refused:
        Liar(fails).persist(store)
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value)) < 10_000


# --- on the host's disk


def test_symlinks_do_not_lead_out(store: Store, tmp_path: Path, outside: Path) -> None:
    """Of symlinks only those that stay in the folder are exported; the others are listed."""
    inner = Trees()
    sub = page(["fine", "l", 0, "../kept"], ["worse", "l", 0, "../../outside/passwd"])
    inner.add(sub)
    inner.add(
        page(
            ["absolute", "l", 0, str(outside / "passwd")],
            ["kept", *file("")[1:]],
            ["sub", "d", 0o755, 0, digest(sub).hex()],
            ["tricky", "l", 0, "sub/../../outside"],
            ["up", "l", 0, "../outside"],
        )
    )
    plant(store, "work", inner)
    target = tmp_path / "target"
    report = export(store, "work", target)
    assert sorted(os.listdir(target)) == ["kept", "sub"]
    assert os.listdir(target / "sub") == ["fine"]
    assert len(report.skipped) == 4


def test_symlinks_do_not_lead_to_what_is_hidden(store: Store, tmp_path: Path) -> None:
    """`results.csv -> .ssh/authorized_keys`: who then writes to results.csv on the host, writes
    there. Neither directly, nor through other links, of the save or of the host, does a symlink
    lead to a hidden name; a hard link to one comes as a file of its own."""
    trees = Trees()
    sub = page(["deep", "l", 0, "../.ssh/config"], ["fine", "l", 0, "../kept"])
    trees.add(sub)
    ssh = page(file("authorized_keys"))
    trees.add(ssh)
    trees.add(
        page(
            [".ssh", "d", 0o755, 0, digest(ssh).hex()],
            ["hard", "h", ".ssh/authorized_keys"],
            ["kept", *file("")[1:]],
            ["later", "l", 0, "results.csv"],
            ["loop", "l", 0, "loop"],
            ["middle", "l", 0, "sub/../.ssh"],
            ["out-by-host", "l", 0, "host-out/passwd"],
            ["results.csv", "l", 0, ".ssh/authorized_keys"],
            ["sub", "d", 0o755, 0, digest(sub).hex()],
            ["through", "l", 0, "./way/authorized_keys"],
            ["to-nothing", "l", 0, "sub/nothing.txt"],
            ["via-host", "l", 0, "host-link/authorized_keys"],
            ["way", "l", 0, ".ssh"],
        )
    )
    plant(store, "work", trees)
    target = tmp_path / "target"
    (target / ".ssh").mkdir(parents=True)
    (target / ".ssh" / "authorized_keys").write_text("the host's")
    (target / "host-link").symlink_to(".ssh")
    (target / "host-out").symlink_to(tmp_path)
    report = export(store, "work", target, mirror=True)
    assert sorted(report.written) == ["hard", "kept", "sub/fine", "to-nothing"]
    left_out = {line.split(":")[0] for line in report.skipped}
    assert left_out == {
        *(".ssh", "later", "loop", "middle", "out-by-host", "results.csv", "sub/deep"),
        *("through", "via-host", "way"),
    }
    (target / "hard").write_text("written by the user")
    assert (target / ".ssh" / "authorized_keys").read_text() == "the host's"
    assert (target / "hard").stat().st_nlink == 1


@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        ("a", "b", True),
        ("a", "b/c", True),
        ("a", "..", False),
        ("a", "/etc", False),
        ("a/b", "..", True),
        ("a/b", "../c", True),
        ("a/b", "../..", False),
        ("a", "s/../x", False),
        ("a/b/c", ".././../x", True),
    ],
)
def test_stays_inside(path: str, target: str, inside: bool) -> None:
    assert stays_inside(path, target) is inside


def simple(store: Store) -> None:
    trees = Trees()
    sub = page(file("inner"))
    trees.add(sub)
    setuid = [*file("setuid")]
    setuid[2] = 0o6777
    trees.add(page(file("plain"), setuid, ["sub", "d", 0o777, 0, digest(sub).hex()]))
    plant(store, "work", trees)


def test_no_write_through_a_symlink_on_the_host(
    store: Store, tmp_path: Path, outside: Path
) -> None:
    """A symlink that lies in the target is never followed: neither as a folder nor as a file."""
    simple(store)
    target = tmp_path / "target"
    target.mkdir()
    (target / "sub").symlink_to(outside)
    with pytest.raises(WorkspaceRefused, match="sub"):
        export(store, "work", target, overwrite=True)
    assert os.listdir(target) == ["sub"]
    (target / "sub").unlink()
    (target / "plain").symlink_to(outside / "passwd")
    with pytest.raises(ExportConflict, match="plain"):
        export(store, "work", target)
    export(store, "work", target, overwrite=True)
    assert (target / "plain").read_bytes() == DATA
    assert not (target / "plain").is_symlink()
    assert (outside / "passwd").read_text() == "untouched"
    assert os.listdir(outside) == ["passwd"]


def test_a_pipe_in_the_way(store: Store, tmp_path: Path) -> None:
    """A named pipe in the target neither hangs the export nor is written to."""
    simple(store)
    target = tmp_path / "target"
    target.mkdir()
    os.mkfifo(target / "plain")
    with pytest.raises(ExportConflict):
        export(store, "work", target)


def test_modes_on_the_host(store: Store, tmp_path: Path) -> None:
    """No set-user-id, and nothing that others could write, comes out of a sandbox."""
    simple(store)
    export(store, "work", tmp_path / "target")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "target").iterdir()}
    assert modes == {"plain": 0o644, "setuid": 0o755, "sub": 0o755}


def test_names_that_are_one_file_elsewhere(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system ignores case or normalization, colliding names are refused; where it
    does not, they are different files."""
    trees = Trees()
    trees.add(page(file("File"), file("file")))
    plant(store, "case", trees)
    trees = Trees()
    trees.add(page(file("e\u0301"), file("\u00e9")))
    plant(store, "form", trees)
    for name in ("case", "form"):
        assert len(export(store, name, tmp_path / name).written) == 2
    monkeypatch.setattr(HostFolder, "folds_names", lambda folder: True)
    for name in ("case", "form"):
        with pytest.raises(WorkspaceRefused, match="same file"):
            export(store, name, tmp_path / f"{name}2")
        assert os.listdir(tmp_path / f"{name}2") == []


def test_hydrate_does_not_write_through_symlinks(
    store: Store, guest: Guest, tmp_path: Path, outside: Path
) -> None:
    """In a sandbox, too, a symlink in the way is replaced, not followed."""
    simple(store)
    (guest.folder / "sub").symlink_to(outside)
    (guest.folder / "plain").symlink_to(outside / "passwd")
    guest.hydrate(store)
    assert (guest.folder / "sub" / "inner").read_bytes() == DATA
    assert not (guest.folder / "sub").is_symlink()
    assert (guest.folder / "plain").read_bytes() == DATA
    assert snapshot(outside)["passwd"][3] == b"untouched"


def test_a_damaged_store_is_not_trusted(store: Store, guest: Guest, tmp_path: Path) -> None:
    """A bit that flipped in a pack, or a save that was edited, is noticed when it is read."""
    (guest.folder / "a").write_bytes(os.urandom(5000))
    save = guest.persist(store).save
    pack = next(Path(store.url, "packs").iterdir())
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    fresh = Store.open(store.url)
    assert verify(fresh).problems
    with pytest.raises(SandboxError, match="damaged"):
        export(fresh, "work", tmp_path / "target")
    path = Path(store.url, "workspaces", "work", "saves", f"{save.id}.json")
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "files": 7}))
    with pytest.raises(SandboxError, match="damaged"):
        fresh.latest("work")
