"""The command line itself: help, usage errors, options, completion, exit codes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_kernel import __version__
from sandbox_kernel.cli import main
from sandbox_kernel.cli.formatting import age, table
from sandbox_kernel.cli.options import configured, given_settings
from sandbox_kernel.cli.parser import parse
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.jupyter.configuration import read_configuration, unknown_variables
from sandbox_kernel.settings import settings_of
from sandbox_kernel.spec import KernelConfiguration, SandboxSpec
from sandbox_kernel.untrusted_text import printable

from .running import Cli

_VARIABLE = re.compile(r"\bSANDBOX_KERNEL_[A-Z_]*[A-Z]\b")
COMMANDS = (
    *("install", "uninstall", "list", "doctor", "ps", "stats", "rm", "pause", "resume"),
    *("logs", "exec", "shell", "cp", "run", "launch", "image", "workspace", "gateway"),
    *("policy", "completion"),
)


def test_version(cli: Cli) -> None:
    """--version names the version of the package."""
    assert cli("--version").stdout == f"sandbox-kernel {__version__}\n"


def test_help_lists_every_command(cli: Cli) -> None:
    """The help of the whole lists the commands and the exit codes."""
    text = cli("--help").stdout
    assert all(f"\n    {command}" in text for command in COMMANDS)
    assert "130 Ctrl-C" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help has examples, and fits a terminal."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"examples:\n  sandbox-kernel {command}" in text
    description = text.split("\n\n")[1]
    assert all(len(line) <= 96 for line in description.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["ps", "--nonsense"],
        ["exec", "name"],
        ["exec", "name", "--timeout", "3"],
        ["run"],
        ["rm"],
        ["rm", "name", "--all"],
        ["ps", "--", "ls"],
        ["exec", "name", "--timeout", "-1", "--", "ls"],
        ["launch"],
        ["completion", "cmd.exe"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is exit code 2, with the usage on stderr."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: sandbox-kernel" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["exec", "policy set", "policy show", "workspace export"])
def test_a_usage_names_its_command_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    usage = capsys.readouterr().err.partition("\n")[0]
    assert usage.startswith(f"usage: sandbox-kernel {command} ")
    assert usage.count(command) == 1


def test_an_error_is_one_line(cli: Cli) -> None:
    """What goes wrong is one line on stderr, without a traceback."""
    ran = cli("logs", "nowhere")
    assert ran.returncode == 1
    # Backends that were never set up here have no sandboxes, and their advice is none for this.
    assert "API" not in ran.stderr
    assert ran.stdout == ""
    assert ran.stderr.startswith("sandbox-kernel: There is no sandbox 'nowhere'")
    assert ran.stderr.count("\n") == 1


def test_a_data_folder_that_cannot_be(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = cli("audit", env={"SANDBOX_KERNEL_DATA_DIR": str(tmp_path / "file" / "data")})
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert f"{tmp_path}/file/data cannot be used: Not a directory. Set SANDBOX" in ran.stderr


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["run", "--files", "mount-ro", "--", "true"], "the folder in which this program runs was"),
        (["ps", "--all"], ""),
    ],
)
def test_a_working_folder_that_was_deleted(
    cli: Cli, tmp_path: Path, command: list[str], error: str
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = [
        "sh",
        "-c",
        'rmdir "$0"; exec "$@"',
        str(gone),
        sys.executable,
        "-Pm",
        "sandbox_kernel",
        *command,
    ]
    ran = subprocess.run(
        words, cwd=gone, env=cli.env, capture_output=True, text=True, timeout=60, check=False
    )
    assert error in ran.stderr
    assert "Errno" not in ran.stderr
    assert ran.returncode == (2 if error else 0)


@pytest.mark.parametrize("arguments", [["--debug", "logs", "x"], ["logs", "--debug", "x"]])
def test_debug_shows_the_traceback(cli: Cli, arguments: list[str]) -> None:
    """--debug may stand anywhere and shows where an error comes from."""
    assert "Traceback" in cli(*arguments).stderr


def test_every_field_of_the_spec_is_an_option() -> None:
    """run has one option for each field, and passes on only those that are given."""
    given = parse(["run", "--", "true"])
    for name in settings_of(SandboxSpec):
        assert hasattr(given, f"setting_{name}")
    assert given_settings(given) == {}


def test_options_become_a_spec() -> None:
    """Options are read as configuration is: numbers, lists and names with values."""
    line = "--memory-mib 512 --cpus 0.5 --env A=1 --env B=x=y --egress a.org --egress b.org"
    values = given_settings(parse(["run", *line.split(), "--", "true"]))
    spec = SandboxSpec.from_mapping(values)
    assert (spec.memory_mib, spec.cpus) == (512, 0.5)
    assert spec.env == {"A": "1", "B": "x=y"}
    assert spec.egress == EgressPolicy.of("a.org", "b.org")


def test_paths_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line, paths are relative to here and python is looked up."""
    monkeypatch.chdir(tmp_path)
    values = given_settings(parse(["run", "--readable", "data", "--python", "sh", "--", "true"]))
    assert values["readable"] == [str(tmp_path / "data")]
    assert values["python"] == shutil.which("sh")


def test_nothing_behind_the_dashes_is_looked_into() -> None:
    """Options behind -- are the command's own, also if they look like ours."""
    given = parse(["exec", "name", "--", "ls", "--env", "--", "--help"])
    assert given.command == ["ls", "--env", "--", "--help"]
    assert given.env == []


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("exec name ls -l", ["ls", "-l"]),
        ("exec name --timeout 3 ls --env x", ["ls", "--env", "x"]),
        ("exec --time 3 name ls", ["ls"]),
        ("exec name --env=A=1 ls -- x", ["ls", "--", "x"]),
        ("--debug run --tty python -c 1", ["python", "-c", "1"]),
        ("run --memory-mib 512 python", ["python"]),
        ("shell name python", ["python"]),
    ],
)
def test_the_dashes_may_be_left_out(line: str, command: list[str]) -> None:
    """`exec NAME ls -l` is what everybody types first. Our own options stand before the command;
    what follows its first word is the command's."""
    assert parse(line.split()).command == command


def written(line: str) -> dict[str, object]:
    """What a command line changes, as it is written to kernel.json."""
    given = given_settings(parse(line.split()))
    config = read_configuration(given, default_name="k", environ={}).to_dict()
    return {key: value for key, value in config.items() if key not in ("name", "backend")}


def test_every_setting_of_a_kernel_is_an_option() -> None:
    """install has one option for each setting that a kernelspec can have, and passes on only
    those that are given, as the types that belong into kernel.json."""
    given = parse(["install", "local"])
    assert given_settings(given) == {}
    for name in set(settings_of(KernelConfiguration)) - {"backend"}:
        assert hasattr(given, f"setting_{name}")
    line = (
        "install local --upload folder --mirror --no-persist --pool-size 2 --idle-pause-seconds 5"
    )
    assert written(line) == {
        "upload": "folder",
        "mirror": True,
        "persist": False,
        "pool_size": 2,
        "idle_pause_seconds": 5.0,
    }
    line = "install local --upload *.csv --upload data/"
    assert written(line) == {"upload": ["*.csv", "data/"]}


def test_a_volume_is_no_saved_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    """`install --workspace` names a saved workspace; what `run --workspace` was, a folder that is
    kept, is now --volume. The old name works, and says so; also in launchers of before."""
    assert given_settings(parse(["run", "--volume", "v", "ls"])) == {"volume": "v"}
    assert capsys.readouterr().err == ""
    assert given_settings(parse(["run", "--workspace", "v", "ls"])) == {"volume": "v"}
    assert "--workspace is called --volume here" in capsys.readouterr().err
    assert given_settings(parse(["install", "local", "--workspace", "w"])) == {"workspace": "w"}
    launched = configured(parse(["launch", "-f", "x"]), {"workspace": "v"}, "k")
    assert (launched.spec.volume, launched.workspace) == ("v", None)


def test_a_slip_in_an_option_is_told(cli: Cli) -> None:
    """The usage is that of the command that was meant, and so is the option that is proposed."""
    ran = cli("install", "local", "--uplaod", "folder")
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: sandbox-kernel install BACKEND")
    assert "there is no option --uplaod; did you mean --upload?" in ran.stderr
    ran = cli("run", "--memory-mb=200", "true")
    assert (ran.returncode, "did you mean --memory-mib?" in ran.stderr) == (2, True)
    assert "unrecognized arguments: extra" in cli("ps", "extra").stderr
    assert "'isntall' is unknown. Did you mean 'install'?" in cli("isntall", "local").stderr
    assert "'biuld' is unknown. Did you mean 'build'?" in cli("image", "biuld").stderr
    assert (
        "no sandbox backend 'locl'. Did you mean 'local'?"
        in cli("run", "--backend", "locl", "ls").stderr
    )


def test_unknown_variables_are_told(cli: Cli) -> None:
    """A slip in the name of a variable is not ignored: `run`, which would make a sandbox without
    the limit, refuses, and other commands note it."""
    slip = {"SANDBOX_KERNEL_MEMORY": "512", "SANDBOX_KERNEL_FOO": ""}
    hint = "SANDBOX_KERNEL_MEMORY, which means nothing. Did you mean SANDBOX_KERNEL_MEMORY_MIB?"
    ran = cli("run", "true", env=slip)
    assert (ran.returncode, ran.stderr.count(hint)) == (2, 1)
    ran = cli("list", env=slip)
    assert (ran.returncode, ran.stderr.count(hint)) == (0, 1)


def test_our_own_variables_are_known() -> None:
    """Every variable that the sources speak of may be set."""
    sources = Path(main.__code__.co_filename).parents[1].rglob("*.py")
    named = {name for path in sources for name in _VARIABLE.findall(path.read_text())}
    assert len(named) > 10
    assert unknown_variables(dict.fromkeys(named, "1")) == []


# --- completion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid(shell: str, tmp_path: Path, cli: Cli) -> None:
    """The script names commands and options, and the shell can read it."""
    script = cli("completion", shell).stdout
    assert all(command in script for command in COMMANDS)
    assert "memory-mib" in script
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here to read it")
    (tmp_path / "script").write_text(script)
    read = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["d"], ["doctor"]),
        (["run", "--mem"], ["--memory-mib"]),
        (["install", "lo"], ["local"]),
        (["completion", "f"], ["fish"]),
        (["image", "bu"], ["build"]),
        (["logs", "ker"], ["kernel-1"]),
        (["exec", "--timeout", "3", "ker"], ["kernel-1"]),
    ],
)
def test_bash_completes(line: list[str], expected: list[str], cli: Cli, tmp_path: Path) -> None:
    """bash offers commands, options, known words and the sandboxes of that moment."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    words = " ".join(["sandbox-kernel", *line])
    script = (
        cli("completion", "bash").stdout
        + "sandbox-kernel() { echo kernel-1 run-2; };"
        + f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _shtab_sandbox_kernel;"
        + 'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert (ran.stdout.split(), ran.stderr) == (expected, "")


# --- text ----------------------------------------------------------------------------------------


def test_text_from_a_sandbox_cannot_drive_the_terminal() -> None:
    """Control characters are escaped; lines, tabs and letters of all languages stay."""
    assert printable("a\x1b]0;x\x07\r\tä\n日") == r"a\x1b]0;x\x07\r" + "\tä\n日"
    assert printable("\u202egpj.exe") == r"\u202egpj.exe"


def test_ages() -> None:
    """An age is told in its largest unit."""
    assert [age(s) for s in (-1, 3, 130, 3 * 3600, 12 * 86400)] == ["0s", "3s", "2m", "3h", "12d"]


def test_tables_are_aligned() -> None:
    """Columns are as wide as their widest cell, and lines have no trailing space."""
    assert table([("A", "B"), ("long\n", "x"), ("b", "")]) == "A      B\nlong   x\nb"
