"""Run the tests of the Jupyter Server extension with the oldest Jupyter packages that
pyproject.toml allows: ``make test-oldest``.

It installs them into ``.venv-oldest``, with uv or else pip, and rebuilds that folder when
pyproject.toml asks for other versions. The main virtual environment has the newest.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from environments import environment

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-oldest"
OLDEST = ("ipykernel", "jupyter_client", "jupyter_core", "jupyter_server", "traitlets")
"""Taken at the lower bound of pyproject.toml."""
TOOLS = (
    *("hatchling", "nbclient", "nbformat", "papermill", "pip"),
    *("pytest", "pytest-timeout", "pytest-xdist", "superserve", "trustme"),
)
"""Other packages that the tests need, at any version that pyproject.toml allows."""
TESTS = (
    "tests/server",
    "--ignore=tests/server/test_unsaved.py",  # long, and about stores, not about Jupyter
    "tests/jupyter/test_jupyter_internals.py",
    "tests/kernels/test_managers.py",
)


def main(arguments: list[str]) -> int:
    """Run pytest with ``arguments`` (default: TESTS) on the oldest packages."""
    python = environment(FOLDER, requirements())
    options = arguments or ["-n", "2", "--dist", "loadfile", "-m", "not live and not long", *TESTS]
    return subprocess.run(
        [python, "-m", "pytest", "-q", *options], cwd=ROOT, check=False
    ).returncode


def requirements() -> list[str]:
    """What to install: the oldest packages, the tools, and the project itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    bounds = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\w.]+)", "\n".join(declared), re.MULTILINE))
    pinned = [f"{name}=={bounds[name]}" for name in OLDEST]
    tools = [f"{name}>={bounds[name]}" if name in bounds else name for name in TOOLS]
    return ["-e", ".", *pinned, *tools]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
