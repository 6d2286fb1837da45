"""The jail's own virtual environment, on top of the host's.

``pip install`` in the jail writes to it; packages that it lacks are imported from the host's. So
``python -m pip`` works with the host's pip; but the command ``pip`` of the host's environment would
install there, where nothing can be written, so the jail has its own. Without a network pip would
try for ten seconds to reach its index, and then say that it has no matching distribution, as of a
package that does not exist: a module says what is the matter.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.local.environment import PythonEnvironment

PIP_VARIABLES = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
WITHOUT_NETWORK = {"PIP_RETRIES": "0"}

_PIP_MODULE = "_sandbox_pip"
# Loads it in ``python -m pip``, and in nothing else.
_PIP_MODULE_LOADED = f'"pip" in getattr(sys, "orig_argv", ())[1:3] and __import__("{_PIP_MODULE}")'
_PARENT_PTH = "zzz_sandbox_parent.pth"  # last: an editable install in the jail comes before it

_PIP_COMMAND = """\
#!{python}
import runpy, sys
import {module}
try:
    runpy.run_module("pip", run_name="__main__", alter_sys=False)
except ImportError as error:
    sys.exit("pip cannot be run in this sandbox: %s" % error)
"""

_PIP_MODULE_SOURCE = '''\
"""Says after a failed ``pip install`` that this sandbox has no network. Needs Python 3.9."""
import os
import sys

NOTE = """
NOTE: this sandbox has no network, so pip cannot reach a package index. Install the package on
the host, in the environment of this kernel, and restart the kernel:
    {host} -m pip install NAME
Or let the sandbox reach the host's package index, and nothing else: egress=["@pip"] in the
settings of this kernel (sandbox-kernel install local --egress @pip).
What is in the sandbox can be installed as always: wheels and folders by their path, or
--no-index --find-links FOLDER."""
COMMANDS = ("install", "download", "wheel")


def _exit(status=None, leave=sys.exit):
    asked = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    alone = "HTTPS_PROXY" not in os.environ and "--no-index" not in sys.argv
    if status and alone and asked and asked[0] in COMMANDS:
        print(NOTE, file=sys.stderr, flush=True)
    leave(status)


sys.exit = _exit
'''


def overlay_venv(environment: PythonEnvironment, folder: Path, target: str) -> str:
    """Make (or refresh) the jail's own virtual environment; returns its interpreter's path there.

    ``folder`` on the host is what the jail sees, writable, as ``target``. The overlay has the
    base interpreter of ``environment`` and its packages behind its own: ``pip install`` in the
    jail writes here and wins, and what is installed on the host is seen by the next process. An
    environment without pip gets it from ensurepip's wheel; if there is none either, the jail has
    no pip.

    Packages that were installed here before are kept. The folder may hold anything that code in
    the jail made of it, so nothing is followed: a link where a folder should be is replaced.
    """
    major, minor = environment.version
    parents = [*(environment.site_packages if environment.is_venv else ()), environment.user_site]
    see_base = environment.system_site or not environment.is_venv
    statements = [f"site.addsitedir({path!a})" for path in parents if path]
    if environment.pip_wheel:
        # site runs a virtual environment's .pth files twice, but adds a folder once only.
        statements.append(f"sys.path.extend({{{environment.pip_wheel!a}}}.difference(sys.path))")
    statements.append(_PIP_MODULE_LOADED)
    interpreter = f"{target.rstrip('/')}/bin/python"
    configuration = (
        f"home = {os.path.dirname(environment.base_executable)}\n"
        f"include-system-site-packages = {'true' if see_base else 'false'}\n"
        f"version = {major}.{minor}\n"
        f"executable = {environment.base_executable}\n"
    )

    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, root)
        try:
            binaries = _enter(stack, root, "bin")
            for name in ("python", "python3", f"python{major}.{minor}"):
                _replace_link(binaries, name, environment.base_executable)
            command = _PIP_COMMAND.format(python=interpreter, module=_PIP_MODULE)
            for name in ("pip", f"pip{major}", f"pip{major}.{minor}"):
                _replace_file(binaries, name, command, 0o755)
            site = root
            for name in ("lib", f"python{major}.{minor}", "site-packages"):
                site = _enter(stack, site, name)
            _replace_link(root, "lib64", "lib")
            module = _PIP_MODULE_SOURCE.replace("{host}", environment.executable)
            _replace_file(site, f"{_PIP_MODULE}.py", module)
            _replace_file(site, _PARENT_PTH, "; ".join(["import site, sys", *statements]) + "\n")
            _replace_file(root, "pyvenv.cfg", configuration)
        except OSError as error:
            raise SandboxError(
                f"The virtual environment of the jail could not be written to {folder}: {error}. "
                f"Delete that folder to start with a new one."
            ) from error
    return interpreter


def _enter(stack: contextlib.ExitStack, parent: int, name: str) -> int:
    """A descriptor of the real folder ``name``, made if it is not there."""
    for _ in range(3):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            continue
        stack.callback(os.close, fd)
        return fd
    raise NotADirectoryError(errno.ENOTDIR, "keeps being replaced", name)


def _replace_link(folder: int, name: str, text: str) -> None:
    with contextlib.suppress(OSError):
        if os.readlink(name, dir_fd=folder) == text:
            return
    with _replacing(folder, name) as temporary:
        os.symlink(text, temporary, dir_fd=folder)


def _replace_file(folder: int, name: str, text: str, mode: int = 0o644) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with _replacing(folder, name) as temporary:
        fd = os.open(temporary, flags, mode, dir_fd=folder)
        with open(fd, "w") as file:
            file.write(text)


@contextlib.contextmanager
def _replacing(folder: int, name: str) -> Iterator[str]:
    """The name of what then takes the place of ``name``."""
    temporary = f".{name}-{os.urandom(8).hex()}"
    yield temporary
    try:
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise
