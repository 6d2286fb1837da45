"""exec, run and shell: commands in sandboxes, with our streams as theirs."""

from __future__ import annotations

import signal
import subprocess
import sys
import termios

import pytest

from .running import PROGRAM, Cli, at_terminal


def expect(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Wait until the process has printed this line."""
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"the process ended without printing {line!r}")


# --- exec ----------------------------------------------------------------------------------------


def test_exec_streams_and_exit_code(cli: Cli, jail: str) -> None:
    """stdout, stderr and the exit code are the command's."""
    ran = cli("exec", jail, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (ran.stdout, ran.stderr, ran.returncode) == ("out\n", "err\n", 3)


def test_exec_signals(cli: Cli, jail: str) -> None:
    """A command that a signal ended gives 128 and its number, as in a shell."""
    assert cli("exec", jail, "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9


def test_exec_passes_stdin(cli: Cli, jail: str) -> None:
    """Input that is no terminal goes to the command, to its end."""
    text = "".join(f"line {number}\n" for number in range(50_000))
    assert cli("exec", jail, "--", "cat", stdin=text).stdout == text


def test_exec_may_leave_its_input(cli: Cli, jail: str) -> None:
    """A command that does not read its input is no error."""
    assert cli("exec", jail, "--", "true", stdin="x" * 1_000_000).returncode == 0


def test_exec_without_stdin(cli: Cli, jail: str) -> None:
    """A closed stdin is an empty one."""
    command = [*PROGRAM, "exec", jail, "--", "wc", "-c"]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    ran = subprocess.run(closed, env=cli.env, capture_output=True, timeout=60)
    assert ran.stdout.strip() == b"0"


def test_exec_env_and_cwd(cli: Cli, jail: str) -> None:
    """--env and --cwd are for this command."""
    ran = cli("exec", jail, "--env", "A=b=c", "--cwd", "/tmp", "--", "sh", "-c", "echo $A $PWD")
    assert ran.stdout == "b=c /tmp\n"


def test_exec_output_comes_as_it_is_written(cli: Cli, jail: str) -> None:
    """A line is there before the command ends."""
    process = cli.start("exec", jail, "--", "sh", "-c", "echo now; read x", stdin=subprocess.PIPE)
    expect(process, b"now")
    process.communicate(b"go\n", timeout=60)
    assert process.returncode == 0


def test_exec_does_not_wait_for_what_is_left_behind(cli: Cli, jail: str) -> None:
    """A process in the background that holds stdout open does not keep exec from ending."""
    ran = cli("exec", jail, "--", "sh", "-c", "sleep 1000 & echo done")
    assert (ran.stdout, ran.returncode) == ("done\n", 0)


def test_exec_interrupt(cli: Cli, jail: str) -> None:
    """Ctrl-C goes to the command, which may have an answer to it."""
    script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    process = cli.start("exec", jail, "--", "sh", "-c", script)
    expect(process, b"ready")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == (b"caught\n", 5)


def test_exec_second_interrupt_ends(cli: Cli, jail: str) -> None:
    """A command that ignores Ctrl-C is ended by a second one."""
    script = "trap 'echo ignored' INT; echo ready; while :; do sleep 0.1; done"
    process = cli.start("exec", jail, "--", "sh", "-c", script)
    expect(process, b"ready")
    process.send_signal(signal.SIGINT)
    expect(process, b"ignored")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_exec_broken_pipe(cli: Cli, jail: str) -> None:
    """When nobody reads the output any more, exec ends quietly, with its command."""
    process = cli.start("exec", jail, "--", "yes", stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()


def test_exec_timeout(cli: Cli, jail: str) -> None:
    """--timeout kills the command and says so."""
    ran = cli("exec", jail, "--timeout", "0.5", "--", "sleep", "1000")
    assert ran.returncode == 1
    assert "did not end within 0.5 s" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere", "--", "true"], 1, "no sandbox 'nowhere'"),
        (["jail", "--", "no-such-program"], 1, "'no-such-program' could not be run in sandbox"),
        (["jail", "--cwd", "/nowhere", "--", "true"], 1, "/nowhere"),
        (["jail", "--env", "A", "--", "true"], 2, "--env takes NAME=VALUE"),
        (["jail", "--backend", "nowhere", "--", "true"], 2, "no sandbox backend 'nowhere'"),
        (["../x", "--", "true"], 1, "sandbox"),
    ],
)
def test_exec_errors(cli: Cli, jail: str, arguments: list[str], code: int, said: str) -> None:
    """What cannot be run is exit code 1, wrong usage 2, and one line says why."""
    ran = cli("exec", *arguments)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_exec_in_a_stopped_sandbox(cli: Cli, jail: str) -> None:
    """A sandbox that has ended says that it has, and why."""
    cli.stop(jail)
    ran = cli("exec", jail, "--", "true")
    assert ran.returncode == 1
    assert "has ended: it was stopped" in ran.stderr


# --- run -----------------------------------------------------------------------------------------


def test_run_leaves_nothing(cli: Cli, jail: str) -> None:
    """A sandbox of its own, with the limits asked for, which is gone afterwards."""
    script = "test -z $(ls) && echo $A; cat; exit 4"
    ran = cli("run", "--name", "once", "--env", "A=1", "--", "sh", "-c", script, stdin="in")
    assert (ran.stdout, ran.stderr, ran.returncode) == ("1\nin", "", 4)
    assert cli.names() == [jail]


def test_run_shows_this_python(cli: Cli, jail: str) -> None:
    """python is this interpreter's version, with its packages."""
    code = "import sys, ipykernel; print(sys.version_info[:2])"
    assert cli("run", "--", "python", "-c", code).stdout == f"{sys.version_info[:2]}\n"


@pytest.mark.parametrize(
    ("options", "code"), [(["--name", "jail"], 1), (["--image", "x"], 1), (["--cpus", "none"], 2)]
)
def test_run_refuses(cli: Cli, jail: str, options: list[str], code: int) -> None:
    """A name that is taken, or a wrong request, is an error, and nothing is made or removed. A
    wrong value is wrong usage, exit code 2, as the help says."""
    ran = cli("run", *options, "--", "true")
    assert ran.returncode == code
    assert cli.names() == [jail]


def test_options_win_over_the_environment(cli: Cli, jail: str) -> None:
    """SANDBOX_KERNEL_* sets what no option does."""
    env = {"SANDBOX_KERNEL_ENV": "A=environment", "SANDBOX_KERNEL_LABELS": "x=y"}
    command = ["--", "sh", "-c", "echo $A"]
    assert cli("run", *command, env=env).stdout == "environment\n"
    assert cli("run", "--env", "A=option", *command, env=env).stdout == "option\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_run_is_removed_when_it_is_ended(cli: Cli, jail: str, signum: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and a hang-up remove the sandbox, also if the command ignores them."""
    script = "trap '' INT TERM HUP; echo ready; while :; do sleep 0.1; done"
    process = cli.start("run", "--", "sh", "-c", script)
    expect(process, b"ready")
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert cli.names() == [jail]


# --- shell ---------------------------------------------------------------------------------------


def test_shell(cli: Cli, jail: str) -> None:
    """A shell on a terminal of the right size, which follows ours; `exit` gives the code."""
    with at_terminal(cli, "shell", jail) as terminal:
        terminal.type("echo shell=$0 size=$(stty size) term=$TERM\n")
        terminal.expect(r"shell=bash size=30 100 term=dumb")
        terminal.resize(40, 120)
        terminal.type("until [ \"$(stty size)\" = '40 120' ]; do sleep 0.1; done; echo fol''lows\n")
        terminal.expect("follows")
        terminal.type("exit 9\n")
        assert terminal.end() == 9


def test_shell_interrupt_is_a_key(cli: Cli, jail: str) -> None:
    """Ctrl-C goes to what runs in the sandbox; the shell goes on."""
    with at_terminal(cli, "shell", jail) as terminal:
        terminal.type("sh -c \"echo rea''dy; exec sleep 1000\"\n")
        terminal.expect("ready")
        terminal.type("\x03")
        terminal.type("echo on''ward\n")
        terminal.expect("onward")
        terminal.type("exit\n")
        assert terminal.end() == 0


def test_shell_runs_another_command(cli: Cli, jail: str) -> None:
    """Behind -- stands what to run instead of a shell."""
    with at_terminal(cli, "shell", jail, "--", "sh", "-c", "tty; exit 6") as terminal:
        terminal.expect("/dev/pts/")
        assert terminal.end() == 6


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_shell_restores_the_terminal(cli: Cli, jail: str, signum: signal.Signals) -> None:
    """Also when it is ended from outside."""
    with at_terminal(cli, "shell", jail, "--", "sh", "-c", "echo ready; cat") as terminal:
        terminal.expect("ready")
        assert termios.tcgetattr(terminal.fd) != terminal.before
        terminal.process.send_signal(signum)
        assert terminal.end() == 128 + signum


def test_shell_restores_the_terminal_after_an_error(cli: Cli, jail: str) -> None:
    """A sandbox that is not there leaves the terminal as it was."""
    with at_terminal(cli, "shell", "nowhere") as terminal:
        terminal.expect("no sandbox 'nowhere'")
        assert terminal.end() == 1


def test_shell_needs_a_terminal(cli: Cli, jail: str) -> None:
    """Without one, the user is shown to exec."""
    ran = cli("shell", jail)
    assert ran.returncode == 1
    assert "sandbox-kernel exec" in ran.stderr


def test_run_with_a_terminal(cli: Cli, jail: str) -> None:
    """run --tty gives the command a terminal, and removes the sandbox all the same."""
    with at_terminal(cli, "run", "--tty", "--", "sh", "-c", "stty size; tty") as terminal:
        terminal.expect(r"30 100\r\n/dev/pts/")
        assert terminal.end() == 0
    assert cli.names() == [jail]
