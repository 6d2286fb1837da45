"""Starts programs on the host so that none of them obeys its working folder.

The working folder of a Jupyter process is often the notebook's, and anybody may have written files
there: the notebook's author, or a sandbox whose files are mirrored. Python imports from it (``-m``,
``-c``, an empty or relative element of PYTHONPATH), PATH finds programs in it and LD_LIBRARY_PATH
libraries. This module leaves all of these out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ISOLATION = ("-E", "-P")
"""Options for an interpreter in a foreign environment: it ignores PYTHON* variables and does not
import from the working folder. Unlike ``-I`` they keep packages of ``pip install --user``."""

_CHECK_TIMEOUT = 60.0


def own_python(*arguments: str) -> list[str]:
    """The command line of this interpreter. Give ``host_environment`` along with it."""
    return [sys.executable, "-P", *arguments]


def host_environment() -> dict[str, str]:
    """This process's environment for another process, with absolute search paths only."""
    env = dict(os.environ)
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        kept = absolute(env.pop(name, ""))
        if kept:
            env[name] = kept
    return env


def find_program(name: str) -> str | None:
    """The program's path, by the absolute elements of PATH; None if there is none."""
    return shutil.which(name, path=absolute(os.environ.get("PATH", os.defpath)) or os.defpath)


def run_program(
    command: Sequence[str], timeout: float, *, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program without input to its end, by default in ``host_environment``, and return its
    output as text. Whatever its exit code; subprocess.TimeoutExpired after ``timeout`` seconds."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        env=host_environment() if env is None else env,
        check=False,
        **options,
    )


def importable_in_isolation() -> bool:
    """Whether an interpreter with ``ISOLATION`` can import this package: true if it is installed,
    false if it is only on PYTHONPATH."""
    command = [sys.executable, *ISOLATION, "-c", "import sandbox_kernel"]
    return run_program(command, _CHECK_TIMEOUT, env=os.environ, cwd="/").returncode == 0


def absolute(paths: str) -> str:
    """The absolute elements of a search path."""
    return os.pathsep.join(path for path in paths.split(os.pathsep) if os.path.isabs(path))
