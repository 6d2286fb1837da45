"""A scan that remembers the last one finds what a fresh one finds, whatever has happened since."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sandbox_kernel.guest.workspace import parallel_stat
from sandbox_kernel.guest.workspace.ignore_file import Rules
from sandbox_kernel.guest.workspace.scan import Scan
from sandbox_kernel.guest.workspace.scan_cache import Folder

RULES = Rules([(r"^(?:.+/)?ignored$", True)])
FOLDERS, FILES = 30, 80
"""More files than ``glance`` thinks to be worth other processes."""


class Nowhere:
    """A Sink for a scan that is only to know."""

    def add(self, *_: object) -> None: ...
    def progress(self, files: int, size: int) -> None: ...


def scan(root: Path, cache: Folder) -> tuple[str, list[str]]:
    """The tree's hash, and what could not be saved."""
    made = Scan(cache, RULES, Nowhere(), full=False, max_files=10**6, max_bytes=10**9)
    return made.run(str(root)).hex(), sorted(made.problems)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for number in range(FOLDERS):
        folder = root / f"d{number % 10}" / f"e{number}"
        folder.mkdir(parents=True)
        for file in range(FILES):
            (folder / f"f{file}").write_bytes(b"%d" % file)
    return root


def settle(root: Path) -> None:
    """As if all of it had been there for long: what has just changed is read again anyway."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in (*names, "."):
            os.utime(os.path.join(folder, name), ns=(10**18, 10**18), follow_symlinks=False)


def a_file(root: Path, chance: random.Random) -> Path:
    return (
        root
        / f"d{chance.randrange(10)}"
        / f"e{chance.randrange(FOLDERS)}"
        / f"f{chance.randrange(FILES)}"
    )


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(3))


def write_and_hide_it(path: Path) -> None:
    """Same size, same modification time: only the time of the change tells."""
    write(path)
    os.utime(path, ns=(10**18, 10**18))


def delete(path: Path) -> None:
    path.unlink(missing_ok=True)


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)


def rename(path: Path) -> None:
    if path.exists():
        path.rename(path.with_name("renamed"))


def link(path: Path) -> None:
    if path.exists() and not path.with_name("linked").exists():
        os.link(path, path.with_name("linked"))


def ignored(path: Path) -> None:
    write(path.with_name("ignored"))


def become_a_folder(path: Path) -> None:
    if path.is_file():
        path.unlink()
        path.mkdir()


def change_mode(path: Path) -> None:
    if path.exists():
        path.chmod(0o700)


def special(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.with_name("pipe").exists():
        os.mkfifo(path.with_name("pipe"))


CHANGES: tuple[Callable[[Path], None], ...] = (
    write,
    write_and_hide_it,
    delete,
    delete_folder,
    rename,
    link,
    ignored,
    become_a_folder,
    change_mode,
    special,
)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_remembered_is_right(tree: Path, seed: int) -> None:
    chance = random.Random(seed)
    cache = Folder()
    settle(tree)
    scan(tree, cache)
    for _ in range(25):
        for _ in range(chance.randrange(3)):
            change, path = chance.choice(CHANGES), a_file(tree, chance)
            try:
                change(path)
            except (FileExistsError, IsADirectoryError, NotADirectoryError):
                continue  # another change has made something else of it
        assert scan(tree, cache) == scan(tree, Folder())


def test_a_large_tree_is_looked_at_by_several_processes(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    made = []
    fork = os.fork

    def counted() -> int:
        made.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    cache = Folder()
    first = scan(tree, cache)
    assert not made, "nothing is known yet"
    assert scan(tree, cache) == first
    assert len(made) == 2
    (tree / "d9" / "e9" / "new").write_text("")
    assert scan(tree, cache) == scan(tree, Folder()) != first


def refuse() -> int:
    raise BlockingIOError("no more processes")


def die(root: int, places: object) -> NoReturn:
    os._exit(1)


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [(os, "fork", refuse), (parallel_stat, "_look", die)],
    ids=["no", "dead"],
)
def test_without_other_processes(
    tree: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any
) -> None:
    """A sandbox may allow no more processes, or kill them: the scan looks at all itself."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(where, name, instead)
    cache = Folder()
    first = scan(tree, cache)
    assert scan(tree, cache) == first
    write(tree / "d9" / "e9" / "f9")
    assert scan(tree, cache) == scan(tree, Folder()) != first


def test_processes_whose_answers_nobody_wants_are_ended(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan that fails does not leave them behind, and the next one does not wait for them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    cache = Folder()
    scan(tree, cache)
    monkeypatch.setattr(parallel_stat, "_ended", [])
    monkeypatch.setattr(parallel_stat, "_look", lambda root, places: time.sleep(1000))
    looking = parallel_stat.ParallelStat()
    looking.start(os.open(tree, os.O_RDONLY), cache)
    looking.close()
    assert len(parallel_stat._ended) == 2
    ends = [os.waitpid(child, 0)[1] for child in parallel_stat._ended]
    assert [os.WTERMSIG(end) for end in ends] == [signal.SIGKILL] * 2


def test_a_folder_that_can_be_read_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the folder that it is in tells of that."""
    cache = Folder()
    settle(tree)
    first = scan(tree, cache)
    open_any = os.open

    def open_some(path: str | bytes, *args: int, dir_fd: int | None = None) -> int:
        if path == b"e1":
            raise PermissionError(13, "Permission denied")
        return open_any(path, *args, dir_fd=dir_fd)

    with monkeypatch.context() as closed:
        closed.setattr(os, "open", open_some)
        assert scan(tree, cache)[1] == ["d1/e1: Permission denied"]
        assert scan(tree, cache)[1] == ["d1/e1: Permission denied"]
    assert scan(tree, cache) == first
