"""Hostile code leaves traps in its folders for the host, which clears them away."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from .hosts import Host

_TRAPS = r"""
import shutil
canary = sys.argv[1]
for base in ("/workspace", "/home/sandbox"):
    os.chdir(base)
    os.symlink(canary, "link-to-folder")
    os.symlink(canary + "/secret", "link-to-file")
    os.symlink("loop", "loop")
    os.symlink("../../../../../../../../" + canary, "link-up")
    os.mkfifo("fifo")
    socket.socket(socket.AF_UNIX).bind("socket")
    open("a", "w").close()
    os.link("a", "hard")
    for name in ("new\nline", "-rf", " ", "*", "é", "\udcff\udcfe", "x" * 255):
        os.mkdir(name)
        open(name + "/file", "w").close() if len(name) < 200 else None
    os.makedirs("closed/inner")
    os.symlink(canary, "closed/inner/link")
    os.chmod("closed/inner", 0)
    os.chmod("closed", 0)
    # Deeper than any path can say.
    for _ in range(300):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    os.symlink(canary, "link")
    os.chdir(base)
    wide = base + "/wide"
    os.mkdir(wide)
    for number in range(300):
        open(f"{wide}/{number}", "w").close()
# The jail's own interpreter, which the host made, becomes a trap, too.
os.chdir("/home/sandbox")
shutil.rmtree(".venv")
os.symlink(canary, ".venv")
answer(None)
"""


def _canary(victim: Host) -> Path:
    folder = victim.home / f"precious-{secrets.token_hex(4)}"
    folder.mkdir()
    (folder / "secret").write_text("precious")
    os.chown(folder, victim.uid, -1) if os.getuid() == 0 else None
    return folder


def _unharmed(canary: Path) -> bool:
    return [p.name for p in canary.iterdir()] == ["secret"] and (
        canary / "secret"
    ).read_text() == "precious"


def test_removal_follows_nothing(victim: Host) -> None:
    """Links, loops, pipes, closed and endless folders: all is gone, and only what was the
    sandbox's own."""
    canary = _canary(victim)
    mode = canary.stat().st_mode
    with victim.jail() as jail:
        jail.answer(_TRAPS, str(canary))
        folder = Path(jail.call("folder"))
        assert folder.exists()
        jail.call("remove")
        assert not folder.exists()
    assert _unharmed(canary)
    assert canary.stat().st_mode == mode


def test_a_sandbox_that_failed_to_be_removed_is_replaced(victim: Host) -> None:
    """Another sandbox of the same name starts from nothing."""
    canary = _canary(victim)
    for _ in range(2):
        with victim.jail(name="again") as jail:
            assert jail.answer('answer(os.listdir("/workspace"))') == []
            jail.answer(_TRAPS, str(canary))
    assert _unharmed(canary)


def test_a_named_workspace_full_of_traps_is_used_again(victim: Host) -> None:
    """The next sandbox gets it as it is; the host looks at nothing in it."""
    canary = _canary(victim)
    with victim.jail(volume="traps") as jail:
        jail.answer('os.symlink(sys.argv[1], "/workspace/link"); answer(None)', str(canary))
    with victim.jail(volume="traps") as jail:
        assert jail.answer('answer(attempt(os.listdir, "/workspace/link"))') == "ENOENT"
    assert _unharmed(canary)


def test_what_is_readable_is_not_writable(victim: Host) -> None:
    """``readable`` shows a folder, and links in it lead nowhere new."""
    shown = victim.home / "shown"
    shown.mkdir()
    (shown / "file").write_text("to be read")
    (shown / "way-out").symlink_to(victim.home / "secret")
    os.chown(shown, victim.uid, -1) if os.getuid() == 0 else None
    with victim.jail(readable=[str(shown)]) as jail:
        found = jail.answer(
            """
            folder = sys.argv[1]
            answer([open(folder + "/file").read(), attempt(open, folder + "/file", "w"),
                    attempt(open, folder + "/new", "w"), attempt(os.unlink, folder + "/file"),
                    attempt(os.chmod, folder, 0o777), attempt(open, folder + "/way-out")])
            """,
            str(shown),
        )
    assert found == ["to be read", "EROFS", "EROFS", "EROFS", "EROFS", "ENOENT"]


@pytest.mark.parametrize("place", ["data", "run"])
def test_the_hosts_own_folders_cannot_be_made_readable(victim: Host, place: str) -> None:
    """They hold the tokens and sockets of all sandboxes."""
    with pytest.raises(Exception, match=r"SpecError.*own files"):
        victim.call("create", readable=[str(victim.data.with_name(place))])
    # A folder around them is shown without them.
    around = victim.data.parent
    with victim.jail(readable=[str(around)]) as jail:
        assert jail.answer("answer(os.listdir(sys.argv[1]))", str(around / place)) == []


def test_the_command_removes_traps_too(victim: Host) -> None:
    """``sandbox-kernel rm`` is the same removal."""
    if victim.uid != os.getuid():
        pytest.skip("the command is tried as this user")
    canary = _canary(victim)
    with victim.jail() as jail:
        jail.answer(_TRAPS, str(canary))
        environment = {
            **os.environ,
            "SANDBOX_KERNEL_DATA_DIR": str(victim.data),
            "SANDBOX_KERNEL_RUNTIME_DIR": str(victim.data.with_name("run")),
        }
        ran = subprocess.run(
            [sys.executable, "-c", "from sandbox_kernel.cli import main; main()", "rm", jail.name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 0, ran.stderr
        assert jail.name not in victim.call("list")
    assert _unharmed(canary)
