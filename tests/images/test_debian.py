"""A real Debian image, made by the system's own tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.images import debian, image_store
from sandbox_kernel.images.build import build_image
from sandbox_kernel.images.oci import Layout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_debian_image_runs_ipykernel(tmp_path: Path) -> None:
    """Unpacked, the image has a Python that finds ipykernel and imports its compiled files."""
    try:
        debian._maker()
        debian._source()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    built = build_image("py")
    root = tmp_path / "root"
    for layer in image_store.load(built.path).layers:
        with tarfile.open(Layout(built.path).blob(layer["digest"])) as archive:
            archive.extractall(root, filter="fully_trusted")
    assert os.listdir(root / "workspace") == []
    assert not list((root / "var/lib/apt/lists").iterdir())
    if os.geteuid() or shutil.which("chroot") is None:
        pytest.skip("the image was built, but only root can look into it by chroot")
    code = (
        "import ipykernel.kernelapp, pip, zmq, sys; print(sys.version_info[:2], ipykernel.__file__)"
    )
    ran = subprocess.run(
        ["chroot", root, "python3", "-c", code], capture_output=True, text=True, timeout=300
    )
    expected = (
        f"{built.interpreter.target.python} {built.interpreter.packages}/ipykernel/__init__.py"
    )
    assert ran.stdout.strip() == expected, ran.stderr


def test_without_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing can make a Debian, the error names what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="apt install mmdebstrap"):
        build_image("py")
