"""cp: files into a sandbox, and out of it; also if what is in there is hostile."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.cli.commands.cp import split
from sandbox_kernel.errors import WorkspaceError
from sandbox_kernel.guest.copy_stream import LENGTH, entries
from sandbox_kernel.workspace.copy_out import CopyWriter
from sandbox_kernel.workspace.reports import Quota

from .running import Cli


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("name:a/b", ("name", "a/b")),
        ("name:", ("name", "")),
        ("work/demo.ipynb:x", ("work/demo.ipynb", "x")),
        ("/home/me/demo.ipynb:x", ("/home/me/demo.ipynb", "x")),
        ("./a:b", None),
        ("/a:b", None),
        ("a", None),
        (":a", None),
    ],
)
def test_which_side_is_the_sandbox(text: str, meant: tuple[str, str] | None) -> None:
    """NAME:PATH is in a sandbox, anything else is here."""
    assert split(text) == meant


def test_there_and_back(cli: Cli, jail: str, tmp_path: Path) -> None:
    """A folder is copied in and out again with contents, modes and times; a file gets its own name
    in a folder, or the name that is asked for; nothing that is there is written over by itself."""
    source = tmp_path / "data"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "big.bin").write_bytes(os.urandom(3_000_000))
    (source / "run.sh").write_text("echo hello")
    (source / "run.sh").chmod(0o755)
    (source / "empty").write_text("")
    (source / "link").symlink_to("run.sh")
    os.utime(source / "run.sh", (1_000_000_000, 1_000_000_000))
    ran = cli("cp", str(source), f"{jail}:")
    assert ran.returncode == 0, ran.stderr
    assert cli("exec", jail, "sh", "data/run.sh").stdout == "hello\n"
    assert cli("cp", f"{jail}:/workspace/data", str(tmp_path / "back")).returncode == 0
    for name in ("deep/big.bin", "run.sh", "empty"):
        before, after = source / name, tmp_path / "back" / name
        assert after.read_bytes() == before.read_bytes()
        assert after.stat().st_mtime == before.stat().st_mtime
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert os.readlink(tmp_path / "back" / "link") == "run.sh"
    here = tmp_path / "here"
    here.mkdir()
    assert cli("cp", f"{jail}:data/run.sh", str(here)).returncode == 0
    (here / "run.sh").write_text("mine")
    ran = cli("cp", f"{jail}:data/run.sh", str(here))
    assert (ran.returncode, "exists already. Add --force" in ran.stderr) == (1, True)
    assert (here / "run.sh").read_text() == "mine"
    assert cli("cp", "-f", f"{jail}:data/run.sh", str(here)).returncode == 0
    assert (here / "run.sh").read_text() == "echo hello"
    ran = cli("cp", "--force", f"{jail}:data", str(tmp_path))
    assert (ran.returncode, "Remove it first" in ran.stderr) == (1, True)


def test_what_cannot_be_copied_is_told(cli: Cli, jail: str, tmp_path: Path) -> None:
    """Neither side leaves a half behind, and the reason is the one that was on the other side."""
    ran = cli("cp", f"{jail}:nowhere", str(tmp_path / "x"))
    assert (ran.returncode, "nowhere: No such file" in ran.stderr) == (1, True)
    ran = cli("cp", str(tmp_path / "nothing"), f"{jail}:")
    assert (ran.returncode, "No such file" in ran.stderr) == (1, True)
    ran = cli("cp", __file__, f"{jail}:/usr/x")
    assert (ran.returncode, "was not copied into sandbox 'jail'" in ran.stderr) == (1, True)
    ran = cli("cp", "--max-bytes", "1000", f"{jail}:/usr/bin/env", str(tmp_path))
    assert (ran.returncode, "Nothing was written" in ran.stderr) == (1, True)
    assert cli("cp", "a", "b").returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_what_a_sandbox_hides_or_links_stays_there(cli: Cli, jail: str, tmp_path: Path) -> None:
    """A folder of hostile code: links that lead out, hidden files that programs here obey, setuid
    bits and pipes. What is harmless comes; the rest is named."""
    script = (
        "mkdir -p out/.git/hooks; cd out; echo x > .git/hooks/pre-commit; echo ok > fine.txt; "
        "chmod 6777 fine.txt; ln -s ../../etc/passwd up; ln -s /etc/passwd root; "
        "ln -s .git/hooks/pre-commit hook; ln -s fine.txt good; mkfifo pipe"
    )
    assert cli("exec", jail, "sh", "-c", script).returncode == 0
    ran = cli("cp", f"{jail}:out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["fine.txt", "good"]
    assert stat.S_IMODE((tmp_path / "out" / "fine.txt").stat().st_mode) == 0o755
    for name in (".git", "up", "root", "hook", "pipe"):
        assert f"Left out: {name}" in ran.stderr


def framed(*headers: Any, end: bool = True) -> bytes:
    data = b""
    for header in headers:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        data += LENGTH.pack(len(raw)) + raw
    return data + (LENGTH.pack(0) if end else b"")


TOP = {"path": "", "kind": "d", "mode": 0o755, "mtime": 0}
FILE = {"kind": "f", "mode": 0o644, "mtime": 0, "size": 0}
LIES = {
    "a path out": framed(TOP, {**FILE, "path": "../x"}),
    "an absolute path": framed(TOP, {**FILE, "path": "/etc/x"}),
    "a path with an empty name": framed(TOP, {**FILE, "path": "a//b"}),
    "our own name": framed(TOP, {**FILE, "path": ".sandbox-kernel-x"}),
    "a NUL": framed(TOP, {**FILE, "path": "a\0b"}),
    "a file through a link": framed(
        TOP,
        {"path": "d", "kind": "l", "target": "/tmp"},
        {**FILE, "path": "d/x"},
    ),
    "a file in a file": framed(TOP, {**FILE, "path": "a"}, {**FILE, "path": "a/b"}),
    "the same file twice": framed(TOP, {**FILE, "path": "a"}, {**FILE, "path": "a"}),
    "no folder first": framed({**FILE, "path": "a"}),
    "two tops": framed(TOP, TOP),
    "a link as the top": framed({"path": "", "kind": "l", "target": "/etc"}),
    "a negative size": framed(TOP, {**FILE, "path": "a", "size": -1}),
    "a huge size": framed(TOP, {**FILE, "path": "a", "size": 10**18}),
    "a size that is no number": framed(TOP, {**FILE, "path": "a", "size": True}),
    "a mode that is no number": framed(TOP, {**FILE, "path": "a", "mode": "x"}),
    "no JSON": framed(b"{"),
    "deep JSON": framed(b"[" * 100_000),
    "a list": framed([]),
    "a header without an end": LENGTH.pack(2**32 - 1) + b"x",
    "nothing": framed(),
    "too many files": framed(TOP, *({**FILE, "path": f"f{i}"} for i in range(200))),
    "an endless name": framed(TOP, {**FILE, "path": "x" * 300}),
    "an error": framed({"error": "\x1b[2Jgone"}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_hostile_stream_writes_nothing(lie: str, tmp_path: Path) -> None:
    """A false program in the sandbox sends what no honest one would: it is refused, whatever the
    pieces it comes in, and nothing is left here."""
    for size in (1, 65536):
        receiver = CopyWriter(
            str(tmp_path), "got", force=False, hidden=True, quota=Quota(10**6, 100)
        )
        with pytest.raises(WorkspaceError) as refused:
            _ = [receiver.feed(LIES[lie][at : at + size]) for at in range(0, len(LIES[lie]), size)]
        receiver.close()
        assert "\x1b" not in str(refused.value)
        assert list(tmp_path.iterdir()) == []


def test_a_stream_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    """The sandbox goes away in the middle of a file."""
    whole = b"".join(entries(__file__))
    receiver = CopyWriter(str(tmp_path), "got", force=False, hidden=False, quota=Quota())
    assert not receiver.feed(whole[: len(whole) // 2])
    receiver.close()
    assert list(tmp_path.iterdir()) == []
