"""Kernelspecs: what the wheel ships, what ``sandbox-kernel install`` writes, lists and removes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ipykernel.kernelspec import get_kernel_dict
from jupyter_core import paths as jupyter_paths

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.jupyter.kernelspec import (
    list_kernelspecs,
    remove_kernelspec,
    write_kernelspec,
)

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "kernelspecs" / "sandbox"
LOGOS = {"logo-32x32.png", "logo-64x64.png", "logo-svg.svg"}


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that Jupyter searches, and nothing else."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr(jupyter_paths, "ENV_JUPYTER_PATH", [])
    monkeypatch.setattr(jupyter_paths, "SYSTEM_JUPYTER_PATH", [])
    return str(tmp_path)


def kernel_json(folder: str | Path) -> dict[str, Any]:
    kernel: dict[str, Any] = json.loads((Path(folder) / "kernel.json").read_text())
    return kernel


def provisioner_config(folder: str | Path) -> Any:
    return kernel_json(folder)["metadata"]["kernel_provisioner"]["config"]


def other_projects_spec(prefix: str, name: str) -> Path:
    folder = Path(prefix, "share", "jupyter", "kernels", name)
    folder.mkdir(parents=True)
    spec = {"argv": ["other", "{connection_file}"], "display_name": "Other", "language": "x"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    return folder


# --- what is shipped -----------------------------------------------------------------------------


def test_shipped_spec_differs_from_ipykernels_only_in_name_and_provisioner() -> None:
    """A sandboxed kernel offers what a local one does: debugger, encryption, protocol."""
    ours, theirs = kernel_json(SHIPPED), get_kernel_dict()
    provisioner = ours["metadata"].pop("kernel_provisioner")
    assert provisioner == {"provisioner_name": "sandbox", "config": {"backend": "local"}}
    assert ours.pop("display_name") == "Python 3 (sandbox)"
    del theirs["display_name"]
    ours["argv"][0] = theirs["argv"][0]
    # Encryption came with ipykernel 7; an older one says nothing about it.
    theirs["metadata"].setdefault("supported_encryption", ["curve"])
    theirs.setdefault("kernel_protocol_version", "5.5")
    assert ours == theirs


def test_shipped_logos_are_pngs_of_the_sizes_in_their_names() -> None:
    """Jupyter front ends pick a logo by its file name."""
    for size in (32, 64):
        head = (SHIPPED / f"logo-{size}x{size}.png").read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert [int.from_bytes(head[at : at + 4], "big") for at in (16, 20)] == [size, size]


def test_wheel_ships_the_spec_for_jupyter_and_as_template(tmp_path: Path) -> None:
    """Both copies in the wheel come from the one folder in the repository."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for file in SHIPPED.iterdir():
            copies = [n for n in archive.namelist() if n.endswith(f"/{file.name}")]
            assert len(copies) == 2
            assert any(
                n.endswith(f".data/data/share/jupyter/kernels/sandbox/{file.name}") for n in copies
            )
            assert f"sandbox_kernel/jupyter/resources/{file.name}" in copies
            assert {archive.read(n) for n in copies} == {file.read_bytes()}


# --- writing -------------------------------------------------------------------------------------


def test_default_request_writes_the_shipped_spec(prefix: str) -> None:
    """``sandbox-kernel install local`` restores what the wheel installed."""
    folder = write_kernelspec(prefix=prefix)
    assert Path(folder) == Path(prefix, "share/jupyter/kernels/sandbox")
    assert kernel_json(folder) == kernel_json(SHIPPED)
    assert {p.name for p in Path(folder).iterdir()} == LOGOS | {"kernel.json"}


def test_spec_keys_are_written_as_plain_json(prefix: str) -> None:
    """Values may come as strings from the command line; the file has numbers, lists and maps."""
    folder = write_kernelspec(
        name="sandbox-small",
        display_name="Small",
        config={"memory_mib": "512", "readable": ("/srv",), "env": ["A=1"], "cpus": None},
        prefix=prefix,
    )
    assert kernel_json(folder)["display_name"] == "Small"
    assert provisioner_config(folder) == {
        "backend": "local",
        "memory_mib": 512,
        "readable": ["/srv"],
        "env": {"A": "1"},
    }


def test_only_a_sandbox_name_that_was_asked_for_is_written(prefix: str) -> None:
    """Kernels of one spec must not all claim the same sandbox."""
    assert "name" not in provisioner_config(write_kernelspec(prefix=prefix))
    named = write_kernelspec(config={"name": "mine"}, prefix=prefix)
    assert provisioner_config(named)["name"] == "mine"


def test_user_install_goes_to_jupyters_data_folder(prefix: str) -> None:
    """``--user`` is for machines whose environment cannot be written to."""
    folder = write_kernelspec(user=True)
    assert Path(folder) == Path(prefix, "user", "kernels", "sandbox")
    with pytest.raises(SpecError, match="not to both"):
        write_kernelspec(user=True, prefix=prefix)


def test_another_languages_kernel_claims_nothing_of_ipykernels(prefix: str) -> None:
    """Debugger and encryption are ipykernel's; a bash kernel has neither."""
    argv = ["python", "-m", "bash_kernel", "-f", "{connection_file}"]
    folder = write_kernelspec(name="sandbox-bash", argv=argv, language="bash", prefix=prefix)
    kernel = kernel_json(folder)
    assert (kernel["argv"], kernel["language"]) == (argv, "bash")
    assert kernel["display_name"] == "Bash (sandbox)"
    assert set(kernel["metadata"]) == {"kernel_provisioner"}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"config": {"memory_mb": 1}}, "Did you mean 'memory_mib'"),
        ({"config": {"memory_mib": "lots"}}, "takes a whole number"),
        ({"config": {"backend": "local"}}, "unknown key 'backend'"),
        ({"backend": "nowhere"}, "no sandbox backend 'nowhere'"),
        ({"name": "../escape"}, "A kernel name"),
        ({"argv": ["kernel"]}, "{connection_file}"),
    ],
)
def test_wrong_request_writes_nothing(prefix: str, request_: dict[str, Any], message: str) -> None:
    """A mistake shows when the spec is installed, not when a kernel is started."""
    with pytest.raises(SpecError, match=message):
        write_kernelspec(**request_, prefix=prefix)
    assert not Path(prefix, "share").exists()


def test_another_projects_spec_is_never_replaced(prefix: str) -> None:
    """``--name python3`` would otherwise take the plain kernel away."""
    folder = other_projects_spec(prefix, "python3")
    before = kernel_json(folder)
    with pytest.raises(SpecError, match="not sandbox-kernel's"):
        write_kernelspec(name="python3", prefix=prefix)
    assert kernel_json(folder) == before


def test_own_spec_is_replaced(prefix: str) -> None:
    """Installing again is how a spec is changed."""
    write_kernelspec(config={"cpus": 1}, prefix=prefix)
    folder = write_kernelspec(config={"cpus": 2}, prefix=prefix)
    assert provisioner_config(folder) == {"backend": "local", "cpus": 2.0}


# --- launcher specs ------------------------------------------------------------------------------


def test_launcher_spec_has_the_request_beside_it(prefix: str) -> None:
    """Clients that ignore provisioners just run argv, with this very interpreter. Every user of
    the host sees that, so the request, with the variables in it, lies in a file."""
    request = {"cpus": 1.5, "env": {"TOKEN": "hunter2"}}
    folder = write_kernelspec(launcher=True, config=request, prefix=prefix)
    kernel = kernel_json(folder)
    assert "kernel_provisioner" not in kernel["metadata"]
    assert kernel["argv"] == [
        *(sys.executable, "-E", "-P", "-m", "sandbox_kernel", "launch", "-f", "{connection_file}"),
        *("--config-file", f"{folder}/launch.json"),
    ]
    assert json.loads(Path(folder, "launch.json").read_text()) == {"backend": "local", **request}


@pytest.mark.parametrize(
    ("uid", "user", "mode"), [(0, False, 0o644), (0, True, 0o600), (5, False, 0o600)]
)
def test_who_can_read_the_request_of_a_launcher(
    prefix: str, monkeypatch: pytest.MonkeyPatch, uid: int, user: bool, mode: int
) -> None:
    """Who installs it, but if root does so for an environment, everybody who uses that."""
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    folder = write_kernelspec(launcher=True, user=user, prefix=None if user else prefix)
    assert Path(folder, "launch.json").stat().st_mode & 0o777 == mode


def test_a_launcher_that_depends_on_variables_is_refused(prefix: str, tmp_path: Path) -> None:
    """A package that is found by PYTHONPATH only would be looked for in the notebook's folder."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sandbox_kernel").symlink_to(ROOT / "sandbox_kernel")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    paths = [str(tmp_path / "lib"), *(p for p in sys.path if p.endswith("site-packages"))]
    code = "from sandbox_kernel.jupyter.kernelspec import write_kernelspec as w; w(launcher=True)"
    ran = subprocess.run(
        [venv / "bin/python", "-c", code],
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "by PYTHONPATH only" in ran.stderr
    assert not list(venv.rglob("kernel.json"))


def test_launcher_passes_another_kernels_command_line_on(prefix: str) -> None:
    """What follows ``--`` is run in the sandbox."""
    argv = ["bash-kernel", "{connection_file}"]
    folder = write_kernelspec(name="bash", launcher=True, argv=argv, language="bash", prefix=prefix)
    assert kernel_json(folder)["argv"][-3:] == ["--", *argv]


# --- listing and removing ------------------------------------------------------------------------


def test_list_shows_own_specs_of_both_kinds_only(prefix: str) -> None:
    """Other projects' specs and broken ones are none of our business."""
    other_projects_spec(prefix, "other")
    (other_projects_spec(prefix, "broken") / "kernel.json").write_text("{")
    write_kernelspec(config={"cpus": 1}, prefix=prefix)
    write_kernelspec(name="sandbox-launch", launcher=True, prefix=prefix)
    found = list_kernelspecs()
    assert [(s.name, s.launcher, s.backend) for s in found] == [
        ("sandbox", False, "local"),
        ("sandbox-launch", True, "local"),
    ]
    assert found[0].config == {"backend": "local", "cpus": 1.0}
    assert found[0].display_name == "Python 3 (sandbox, 1 CPU)"


@pytest.mark.parametrize("launcher", [False, True])
def test_own_spec_is_removed(prefix: str, launcher: bool) -> None:
    """Both kinds can be taken away again."""
    folder = write_kernelspec(launcher=launcher, prefix=prefix)
    assert remove_kernelspec("sandbox") == folder
    assert not Path(folder).exists()
    assert list_kernelspecs() == []


def test_other_or_missing_spec_is_not_removed(prefix: str) -> None:
    """Removing says why it did not, and what to do."""
    folder = other_projects_spec(prefix, "other")
    with pytest.raises(SpecError, match="jupyter kernelspec remove other"):
        remove_kernelspec("other")
    assert folder.exists()
    write_kernelspec(prefix=prefix)
    with pytest.raises(SandboxError, match=r"no kernelspec 'absent'.*sandbox"):
        remove_kernelspec("absent")


def test_no_two_kernels_are_shown_alike(prefix: str) -> None:
    """Somebody installs a second kernel, with other limits: in the launcher its card says what
    differs, also if nothing but its name does. A title that is there already is refused."""

    def shown(**options: Any) -> str:
        title: str = kernel_json(write_kernelspec(prefix=prefix, **options))["display_name"]
        return title

    assert shown() == "Python 3 (sandbox)"
    small = {"memory_mib": 512, "cpus": 1}
    assert shown(name="small", config=small) == "Python 3 (sandbox, 512 MiB, 1 CPU)"
    assert shown(name="small", config=small) == "Python 3 (sandbox, 512 MiB, 1 CPU)"
    assert shown(name="alike", config=small) == "Python 3 (sandbox, 512 MiB, 1 CPU, alike)"
    assert shown(name="other") == "Python 3 (sandbox, other)"
    files = {"upload": "folder", "mirror": True}
    assert shown(name="files", config=files) == "Python 3 (sandbox, upload, mirror)"
    assert shown(name="vscode", launcher=True) == "Python 3 (sandbox, launcher)"
    with pytest.raises(SpecError, match="'other' is already shown as"):
        shown(name="third", display_name="Python 3 (sandbox, other)")
