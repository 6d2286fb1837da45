"""``sandbox-kernel workspace``: everything that can be done with saves from a shell."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from sandbox_kernel.cli import main
from sandbox_kernel.cli.formatting import ProgressLine
from sandbox_kernel.workspace import Progress

from .running import Cli


@pytest.fixture
def saved(cli: Cli, tmp_path: Path) -> Path:
    """A folder that has been imported twice as the workspace ``demo``."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text("first")
    (folder / "same").write_text("same")
    assert cli("workspace", "import", "demo", str(folder), "--notebook", "d.ipynb").returncode == 0
    (folder / "a.txt").write_text("second")
    (folder / "new\x1b[31m").write_text("")
    assert cli("workspace", "import", "demo", str(folder)).returncode == 0
    return folder


def ok(cli: Cli, *arguments: str) -> str:
    ran = cli("workspace", *arguments)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_looking(cli: Cli, saved: Path) -> None:
    """list, log, diff, files and show, for people and for programs."""
    assert "demo" in ok(cli, "list")
    (listed,) = json.loads(ok(cli, "list", "--json"))
    assert (listed["workspace"], listed["saves"], listed["files"]) == ("demo", 2, 3)
    newest, oldest = json.loads(ok(cli, "log", "demo", "--json"))
    assert newest["parent"] == oldest["id"]
    assert oldest["notebook"] == "d.ipynb"
    assert newest["id"] in ok(cli, "log", "demo")
    diff = ok(cli, "diff", "demo")
    assert diff == "M a.txt  (5 -> 6 bytes)\nA new\\x1b[31m\n"
    assert ok(cli, "diff", "demo", oldest["id"], newest["id"]) == diff
    changes = json.loads(ok(cli, "diff", "demo", oldest["id"][:25], "--json"))
    assert {change["kind"] for change in changes} == {"changed", "added"}
    files = ok(cli, "files", "demo")
    assert "\x1b" not in files
    assert [line.split()[-1] for line in files.splitlines()] == ["a.txt", "new\\x1b[31m", "same"]
    assert len(json.loads(ok(cli, "files", "demo", "--at", oldest["id"], "--json"))) == 2
    assert ok(cli, "show", "demo", "a.txt") == "second"
    assert ok(cli, "show", "demo", "a.txt", "--at", oldest["id"]) == "first"
    assert "import" in ok(cli, "show", "demo")


def test_going_back_and_out(cli: Cli, saved: Path, tmp_path: Path) -> None:
    """restore makes an earlier save the newest; export writes it, but not over changes."""
    ok(cli, "restore", "demo")
    assert ok(cli, "show", "demo", "a.txt") == "first"
    assert len(json.loads(ok(cli, "log", "demo", "--json"))) == 3
    target = tmp_path / "target"
    assert ok(cli, "export", "demo", str(target)).split() == ["a.txt", "same"]
    assert (target / "a.txt").read_text() == "first"
    (target / "a.txt").write_text("mine")
    (saved / "a.txt").write_text("third")
    ok(cli, "import", "demo", str(saved), "--only", "a.txt")
    assert "Did you mean 'demo'?" in cli("workspace", "export", "dmeo", str(target)).stderr
    refused = cli("workspace", "export", "demo", str(target))
    assert refused.returncode == 1
    assert "a.txt" in refused.stderr
    assert "--overwrite" in refused.stderr
    ok(cli, "export", "demo", str(target), "--overwrite", "--delete")
    assert (target / "a.txt").read_text() == "third"
    assert not (target / "same").exists()


def test_what_came_before_is_not_kept(cli: Cli, saved: Path) -> None:
    """Earlier saves were thinned out: that is said, and not taken for "there were none"."""
    ok(cli, "gc", "--keep", "1")
    refused = cli("workspace", "restore", "demo")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "has no save before the newest one" in refused.stderr
    ran = cli("workspace", "diff", "demo")
    assert [line[0] for line in ran.stdout.splitlines()] == ["A", "A", "A"]
    assert "not kept any more" in ran.stderr


def test_keeping_house(cli: Cli, saved: Path, tmp_path: Path) -> None:
    """verify reads all; rm and gc delete for good."""
    assert "all is well" in ok(cli, "verify")
    assert ok(cli, "rm", "demo") == "demo\n"
    assert "Nothing to delete" in cli("workspace", "rm", "demo").stderr
    assert "2 packs deleted" in ok(cli, "gc", "--grace", "0")
    assert json.loads(ok(cli, "list", "--json")) == []
    other = str(tmp_path / "other store")
    ok(cli, "import", "demo", str(saved), "--store", other)
    assert "demo" in ok(cli, "list", "--store", other)
    pack = next(Path(other, "packs").iterdir())
    pack.write_bytes(pack.read_bytes()[:-1])
    broken = cli("workspace", "verify", "--store", other)
    assert broken.returncode == 1
    assert "damaged" in broken.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("log", "nothing"), "no workspace 'nothing'"),
        (("show", "nothing"), "workspace list"),
        (("log", "../evil"), "workspace name"),
        (("restore", "nothing", "--at", "x"), "no workspace"),
        (("export", "nothing", "somewhere"), "no workspace"),
        (("import", "demo", "/nowhere/at/all"), "cannot be read"),
    ],
)
def test_errors(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    """One line that says what is wrong."""
    ran = cli("workspace", *arguments)
    assert ran.returncode == (2 if words == "workspace name" else 1)
    assert words in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    ["list", "log", "diff", "files", "show", "restore", "export", "import", "gc", "verify", "rm"],
)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has help, with examples."""
    with pytest.raises(SystemExit) as ended:
        main(["workspace", command, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  sandbox-kernel workspace {command}" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, which is gone in the end."""
    for stderr, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stderr)
        with ProgressLine() as line:
            line.files(Progress("scan", 12, 34_000_000))
            line.files(Progress("scan", 13, 35_000_000))  # too soon to be shown
        said = stderr.getvalue()
        assert said == ("\r12 files, 34 MB\r               \r" if shown else "")
