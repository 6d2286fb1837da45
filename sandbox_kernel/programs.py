"""Programs that we start on the host, so that none of them obeys the folder it is started in.

The working folder of a Jupyter process is often the notebook's, and files in there may come from
anybody: from the notebook's author, or from a sandbox whose files are mirrored. Python imports from
it when it is started by ``-m`` or ``-c``, when PYTHONPATH has an empty or relative element, and the
shell's rules find programs in it when PATH has one, and the loader libraries when LD_LIBRARY_PATH
has one. All of that is left out here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

ISOLATION = ("-E", "-P")
"""For an interpreter whose environment is somebody else's choice: no PYTHON* variable counts, and
the working folder is no place to import from. Packages of the user's (``pip install --user``) are,
unlike with ``-I``."""

_CHECK_TIMEOUT = 60.0


def own_python(*arguments: str) -> list[str]:
    """The command line of this interpreter. Give ``host_environment`` along with it."""
    return [sys.executable, "-P", *arguments]


def host_environment() -> dict[str, str]:
    """This process's environment, for another one: the search paths without what depends on the
    folder."""
    env = dict(os.environ)
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        kept = absolute(env.pop(name, ""))
        if kept:
            env[name] = kept
    return env


def find_program(name: str) -> str | None:
    """The program's path, found by the absolute elements of PATH; None if there is none."""
    return shutil.which(name, path=absolute(os.environ.get("PATH", os.defpath)) or os.defpath)


def importable_in_isolation() -> bool:
    """Whether this package is found by ``ISOLATION``. Installed ones are, also those of the user's
    and editable ones; one that only PYTHONPATH leads to is not."""
    ran = subprocess.run(
        [sys.executable, *ISOLATION, "-c", "import sandbox_kernel"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",
        timeout=_CHECK_TIMEOUT,
        check=False,
    )
    return ran.returncode == 0


def absolute(paths: str) -> str:
    """The absolute elements of a search path."""
    return os.pathsep.join(path for path in paths.split(os.pathsep) if os.path.isabs(path))
