"""Virtual environments for tests with other packages than the main one has."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(folder: Path, wanted: list[str]) -> str:
    """The interpreter of a virtual environment with these requirements. It is made with uv or else
    pip, and made again when it has others."""
    python, stamp = folder / "bin" / "python", folder / "requirements"
    text = "\n".join([sys.version, *wanted])
    if not stamp.exists() or stamp.read_text() != text:
        print(f"Installing into {folder.name}: {' '.join(wanted)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([*_installer(python), *wanted], cwd=ROOT, check=True)
        stamp.write_text(text)
    elif (ROOT / "pyproject.toml").stat().st_mtime > stamp.stat().st_mtime:
        # Entry points are read from what was installed.
        subprocess.run([*_installer(python), "--no-deps", "-e", "."], cwd=ROOT, check=True)
        stamp.touch()
    return str(python)


def _installer(python: Path) -> list[str]:
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    if shutil.which("uv"):
        return ["uv", "pip", "install", "--quiet", "--python", str(python)]
    return [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
