"""install, list and uninstall: kernels that people choose in Jupyter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .running import Cli


@pytest.fixture
def prefix(cli: Cli, tmp_path: Path) -> Path:
    """A prefix in which Jupyter, as the command sees it, finds kernels."""
    cli.env["JUPYTER_PATH"] = str(tmp_path / "share" / "jupyter")
    cli.env["JUPYTER_DATA_DIR"] = str(tmp_path / "user")
    return tmp_path


def kernel_json(prefix: Path, name: str) -> dict[str, Any]:
    path = prefix / "share" / "jupyter" / "kernels" / name / "kernel.json"
    kernel: dict[str, Any] = json.loads(path.read_text())
    return kernel


def test_install_writes_the_request(cli: Cli, prefix: Path) -> None:
    """The options become the provisioner's configuration, and the user is told how to go on."""
    options = ["--memory-mib", "512", "--env", "A=1", "--display-name", "Small"]
    ran = cli("install", "local", "--prefix", str(prefix), "--name", "small", *options)
    assert ran.returncode == 0, ran.stderr
    assert str(prefix) in ran.stdout
    assert "--kernel small" in ran.stdout
    kernel = kernel_json(prefix, "small")
    assert kernel["display_name"] == "Small"
    assert kernel["metadata"]["kernel_provisioner"]["config"] == {
        "backend": "local",
        "memory_mib": 512,
        "env": {"A": "1"},
    }


@pytest.mark.slow
def test_install_tries_the_backend_first(cli: Cli, prefix: Path) -> None:
    """Where its VMs do not boot, the user is told why, and nothing is written by itself."""
    folder = prefix / "share" / "jupyter" / "kernels" / "sandbox-boxlite"
    install = ("install", "boxlite", "--image", "python:3.12-slim", "--prefix", str(prefix))
    works = json.loads(cli("doctor", "--json", "boxlite").stdout)[0]["ok"]
    ran = cli(*install)
    assert (ran.returncode == 0, folder.exists()) == (works, works), ran.stderr
    if not works:
        assert "does not work here" in ran.stderr
        assert "kvm" in ran.stderr.lower()
        assert cli(*install, "--unchecked").returncode == 0
        assert folder.exists()


def test_install_a_launcher(cli: Cli, prefix: Path) -> None:
    """--launcher writes a kernelspec that runs `launch` with the same request."""
    cli("install", "local", "--prefix", str(prefix), "--name", "l", "--launcher", "--cpus", "1")
    argv = kernel_json(prefix, "l")["argv"]
    assert argv[1:6] == ["-E", "-P", "-m", "sandbox_kernel", "launch"]
    assert json.loads(Path(argv[-1]).read_text()) == {"backend": "local", "cpus": 1.0}


def test_install_with_another_python(cli: Cli, prefix: Path) -> None:
    """--python names the interpreter; all that is true of ipykernel stays in the kernelspec."""
    cli("install", "local", "--prefix", str(prefix), "--name", "p", "--python", sys.executable)
    kernel = kernel_json(prefix, "p")
    assert kernel["argv"][0] == "python"
    assert kernel["metadata"]["debugger"] is True
    assert kernel["metadata"]["kernel_provisioner"]["config"]["python"] == sys.executable


def test_install_another_kernel(cli: Cli, prefix: Path) -> None:
    """Behind -- stands the command line of a kernel other than ipykernel."""
    argv = ["python", "-m", "bash_kernel", "-f", "{connection_file}"]
    options = ["--prefix", str(prefix), "--name", "b", "--language", "bash"]
    cli("install", "local", *options, "--", *argv)
    kernel = kernel_json(prefix, "b")
    assert (kernel["argv"], kernel["language"]) == (argv, "bash")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["local", "--image", "python:3.12"], "cannot enforce image"),
        (["local", "--memory-mib", "much"], "memory_mib takes a whole number, not 'much'"),
        (["local", "--env", "A"], "env takes NAME=VALUE"),
        (["nowhere"], "There is no sandbox backend 'nowhere'"),
        (["local", "--name", "No Spaces"], "A kernel name has"),
        (["local", "--", "kernel"], "has no '{connection_file}'"),
    ],
)
def test_a_bad_request_writes_nothing(
    cli: Cli, prefix: Path, options: list[str], said: str
) -> None:
    """What cannot be had is refused before anything is written."""
    ran = cli("install", *options[:1], "--prefix", str(prefix), *options[1:])
    assert ran.returncode == (1 if "enforce" in said else 2)
    assert said in ran.stderr
    assert not (prefix / "share").exists()


def test_install_list_uninstall(cli: Cli, prefix: Path) -> None:
    """A kernel is listed until it is uninstalled; then it cannot be uninstalled again."""
    cli("install", "local", "--prefix", str(prefix), "--name", "here")
    assert "here" in cli("list").stdout
    listed = {spec["name"]: spec for spec in json.loads(cli("list", "--json").stdout)}
    assert set(listed["here"]) == {
        "name",
        "display_name",
        "backend",
        "launcher",
        "path",
        "config",
        "outdated",
    }
    ran = cli("uninstall", "here")
    assert (ran.returncode, ran.stdout.strip()) == (0, f"Removed {listed['here']['path']}")
    again = cli("uninstall", "here")
    assert again.returncode == 1
    assert "There is no kernelspec 'here'" in again.stderr


def test_install_for_this_user(cli: Cli, prefix: Path) -> None:
    """--user puts the kernel into the user's Jupyter folder, and excludes --prefix."""
    assert cli("install", "local", "--user", "--name", "mine").returncode == 0
    assert (prefix / "user" / "kernels" / "mine" / "kernel.json").exists()
    assert cli("install", "local", "--user", "--prefix", str(prefix)).returncode == 2


def test_install_behind_another_of_the_same_name(cli: Cli, prefix: Path) -> None:
    """The user's own 'sandbox' with less memory, while Jupyter finds another 'sandbox' first: its
    limit would be ignored in silence, so that is said."""
    assert cli("install", "local", "--prefix", str(prefix), "--name", "sandbox").returncode == 0
    ran = cli("install", "local", "--user", "--memory-mib", "512")
    assert ran.returncode == 1
    assert f"in {prefix}/share/jupyter/kernels/sandbox comes first" in ran.stderr
    assert "--name" in ran.stderr
    assert "Choose it" not in ran.stdout


def test_settings_of_the_kernel(cli: Cli, tmp_path: Path) -> None:
    """upload, mirror, pool_size and the like need no editing of kernel.json. For a launcher, which
    has no saved files, they are refused; its volume is not called a workspace."""
    into = ["--unchecked", "--prefix", str(tmp_path)]
    ran = cli("install", "local", "--upload", "folder", "--mirror", "--pool-size", "1", *into)
    assert ran.returncode == 0, ran.stderr
    kernels = tmp_path / "share" / "jupyter" / "kernels"
    kernel = json.loads((kernels / "sandbox" / "kernel.json").read_text())
    config = kernel["metadata"]["kernel_provisioner"]["config"]
    assert config == {"backend": "local", "upload": "folder", "mirror": True, "pool_size": 1}
    ran = cli("install", "local", "--launcher", "--mirror", "--name", "vscode", *into)
    assert (ran.returncode, "so mirror would do nothing" in ran.stderr) == (2, True)
    assert not (kernels / "vscode").exists()
    ran = cli("install", "local", "--volume", "v", *into)
    assert (ran.returncode, "--volume is for --launcher" in ran.stderr) == (2, True)


def test_install_with_the_notebooks_folder(cli: Cli, prefix: Path) -> None:
    """``files`` is in the kernelspec. Where it means a copy, the user is told; a launcher has
    none, and what contradicts it is refused."""
    options = ("--prefix", str(prefix), "--unchecked", "--name", "files")
    assert cli("install", "local", *options, "--files", "mount-ro").returncode == 0
    config = kernel_json(prefix, "files")["metadata"]["kernel_provisioner"]["config"]
    assert config["files"] == "mount-ro"
    ran = cli("install", "superserve", *options, "--files", "mount")
    assert "files=mount gives each new sandbox a copy" in ran.stderr
    assert cli("install", "local", *options, "--launcher", "--files", "mount").returncode == 0
    for more, why in (
        (("--launcher", "--files", "copy"), "needs a saved workspace"),
        (("--files", "copy", "--mirror"), "Leave mirror out"),
        (("--folder", "/project"), "--folder is for --launcher"),
    ):
        ran = cli("install", "local", *options, *more)
        assert ran.returncode, more
        assert why in ran.stderr
