"""Folders that are dangerous to show: with sockets of the host's, with names and permissions that
hide a secret from a search, and with files that somebody moves while a jail starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_kernel.errors import SpecError
from sandbox_kernel.sandboxes.local import (
    LocalClient,
    bubblewrap,
    folder_contents,
    jail_start,
    nested_mounts,
    shared_folder,
)
from sandbox_kernel.sandboxes.local.shared_folder import SharedFolder
from sandbox_kernel.spec import SandboxSpec

from .sandboxes import client_that_leaves_nothing, sandbox

SECRET = "not for the sandbox"
LISTING = "find . -type f -exec cat {} + 2>/dev/null; true"
pytestmark = pytest.mark.skipif(bubblewrap.why_not() is not None, reason="no jail can be made")


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    with client_that_leaves_nothing(own_dirs) as client:
        yield client


@pytest.fixture
def folder(own_dirs: Path) -> Path:
    top = own_dirs / "project"
    (top / "sub").mkdir(parents=True)
    (top / "data.csv").write_text("1,2")
    (top / "sub" / ".env").write_text(SECRET)
    return top


CONNECT = """
import os, socket
for name in ("docker.sock", "sub/agent"):
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(name)
            print("reached", name)
        except OSError:
            pass
for name in ("pipe", "sub/pipe"):
    for flags in (os.O_WRONLY, os.O_RDONLY):
        try:
            os.open(name, flags | os.O_NONBLOCK)
            print("opened", name)
        except OSError:
            pass
"""


@pytest.mark.parametrize("writable", [False, True])
async def test_sockets_and_pipes_lead_to_nobody(
    client: LocalClient, folder: Path, writable: bool
) -> None:
    """Through a mount one would talk to a process of the host, such as Docker's: no network
    namespace is in the way, nor is a read-only mount."""
    with contextlib.ExitStack() as stack:
        for name in ("docker.sock", "sub/agent"):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(folder / name))
            server.listen()
        for name in ("pipe", "sub/pipe"):
            os.mkfifo(folder / name)
            stack.callback(os.close, os.open(folder / name, os.O_RDWR))
        async with sandbox(client, folder=str(folder), folder_writable=writable) as handle:
            ran = await handle.exec(sys.executable, ["-c", CONNECT], timeout=30)
            assert (ran.stdout, ran.stderr) == ("", "")


HIDING_NAMES = {
    "a line feed": ("a\nb", ".env"),
    "capitals": ("", "Server.PEM"),
    "bytes that are no text": (os.fsdecode(b"\xff\xfe"), ".env"),
    "spaces and dots": (" . ", ". "),
    "a backslash": ("a\\040b", ".env"),
    "what some take for the end of a line": ("a\rb\x0bc\x0cd\x1ce\x85f\u2028g", ".env"),
    "what some take for a blank": ("a\xa0b\u3000c\x1fd", ".env"),
    "a line of the list of mounts": (
        "x\r1\x0b1\x0b1:1\x0b/\x0b/usr\x0brw,relatime\x0b-\x0bext4\x0bx\x0brw\r",
        ".env",
    ),
    "a name in the ignore file": ("a\nb", "private/notes"),
    "a path in the ignore file": ("deep/er", "notes"),
}


@pytest.mark.parametrize("case", HIDING_NAMES)
async def test_names_that_hide(client: LocalClient, folder: Path, case: str) -> None:
    """No name keeps a secret from being found."""
    above, name = HIDING_NAMES[case]
    path = folder / above / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SECRET)
    (folder / ".sandboxignore").write_text("private/\ndeep/er/notes\n")
    async with sandbox(client, folder=str(folder), folder_writable=True) as handle:
        ran = await handle.exec("/bin/sh", ["-c", LISTING], timeout=30)
        assert SECRET not in ran.stdout
        assert "1,2" in ran.stdout


MOVES = {
    "a folder above is renamed": "mv private shown; mv a b; true",
    "it is moved deeper than any path": (
        "n=$(printf 'x%.0s' $(seq 200)); i=0; mkdir -p start; cd start;"
        "while [ $i -lt 30 ]; do mkdir $n; cd $n; i=$((i+1)); done; mv /workspace/sub ."
    ),
    "its folder is closed": "chmod 0300 sub; chmod 0600 a",
    "a file unmasks it": "printf '!private/\\n!.env\\n' > .sandboxignore",
}


@pytest.mark.parametrize("move", MOVES)
async def test_what_a_sandbox_moves_stays_hidden_from_the_next(
    client: LocalClient, folder: Path, move: str
) -> None:
    """Code that may write to a folder prepares it for the next sandbox, which looks again for what
    must be covered."""
    for name in ("private/x/notes", "a/b/notes", "c/.env"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SECRET)
    if move != "a file unmasks it":
        (folder / ".sandboxignore").write_text("private/x\n/a/b/notes\n")
    else:
        shutil.rmtree(folder / "private")
        shutil.rmtree(folder / "a")
    async with sandbox(client, folder=str(folder), folder_writable=True) as handle:
        await handle.exec("/bin/sh", ["-c", MOVES[move]], timeout=30)
    look = f"chmod -R u+rwx . 2>/dev/null; {LISTING}"
    async with sandbox(client, folder=str(folder), folder_writable=True) as handle:
        ran = await handle.exec("/bin/sh", ["-c", look], timeout=60)
        assert SECRET not in ran.stdout
        assert "1,2" in ran.stdout
    assert not (folder / ".sandboxignore").exists() or move != "a file unmasks it"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.symlink_to("data.csv"), "symlink"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: path.write_text("x\n" * 50_000), "more than"),
        (lambda path: path.write_bytes(b"\0"), "not UTF-8"),
    ],
)
async def test_ignore_files_that_cannot_be_obeyed(
    client: LocalClient, folder: Path, make: Callable[[Path], object], why: str
) -> None:
    """Without it nobody knows what must be covered. None of them makes the start wait."""
    make(folder / ".sandboxignore")
    with pytest.raises(SpecError, match=why):
        await client.create(SandboxSpec(folder=str(folder)))


# --- while it starts


def instead(path: Path, target: Path) -> None:
    path.rename(path.with_name("away"))
    path.symlink_to(target)


def decoy(path: Path) -> None:
    """Another folder with a file to be covered, in the place of the one that was seen."""
    path.rename(path.with_name("away"))
    path.mkdir()
    (path / ".env").write_text("nothing")


SWAPS: dict[str, Callable[[Path, Path], None]] = {
    "the folder becomes a link": lambda top, outside: instead(top, outside),
    "a Python environment becomes a link": lambda top, outside: instead(top / "venv", outside),
    "a folder above a secret becomes a link": lambda top, outside: instead(top / "sub", outside),
    "a folder above a secret is exchanged": lambda top, outside: decoy(top / "sub"),
    "a secret is replaced by a link": lambda top, outside: instead(top / "sub/.env", outside),
}


@pytest.mark.parametrize("swap", SWAPS)
async def test_files_that_move_while_a_jail_starts(
    client: LocalClient, folder: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    """After they were found, before they are covered. The jail then does not start."""
    (folder / "venv").mkdir()
    (folder / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "key").write_text(SECRET)
    share = shared_folder.share

    def shared(*args: object, **options: object) -> SharedFolder:
        found = share(*args, **options)  # type: ignore[arg-type]
        SWAPS[swap](folder, outside)
        return found

    monkeypatch.setattr(jail_start, "share", shared)
    # bubblewrap itself refuses some of these.
    with pytest.raises(Exception, match=r"was changed while|could not be started") as raised:
        await client.create(SandboxSpec(folder=str(folder), folder_writable=True))
    assert type(raised.value).__name__ in ("SpecError", "SandboxUnavailable")
    assert os.listdir(outside) == ["key"]


def test_files_that_move_while_one_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where nobody has looked yet to where somebody has: it is looked for again."""
    (folder / "zone").mkdir()  # looked into first
    (folder / "alley").mkdir()
    (folder / "sub").rename(folder / "alley" / "sub")
    look_into = folder_contents._Search._look_into

    def moving(search: folder_contents._Search, path: str) -> Iterator[str]:
        yield from look_into(search, path)
        if path == "zone" and (folder / "alley" / "sub").exists():
            (folder / "alley" / "sub").rename(folder / "zone" / "sub")

    monkeypatch.setattr(folder_contents._Search, "_look_into", moving)
    found = folder_contents.look_through(str(folder), contested=True)
    assert found.covered == [("zone/sub/.env", False)]


# --- what the host has mounted in the folder

MOUNTED = """
import asyncio, os, subprocess, sys
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.spec import SandboxSpec

folder, home, data = sys.argv[1:]
os.environ["HOME"] = home
for source, name in ((home, "home"), (os.path.dirname(home), "above"), (data, "data")):
    os.mkdir(os.path.join(folder, name))
    subprocess.run(["mount", "--bind", source, os.path.join(folder, name)], check=True)

async def main():
    client = LocalClient()
    handle = await client.create(SandboxSpec(folder=folder))
    ran = await handle.exec("/bin/sh", ["-c", sys.stdin.read()], timeout=60)
    await client.remove(handle.name)
    print(ran.stdout)

asyncio.run(main())
"""


def test_mounts_in_the_folder(own_dirs: Path, folder: Path) -> None:
    """Data may be mounted there; a home folder, in there or as part of more, is covered."""
    home, data = own_dirs / "all" / "home", own_dirs / "dataset"
    for place in (home, data):
        place.mkdir(parents=True)
        (place / ".env").write_text(SECRET)
    (home / "diary").write_text(SECRET)
    (data / "table").write_text("3,4")
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", MOUNTED]
    ran = subprocess.run(
        [*command, *map(str, (folder, home, data))],
        input=LISTING,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert SECRET not in ran.stdout
    assert "1,2" in ran.stdout
    assert "3,4" in ran.stdout


def test_which_mounts_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel shows of itself, what holds a private folder, and what is in our own."""
    lines = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
        "2 1 8:2 / /home rw - ext4 /dev/sda2 rw",
        "3 1 8:2 /ada/data /srv/p\\040q/data rw - ext4 /dev/sda2 rw",
        "4 1 8:2 / /srv/p\\040q/homes rw - ext4 /dev/sda2 rw",
        "5 1 8:1 / /srv/p\\040q/system rw - ext4 /dev/sda1 rw",
        "6 1 0:5 / /srv/p\\040q/proc rw - proc proc rw",
        "7 1 8:2 /ada/own/x /srv/p\\040q/records rw - ext4 /dev/sda2 rw",
        "8 1 0:9 / /srv/p\\040q/scratch rw - tmpfs tmpfs rw",
        "9 1 0:6 / /srv/other/proc rw - proc proc rw",
    )
    monkeypatch.setattr(nested_mounts, "_mounts", lambda: [*map(nested_mounts._parsed, lines)])
    monkeypatch.setattr(nested_mounts, "private_places", lambda: {"/": "", "/home/ada": ""})
    monkeypatch.setattr(nested_mounts, "data_dir", lambda: Path("/home/ada/own"))
    monkeypatch.setattr(nested_mounts, "runtime_dir", lambda: Path("/home/ada/own"))
    assert nested_mounts.never_shown("/srv/p q") == {
        f"/srv/p q/{name}" for name in ("homes", "system", "proc", "records")
    }
