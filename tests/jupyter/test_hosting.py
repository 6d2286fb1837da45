"""What a kernel's command line and settings mean for its sandbox."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from sandbox_kernel.errors import SpecError
from sandbox_kernel.jupyter import hosting
from sandbox_kernel.jupyter.configuration import read_configuration
from sandbox_kernel.spec import SandboxSpec

ARGV = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


def test_the_interpreter_of_the_spec_runs_the_kernel() -> None:
    """Jupyter makes its own interpreter of a kernelspec's `python`; the spec's is meant."""
    spec = SandboxSpec(python="/opt/other/bin/python")
    assert hosting.with_interpreter([sys.executable, *ARGV], spec) == [
        "/opt/other/bin/python",
        *ARGV,
    ]
    assert hosting.with_interpreter(["xpython", *ARGV], spec) == ["xpython", *ARGV]
    assert hosting.with_interpreter([sys.executable], SandboxSpec()) == [sys.executable]


def test_the_environment_that_a_command_line_names_is_shown() -> None:
    """A Python brings its packages; the system's programs are there anyway."""
    spec = SandboxSpec(name="s")
    assert hosting.show_program(spec, [sys.executable]).python == sys.executable
    assert hosting.show_program(spec, ["/usr/bin/env"]) == spec
    assert hosting.show_program(spec, ["no-such-program-anywhere"]) == spec
    assert hosting.show_program(spec, ["/nowhere/bin/kernel"]) == spec


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
        return hosting.show_program(SandboxSpec(name="s", readable=("/srv",)), argv).readable[1:]

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
        hosting.show_program(SandboxSpec(name="s"), [made])


def test_sockets_of_dead_processes_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder goes when it is old and nobody listens in it; one that is in use stays."""
    with tempfile.TemporaryDirectory(prefix="sk-") as runtime:
        monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", runtime)
        folders = {name: Path(runtime, f"c-{name}") for name in ("dead", "live", "young")}
        sockets = []
        for name, folder in folders.items():
            folder.mkdir()
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[-1].bind(str(folder / "c-1"))
            if name == "live":
                sockets[-1].listen()
            if name != "young":
                os.utime(folder, (0, 0))
        made = hosting.endpoint_folder()
        for one in sockets:
            one.close()
        assert {name for name, folder in folders.items() if folder.exists()} == {"live", "young"}
        assert not Path(made).exists()


def test_layers_of_settings() -> None:
    """The kernelspec is the weakest, then configuration, then the environment."""
    found = read_configuration(
        {"memory_mib": 150, "cpus": 1, "processes": 50},
        {"memory_mib": 200, "cpus": 2},
        default_name="kernel-x",
        environ={"SANDBOX_KERNEL_MEMORY_MIB": "300", "SANDBOX_KERNEL_WARM_START": "no"},
    )
    assert (found.spec.memory_mib, found.spec.cpus, found.spec.processes) == (300, 2, 50)
    assert (found.spec.name, found.named, found.warm_start) == ("kernel-x", False, False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"memory": 1}, "Did you mean 'memory_mib'"),
        ({"guest_transport": "udp"}, "guest_transport is 'ipc' or 'tcp'"),
        ({"keep_on_exit": "perhaps"}, "keep_on_exit is true or false"),
        ({"pool_size": -1}, "pool_size takes a number that is not negative"),
        ({"pool_size": "many"}, "pool_size takes a number that is not negative"),
    ],
)
def test_nonsense_is_refused(values: dict[str, object], message: str) -> None:
    """Each error names the key and says what it takes."""
    with pytest.raises(SpecError, match=message):
        read_configuration(values, default_name="k", environ={})
