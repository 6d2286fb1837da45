"""pip in the local jail: the jail's own, and one that says that there is no network.

The jail's virtual environment sees the pip of the host's, so ``python -m pip`` works in it; but the
command ``pip`` of the host's environment would install there, where nothing can be written.
Without a network pip would try for ten seconds to reach its index, and then say that it has no
matching distribution, as of a package that does not exist.
"""

from __future__ import annotations

MODULE = "_sandbox_pip"
"""In the jail's site-packages."""
WHEN = f'"pip" in getattr(sys, "orig_argv", ())[1:3] and __import__("{MODULE}")'
"""Python that loads it in ``python -m pip``, and in nothing else."""
VARIABLES = {"PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

_SCRIPT = """\
#!{python}
import runpy, sys
import {module}
try:
    runpy.run_module("pip", run_name="__main__", alter_sys=False)
except ImportError as error:
    sys.exit("pip cannot be run in this sandbox: %s" % error)
"""

_MODULE = '''\
"""Says after a failed ``pip install`` that this sandbox has no network. Needs Python 3.9."""
import sys

NOTE = """
NOTE: this sandbox has no network, so pip cannot reach a package index. Install the package on
the host, in the environment of this kernel, and restart the kernel:
    {host} -m pip install NAME
What is in the sandbox can be installed as always: wheels and folders by their path, or
--no-index --find-links FOLDER. A kernel of a backend with egress can reach an index."""
COMMANDS = ("install", "download", "wheel")


def _exit(status=None, leave=sys.exit):
    asked = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if status and asked and asked[0] in COMMANDS and "--no-index" not in sys.argv:
        print(NOTE, file=sys.stderr, flush=True)
    leave(status)


sys.exit = _exit
'''


def names(version: tuple[int, int]) -> tuple[str, ...]:
    """What pip is called on the command line."""
    return "pip", f"pip{version[0]}", f"pip{version[0]}.{version[1]}"


def script(python: str) -> str:
    """The command, for the jail's interpreter ``python``."""
    return _SCRIPT.format(python=python, module=MODULE)


def module(host: str) -> str:
    """The source of MODULE; ``host`` is the interpreter that the kernel's environment has there."""
    return _MODULE.replace("{host}", host)
