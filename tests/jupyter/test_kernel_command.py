"""What a kernel's command line means for its sandbox."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sandbox_kernel.errors import SpecError
from sandbox_kernel.jupyter import kernel_command
from sandbox_kernel.spec import SandboxSpec

ARGV = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


def test_the_interpreter_of_the_spec_runs_the_kernel() -> None:
    """Jupyter makes its own interpreter of a kernelspec's `python`; the spec's is meant."""
    spec = SandboxSpec(python="/opt/other/bin/python")
    assert kernel_command.with_interpreter([sys.executable, *ARGV], spec) == [
        "/opt/other/bin/python",
        *ARGV,
    ]
    assert kernel_command.with_interpreter(["xpython", *ARGV], spec) == ["xpython", *ARGV]
    assert kernel_command.with_interpreter([sys.executable], SandboxSpec()) == [sys.executable]


def test_the_environment_that_a_command_line_names_is_shown() -> None:
    """A Python brings its packages; the system's programs are there anyway."""
    spec = SandboxSpec(name="s")
    assert kernel_command.show_program(spec, [sys.executable]).python == sys.executable
    assert kernel_command.show_program(spec, ["/usr/bin/env"]) == spec
    assert kernel_command.show_program(spec, ["no-such-program-anywhere"]) == spec
    assert kernel_command.show_program(spec, ["/nowhere/bin/kernel"]) == spec


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_shows_little_more_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's program in ~/bin or ~/.local/bin made all of the home folder (or of the programs'
    data) readable, keys included. Only an environment, or a folder that clearly is an installed
    program and nothing else, is shown as a whole."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    def shown(*argv: str) -> tuple[str, ...]:
        return kernel_command.show_program(
            SandboxSpec(name="s", readable=("/srv",)), argv
        ).readable[1:]

    for alone in ("bin/kernel", ".local/bin/kernel", "project/bin/kernel", "kernel"):
        made = program(home / alone)
        (home / ".local/share").mkdir(parents=True, exist_ok=True)
        (home / "project/lib").mkdir(parents=True, exist_ok=True)
        (home / "project/secrets.txt").touch()
        assert shown(made) == (made,)

    made = program(home / "node/bin/kernel")
    for name in ("lib/x", "etc/fonts/x"):
        (home / "node" / name).parent.mkdir(parents=True)
    assert shown(made) == (str(home / "node"),)
    (home / "node/etc/npmrc").write_text("//registry.example/:_authToken=secret")
    assert shown(made) == tuple(str(home / "node" / name) for name in ("bin", "lib", "etc/fonts"))

    for mark in ("pyvenv.cfg", "conda-meta/history"):
        environment = home / f"with-{mark.partition('/')[0]}"
        made = program(environment / "bin/xcpp")
        program(environment / mark)
        assert shown(made) == (str(environment),)
        link = home / "bin" / environment.name
        link.symlink_to(made)
        assert shown(str(link)) == (str(link), str(environment))

    release = home / "julia-1.11"
    made = program(release / "bin/julia")
    for name in ("lib", "share", "LICENSE.md"):
        (release / name).mkdir()
    assert shown(made) == (str(release),)
    (release / ".netrc").touch()
    assert shown(made) == (made,)


def test_an_environment_that_is_the_home_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the field that says what may be read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    made = program(tmp_path / "bin/kernel")
    (tmp_path / "pyvenv.cfg").touch()
    with pytest.raises(SpecError, match=r"holds the home folder.*`readable`"):
        kernel_command.show_program(SandboxSpec(name="s"), [made])


def test_a_secret_does_not_come_in_as_a_variable() -> None:
    """Even if the kernelspec names the variable: the sandbox has its placeholder."""
    spec = SandboxSpec.from_mapping({"secrets": "KEY@a.example", "env": {"MINE": "1"}})
    found = kernel_command.guest_environment({"KEY": "x", "OTHER": "y"}, ["KEY", "OTHER"], spec)
    assert found == {"OTHER": "y", "MINE": "1"}
