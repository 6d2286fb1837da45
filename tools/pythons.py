"""Run the quick tests on every Python that the project supports: ``make test-pythons``.

Each version is looked for on PATH (``python3.13``); if it is missing, uv downloads it. A version
that uv cannot download is skipped, and the result says so.
``PYTHONS="3.13 /opt/py/bin/python3.14"`` names versions or interpreters instead. Each gets its own
virtual environment (``.venv-3.13``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
MARKS = "not live and not slow and not faults and not browser"
ROOT = Path(__file__).parents[1]
DOWNLOAD = 300.0
UV = [sys.executable, "-m", "uv", "--quiet"]


def main(arguments: list[str]) -> int:
    """Run pytest with ``arguments`` (default: the quick tests) on each Python."""
    wanted = os.environ.get("PYTHONS", "").split() or list(VERSIONS)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "uv"], check=True)
    results: dict[str, str] = {}
    for name in wanted:
        interpreter = name if os.path.isabs(name) else find(name)
        if not interpreter:
            results[name] = "skipped: not installed, and uv cannot download it"
            continue
        python = environment(interpreter)
        print(f"--- {name} ({interpreter})", flush=True)
        ran = subprocess.run(
            [python, "-m", "pytest", "-q", *(arguments or ["-n", "2", "-m", MARKS])],
            cwd=ROOT,
            check=False,
        )
        results[name] = "passed" if ran.returncode == 0 else f"FAILED (pytest: {ran.returncode})"
    for name, result in results.items():
        print(f"{name}: {result}")
    tried = [result for result in results.values() if not result.startswith("skipped")]
    return 0 if tried and all(result == "passed" for result in tried) else 1


def find(version: str) -> str | None:
    """An interpreter of that version: an installed one, else one that uv downloads."""
    found = shutil.which(f"python{version}")
    if found:
        return found
    try:
        asked = [*UV, "python", "install", version]
        subprocess.run(asked, check=True, timeout=DOWNLOAD, stderr=subprocess.DEVNULL)
        asked = [*UV, "python", "find", "--no-project", version]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None


def environment(interpreter: str) -> str:
    """A virtual environment of that interpreter with the project and its test tools."""
    version = subprocess.run(
        [interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    folder = ROOT / f".venv-{version}"
    python = str(folder / "bin" / "python")
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    # If one package has no wheel yet, pip takes an hour to find versions that fit.
    subprocess.run(
        [*UV, "pip", "install", "--python", python, "-e", ".[test]"], cwd=ROOT, check=True
    )
    subprocess.run(
        [python, "-m", "bash_kernel.install", "--sys-prefix"], check=True, stdout=subprocess.DEVNULL
    )
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
