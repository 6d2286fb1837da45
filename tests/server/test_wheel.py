"""Installing the wheel is enough: Jupyter Server finds the extension, and uses it."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from .running import JupyterServer

PROJECT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_enables_the_extension(folder: Path, tmp_path: Path) -> None:
    """A real wheel in an environment that has Jupyter Server and nothing else of ours."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
    [wheel] = tmp_path.glob("*.whl")
    place = tmp_path / "env"
    venv.create(place, with_pip=False, symlinks=True)
    python = str(place / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    install += ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    packages = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    server = JupyterServer(folder, folder / "root", python=python)
    try:
        server.start()
        assert server.get("/sandbox-kernel/api/adoption") == []
        assert "sandbox_kernel | extension was successfully loaded" in server.log
        assert "sandbox" in server.get("/api/kernelspecs")["kernelspecs"]
    finally:
        server.end(9)
