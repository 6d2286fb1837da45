"""No end of a sandbox, however bad, deletes or changes a file of the folder that it was shown."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient, bubblewrap
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.spec import SandboxSpec

from .sandboxes import client_that_leaves_nothing

pytestmark = pytest.mark.skipif(bubblewrap.why_not() is not None, reason="no jail can be made")

State = dict[str, tuple[int, int, int, bytes]]


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    with client_that_leaves_nothing(own_dirs) as client:
        yield client


@pytest.fixture
def folder(own_dirs: Path) -> Path:
    """A project with all kinds of files, visible and hidden, and a link out of it."""
    top = own_dirs / "project"
    for place in ("sub/deep", ".git/hooks", "sub/.git", "venv", "empty", ".hidden/more"):
        (top / place).mkdir(parents=True)
    for name in ("data.csv", "sub/deep/x", ".git/config", ".env", "venv/pyvenv.cfg", "server.pem"):
        (top / name).write_text(f"contents of {name}")
    (own_dirs / "outside").mkdir()
    (own_dirs / "outside" / "file").write_text("not in the project")
    (top / "link").symlink_to(own_dirs / "outside")
    (top / "file").hardlink_to(top / "data.csv")
    (top / ".sandboxignore").write_text("sub/deep/\n")
    return top


def state(top: Path) -> State:
    """All that there is, with modes, inodes and contents."""
    found: State = {}
    for base in (top, top.parent / "outside"):
        for path in (base, *sorted(base.rglob("*"))):
            status = path.lstat()
            text = path.read_bytes() if path.is_file() else b""
            name = str(path.relative_to(top.parent))
            found[name] = (status.st_ino, status.st_mode, status.st_nlink, text)
    return found


async def removed(client: LocalClient, handle: LocalHandle) -> None:
    await client.remove(handle.name)


async def removed_by_another(client: LocalClient, handle: LocalHandle) -> None:
    await LocalClient().remove(handle.name)


async def removed_twice_at_once(client: LocalClient, handle: LocalHandle) -> None:
    await asyncio.gather(client.remove(handle.name), LocalClient().remove(handle.name))


async def killed_and_removed(client: LocalClient, handle: LocalHandle) -> None:
    await handle.kill()
    await client.remove(handle.name)


async def killed_from_outside(client: LocalClient, handle: LocalHandle) -> None:
    record = Records().load("local", handle.name)
    os.kill(record.data["init"][0], signal.SIGKILL)
    await client.remove(handle.name)


async def made_again_under_its_name(client: LocalClient, handle: LocalHandle) -> None:
    """What an earlier sandbox of the name left is deleted first."""
    spec = Records().load("local", handle.name).sandbox_spec()
    await client.remove(handle.name)
    await client.create(spec)
    await client.remove(handle.name)


async def without_its_record(client: LocalClient, handle: LocalHandle) -> None:
    Records().delete("local", handle.name)
    await client.remove(handle.name)


ENDS = (
    *(removed, removed_by_another, removed_twice_at_once, killed_and_removed),
    *(killed_from_outside, made_again_under_its_name, without_its_record),
)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_ends(
    client: LocalClient,
    folder: Path,
    end: Callable[[LocalClient, LocalHandle], Awaitable[None]],
    writable: bool,
) -> None:
    """While programs run in the sandbox and in the folder."""
    before = state(folder)
    handle = await client.create(SandboxSpec(folder=str(folder), folder_writable=writable))
    await handle.exec("/bin/sh", ["-c", "cd sub; sleep 600 >/dev/null 2>&1 &"], timeout=30)
    await end(client, handle)
    assert state(folder) == before


CREATE = """
import asyncio, os, signal, sys
from sandbox_kernel.sandboxes.local import LocalClient, client, jail_start, placeholders
from sandbox_kernel.spec import SandboxSpec

where, folder = sys.argv[1:]

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def dies_after(module, name):
    function = getattr(module, name)
    def dying(*arguments, **options):
        function(*arguments, **options)
        die()
    setattr(module, name, dying)

if where == "before placeholders":
    client.make_placeholders = die
elif where == "among placeholders":
    dies_after(placeholders.os, "mkdir")
elif where == "after placeholders":
    dies_after(client, "make_placeholders")
elif where == "before bubblewrap":
    jail_start.share = die
elif where == "with bubblewrap":
    dies_after(jail_start.Launch, "start")
elif where == "before the record is whole":
    jail_start.Launch.facts = die
elif where == "before the folder is checked":
    jail_start.Launch.check_folder = die
asyncio.run(LocalClient().create(SandboxSpec(name="cut", folder=folder, folder_writable=True)))
"""


@pytest.mark.parametrize(
    "where",
    [
        *("before placeholders", "among placeholders", "after placeholders", "before bubblewrap"),
        *("with bubblewrap", "before the record is whole", "before the folder is checked"),
    ],
)
async def test_a_start_that_is_cut(client: LocalClient, folder: Path, where: str) -> None:
    """The process that starts a sandbox is killed, and another one sweeps: even the placeholders
    are gone."""
    before = state(folder)
    command = [sys.executable, "-c", CREATE, where, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    await client.sweep()
    await client.remove("cut")  # if it was whole
    assert state(folder) == before


async def test_what_was_put_in_the_place_of_its_own_folders(
    client: LocalClient, own_dirs: Path, folder: Path
) -> None:
    """A sandbox's own folders are deleted without following links to the user's."""
    before = state(folder)
    handle = await client.create(SandboxSpec(folder=str(folder), folder_writable=True))
    workspace = own_dirs / "data" / "sandboxes" / handle.name / "disk" / "workspace"
    workspace.rmdir()
    workspace.symlink_to(folder)
    await client.remove(handle.name)
    assert not workspace.parent.exists()
    assert state(folder) == before
