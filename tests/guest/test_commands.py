"""``guest/commands``: the same start for every command, exact ends, and streams with a bound."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox_kernel import guest_program
from sandbox_kernel.guest.commands.start import cut_log, open_log, start
from sandbox_kernel.guest.commands.stdio import CommandInput, CommandOutput, Ends
from sandbox_kernel.guest.loop import Loop
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.wrapped_command import Marks, request

LIMIT = 30.0


def run_single(argv: Sequence[str], cwd: str = "/", stdin: bytes = b"") -> tuple[str, list[str]]:
    """Run a command as providers do that run strings; its stdout, and the marked messages."""
    marks = Marks()
    program = guest_program.program("guest.commands.single")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, "run", marks.mark],
        input=request(Command(argv, {"A": "b"}, cwd)) + stdin,
        capture_output=True,
        timeout=LIMIT,
    )
    _, words = marks.feed(done.stderr)
    return done.stdout.decode(), words


def test_one_command() -> None:
    """Its input is the rest of stdin; its environment, folder and end are exact."""
    out, words = run_single(["/bin/sh", "-c", "cat; echo $A; pwd; exit 3"], "/usr", b"in\n")
    assert out == "in\nb\n/usr\n"
    assert words[-1] == "exit 3"
    assert run_single(["/bin/sh", "-c", "kill -TERM $$"])[1][-1] == "exit -15"


def test_a_command_starts_like_any_program() -> None:
    """It leads a session, has default signals, and no descriptors but its streams."""
    code = (
        "import os\n"
        "print(os.getpid() == os.getpgrp() == os.getsid(0), sorted(os.listdir('/proc/self/fd')))\n"
    )
    out, _ = run_single([sys.executable, "-c", code])
    assert out == "True ['0', '1', '2', '3']\n"  # 3 is the listing's own
    out, _ = run_single(["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"])
    # Whoever is started by glibc's posix_spawn, as here since Python 3.13, ignores glibc's own two.
    glibc = 1 << 31 | 1 << 32
    assert [int(line.split()[1], 16) & ~glibc for line in out.splitlines()] == [0, 0]


@pytest.mark.parametrize(
    ("argv", "cwd", "why"),
    [
        (["no-such-program"], "/", "No such file or directory on the PATH"),
        (["/no/such/program"], "/", "No such file or directory"),
        (["/etc/passwd"], "/", "Permission denied"),
        (["true"], "/no/such", "the folder '/no/such': No such file or directory"),
        (["true", "\0"], "/", "embedded null"),
    ],
)
def test_what_cannot_be_run(argv: list[str], cwd: str, why: str) -> None:
    """The reason is said, whatever it is, and nothing is left behind."""
    assert why in run_single(argv, cwd)[1][0]
    with pytest.raises(OSError, match=why.partition(" on")[0]):
        start(argv, os.environ, cwd, (0, 1, 2))


def test_streams_have_a_bound(tmp_path: Path) -> None:
    """Output that is not read waits in the pipe, and input that the command does not read waits
    with its writer; both go on later, and each byte is counted once."""
    loop = Loop(selectors.PollSelector())
    ends = Ends(None)
    pid = start(["cat"], os.environ, str(tmp_path), ends.theirs)
    ends.close_theirs()
    data = os.urandom(1_000_000)
    read, taken, meanwhile = bytearray(), list[int](), list[tuple[int, int, int]]()
    output = CommandOutput(loop, ends.outputs[0], read.extend, loop.stop)
    output.pause()
    stdin = CommandInput(loop, ends.stdin, taken.append)
    stdin.write(data)

    def go_on() -> None:
        meanwhile.append((len(read), sum(taken), stdin.pending))
        output.resume()
        stdin.end()

    loop.call_later(0.2, go_on)
    loop.run()
    ((nothing, some, rest),) = meanwhile
    assert (nothing, rest) == (0, len(data) - some)
    assert 0 < some < len(data)
    assert bytes(read) == data
    assert (sum(taken), stdin.closed, output.closed) == (len(data), True, True)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(ends.outputs[1])


def test_input_that_nobody_reads() -> None:
    """Counts as taken when the command has closed its stdin, so nobody waits for it."""
    loop, taken = Loop(selectors.PollSelector()), list[int]()
    read, write = os.pipe()
    stdin = CommandInput(loop, write, taken.append)
    os.close(read)
    stdin.write(b"for nobody")
    stdin.write(b"more")
    assert (taken, stdin.closed, stdin.pending) == ([10, 4], True, 0)


def test_a_log_is_cut(tmp_path: Path) -> None:
    """To its last half, when it is too long."""
    log = open_log(str(tmp_path / "log"))
    os.write(log, b"x" * 600 + b"y" * 600)
    cut_log(log, 2000)
    assert (tmp_path / "log").stat().st_size == 1200
    cut_log(log, 1000)
    assert (tmp_path / "log").read_bytes() == b"[the log was cut here]\n" + b"y" * 500
    os.close(log)


def test_a_front_travels_alone() -> None:
    """The text holds all modules that it needs, and runs without the package."""
    program = guest_program.program("guest.commands.pushed")
    folder = json.dumps({"folder": "/tmp", "workdir": "/", "variable": "MARKER"})
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, "setup", folder],
        capture_output=True,
        env={"MARKER": "here"},
        timeout=LIMIT,
        cwd="/",
    )
    assert done.stdout.startswith(b"r"), done.stderr
    assert len(program) < 128 * 1024  # the longest argument that Linux takes
