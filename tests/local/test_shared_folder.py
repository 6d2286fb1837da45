"""A host folder that a jail sees live: what is shown, and attacks on what is not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.errors import SpecError, SpecRefused
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.sandboxes.local import LocalClient, bubblewrap, folder_contents, shared_folder
from sandbox_kernel.spec import SandboxSpec

from .sandboxes import client_that_leaves_nothing, sandbox

SECRET = "not for the sandbox"
pytestmark = pytest.mark.skipif(bubblewrap.why_not() is not None, reason="no jail can be made")


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    with client_that_leaves_nothing(own_dirs) as client:
        yield client


@pytest.fixture
def folder(own_dirs: Path) -> Path:
    """A project with secrets in several places."""
    top = own_dirs / "project"
    for place in (".git/hooks", "sub/deep/.git/hooks", "venv/bin", "ignored"):
        (top / place).mkdir(parents=True)
    for name in (
        *(".env", ".git/config", "sub/.env", "sub/deep/.git/config", "sub/deep/server.KEY"),
        *("id_ed25519", "sub/credentials.json", "ignored/file", "sub/deep/named.txt"),
    ):
        (top / name).write_text(SECRET)
    (top / ".sandboxignore").write_text("ignored/\nnamed.txt\n!.env\n!*.key\n")
    (top / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (top / "data.csv").write_text("1,2")
    (top / "sub" / "data.csv").write_text("3,4")
    outside = own_dirs / "outside"
    outside.write_text(SECRET)
    (top / "out").symlink_to(outside)
    (top / "to_env").symlink_to(".env")
    (top / "to_sub").symlink_to("sub")
    return top


def contents(folder: Path) -> dict[str, str]:
    """All that is not to be seen, and what the host would run."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not path.is_symlink():
            found[name] = path.read_text()
    return found


LISTING = "find . -type f -exec cat {} + 2>/dev/null; cat out to_env to_sub/.env 2>/dev/null; true"


@pytest.mark.parametrize("writable", [False, True])
async def test_what_is_hidden_cannot_be_read(
    client: LocalClient, folder: Path, writable: bool
) -> None:
    """At any depth, by any name, and whatever .sandboxignore says; the rest can."""
    async with sandbox(client, folder=str(folder), folder_writable=writable) as handle:
        ran = await handle.exec("/bin/sh", ["-c", LISTING], timeout=30)
        assert SECRET not in ran.stdout
        assert "1,2" in ran.stdout
        assert "3,4" in ran.stdout


ATTACKS = {
    "open it for writing": "echo x > {file}",
    "truncate it": ": > {file}",
    "delete it": "rm -f {file}",
    "rename it": "mv {file} ./stolen",
    "replace it": "echo x > new; mv -f new {file}",
    "link to it": "ln {file} stolen; cat stolen",
    "read it through a symlink": "ln -s {file} stolen; cat stolen",
    "rename its folder": "mv sub moved; cat moved/.env moved/deep/server.KEY; rm moved/.env",
    "delete its folder": "rm -rf sub/deep",
    "exchange its folder": "mkdir -p evil; cp -r evil evil2; mv -T evil sub/deep; cat sub/.env",
    "move another folder over its folder": "mkdir -p e/deep; mv -f e/deep sub/; cat {file}",
    "change its mode": "chmod 777 {file}; cat {file}",
    "open it through a descriptor of the folder": (
        "exec 9<sub; cat /proc/self/fd/9/.env /proc/self/fd/9/deep/server.KEY"
    ),
    "open it through process 1": "cat /proc/1/root/workspace/.env /proc/1/cwd/workspace/.env",
    "leave the folder": "cat ../workspace/.env /workspace/sub/../.env",
    "write a hook": "echo x > .git/hooks/pre-commit; echo x > sub/deep/.git/hooks/post-checkout",
    "write git's settings": "echo x > .git/config; echo x > sub/deep/.git/config",
    "unmount it": "umount {file}; umount .git; cat {file} .git/config",
    "unshare": "unshare -Urm sh -c 'umount {file}; cat {file}'",
    "mount over it": "mount --bind data.csv {file}",
    "write to a Python environment": "echo x > venv/bin/python; echo x > venv/evil.pth",
    "replace a Python environment": "mv venv old; mkdir venv; rm -rf venv",
    "make a pipe of it": "rm -f {file}; mkfifo {file}",
}
PYTHON_ATTACKS = {
    "rename by exchange": """
import ctypes, os
libc = ctypes.CDLL(None)
os.makedirs("mine/.git", exist_ok=True)
for old, new in (("mine/.git", "sub/deep/.git"), ("data.csv", ".env"), ("mine", "sub/deep")):
    libc.renameat2(-100, old.encode(), -100, new.encode(), 2)
print(open(".env").read() if os.path.isfile(".env") else "")
print(open("mine/.git/config").read())
""",
    "openat below a descriptor": """
import os
fd = os.open("sub", os.O_PATH)
os.rename("sub", "elsewhere")
print(os.read(os.open(".env", os.O_RDONLY, dir_fd=fd), 100))
""",
    "link by descriptor": """
import os
fd = os.open(".env", os.O_PATH)
os.link(f"/proc/self/fd/{fd}", "stolen", follow_symlinks=True)
print(open("stolen").read())
""",
}


@pytest.mark.parametrize("attack", [*ATTACKS, *PYTHON_ATTACKS])
async def test_attacks_on_what_is_hidden(client: LocalClient, folder: Path, attack: str) -> None:
    """Code in a jail that may write to the folder neither reads nor changes it."""
    before = {name: text for name, text in contents(folder).items() if text == SECRET}
    if attack in ATTACKS:
        commands = [
            ["/bin/sh", "-c", ATTACKS[attack].format(file=file)]
            for file in (".env", "id_ed25519", "sub/deep/server.KEY", "ignored/file")
        ]
    else:
        commands = [[sys.executable, "-c", PYTHON_ATTACKS[attack]]]
    async with sandbox(client, folder=str(folder), folder_writable=True) as handle:
        for program, *arguments in commands:
            ran = await handle.exec(program, arguments, timeout=30)
            assert SECRET not in ran.stdout
        ran = await handle.exec("/bin/sh", ["-c", LISTING], timeout=30)
        assert SECRET not in ran.stdout
    after = contents(folder)
    kept = sorted(after.values())
    assert [text for text in kept if text == SECRET] == list(before.values())
    assert all((folder / name).read_text() == SECRET for name in (".env", ".git/config"))
    assert not [name for name in after if "/hooks/" in name or name.endswith(".pth")]
    assert (folder / "venv" / "pyvenv.cfg").exists()
    assert not os.path.lexists(folder / "venv" / "bin" / "python")


async def test_names_that_programs_obey_cannot_be_made(client: LocalClient, own_dirs: Path) -> None:
    """Not in the folder itself; a placeholder is there for as long as any jail needs it."""
    folder = own_dirs / "empty"
    folder.mkdir()
    code = "mkdir -p .git/hooks; echo x > .git/config; echo x > .envrc; mv .git a; rm -rf .git"
    options = {"folder": str(folder), "folder_writable": True}
    async with sandbox(client, **options) as first:
        async with sandbox(client, **options):
            await first.exec("/bin/sh", ["-c", code], timeout=30)
            assert (folder / ".git").is_dir()
            (folder / ".vscode" / "settings.json").write_text("the user's own")
        ran = await first.exec("/bin/sh", ["-c", f"{code}; ls -A .git .vscode"], timeout=30)
        assert "settings.json" not in ran.stdout
        assert list((folder / ".git").iterdir()) == []
    assert contents(folder) == {".vscode/settings.json": "the user's own"}
    assert [path.name for path in folder.iterdir()] == [".vscode"]


@pytest.mark.parametrize("name", [".git", ".envrc"])
async def test_links_that_programs_obey(client: LocalClient, own_dirs: Path, name: str) -> None:
    """Nothing can cover a link, so code could replace it. A folder that has one is not writable."""
    folder = own_dirs / "linked"
    folder.mkdir()
    (folder / name).symlink_to("elsewhere")
    with pytest.raises(SpecError, match=f"{name} in it is a symbolic link.*mount-ro"):
        await client.create(SandboxSpec(folder=str(folder), folder_writable=True))
    assert [path.name for path in folder.iterdir()] == [name]
    async with sandbox(client, folder=str(folder)) as handle:
        ran = await handle.exec("/bin/sh", ["-c", f"rm -f {name} || mv {name} x; ls -A"])
        assert ran.stdout.split() == [name]


async def test_a_jail_that_cannot_be_made_leaves_no_placeholders(
    client: LocalClient, own_dirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_dirs / "crowded"
    folder.mkdir()
    monkeypatch.setattr(shared_folder, "MOST_COVERS", 5)
    with pytest.raises(SpecError, match="covered as one"):
        await client.create(SandboxSpec(folder=str(folder), folder_writable=True))
    assert list(folder.iterdir()) == []


async def test_too_many_files_are_refused(
    client: LocalClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_contents, "MOST_ENTRIES", 5)
    with pytest.raises(SpecError, match="more than 5 files"):
        await client.create(SandboxSpec(folder=str(folder)))


async def test_folders_that_cannot_be_shown(client: LocalClient, own_dirs: Path) -> None:
    """Each is refused with its reason, before anything exists."""
    (own_dirs / "data" / "sandboxes").mkdir(parents=True)
    for place, why in (
        ("/", "the whole system"),
        (str(Path.home()), "the home folder"),
        ("/etc", "the system's settings"),
        (str(own_dirs), "sandboxes' own"),
        (str(own_dirs / "data" / "sandboxes"), "sandbox-kernel's own files"),
        (str(own_dirs / "missing"), "does not exist"),
    ):
        with pytest.raises(SpecError, match=why):
            await client.create(SandboxSpec(folder=place))


def test_other_backends_refuse_it() -> None:
    with pytest.raises(SpecRefused, match="cannot enforce folder="):
        Capabilities().check(SandboxSpec(folder="/project"), "another")


async def test_the_users_files_do_not_count_for_the_disk(client: LocalClient, folder: Path) -> None:
    """The watch over the disk does not kill for files that were there before."""
    with (folder / "large").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 * 2**20)
    async with sandbox(client, folder=str(folder), disk_mib=1) as handle:
        ran = await handle.exec("/bin/sh", ["-c", "cat large | wc -c; echo x > ~/x"], timeout=30)
        assert ran.stdout.split() == [str(3 * 2**20)]
        assert not (await handle.info()).last_kill
