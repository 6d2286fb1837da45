"""A spare kernel: a fork of the warm interpreter that starts up to the point where a kernel would
run its user's extensions and startup files, and waits there for its identity.

``sitecustomize.py`` loads this module before it forks, and calls ``arm`` in the fork. The fork
then runs its program as any kernel does. What depends on the kernel that it will be is put off:
its key, its entry in the history, its extensions and startup files. The identity is one message of
the agent on a SOCK_SEQPACKET socket: JSON ``{"env": {...}, "cwd": "...", "connection": {...}}``.
The answer is ``taken``; afterwards nothing of this module is left in the kernel. If
anything that a fresh kernel would find now differs from what this one found, it does not answer but
ends, and the agent starts another kernel.
"""

import ctypes
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, Dict, List

# As in __init__.py, which cannot be imported from here.
MAX_REQUEST = 2**20
READY, TAKEN = b"ready", b"taken"
PR_SET_DUMPABLE = 4
SESSION_NAME = "JPY_SESSION_NAME"


def arm(
    sock: "socket.socket",
    endpoints: "Dict[str, Any]",
    modules: "Fingerprint",
) -> None:
    """Make this process a spare: its application stops in its start and waits.

    ``endpoints`` is the connection without a key; ``modules`` is the state of what was imported
    before the fork. AttributeError or ImportError if this version of ipykernel is not known.
    """
    from ipykernel.kernelapp import IPKernelApp
    from IPython.core.history import HistoryManager

    given = dict(os.environ)
    patched: "List[Any]" = []

    def patch(owner: "Any", name: str, replacement: "Any") -> "Any":
        original = getattr(owner, name)
        patched.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, replacement)
        return original

    def restore() -> None:
        for owner, name, original in patched:
            if original is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, original)

    def load_endpoints(app: "Any") -> None:
        app.load_connection_info({**endpoints, "key": os.urandom(32).hex()})

    def wait(app: "Any") -> None:
        """In place of the first step that is put off."""
        try:
            become_a_kernel(app)
        except BaseException:  # noqa: BLE001 - whatever it is, this process ends
            os._exit(1)  # the agent starts another kernel, which reports what is wrong
        app.init_extensions()

    def become_a_kernel(app: "Any") -> None:
        files, all_modules = StartFiles(app), Fingerprint()
        if not files.harmless or not modules.unchanged():
            os._exit(0)
        sys.stdout.flush()
        sys.stderr.flush()
        restore()
        changes = differences(given, os.environ)
        sock.send(READY)
        message = sock.recv(MAX_REQUEST)
        if not message:
            os._exit(0)
        identity = json.loads(message)
        os.chdir(identity["cwd"])
        if (
            not all_modules.unchanged()
            or not files.unchanged()
            or os.getcwd() != app.shell.starting_dir
            or not changes.keys().isdisjoint(differences(given, identity["env"]))
        ):
            os._exit(0)
        set_environment(identity["env"], changes)
        app.load_connection_info(identity["connection"])
        app.shell.user_ns.pop("__session__", None)
        if os.environ.get(SESSION_NAME):
            app.shell.user_ns["__session__"] = os.environ[SESSION_NAME]
        app.shell.history_manager.new_session()
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        sock.send(TAKEN)
        sock.close()

    patch(IPKernelApp, "init_connection_file", load_endpoints)
    patch(IPKernelApp, "write_connection_file", lambda app: None)
    patch(IPKernelApp, "init_extensions", wait)
    patch(HistoryManager, "new_session", lambda history, conn=None: None)


class Fingerprint:
    """The state of the files that an interpreter has imported, and of the folders in which it
    looks for them."""

    def __init__(self) -> None:
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        self._paths = [path for path in [*sys.path, *sorted({f for f in files if f})] if path]
        self._state = self._look()

    def _look(self) -> "List[Any]":
        state: "List[Any]" = []
        for path in self._paths:
            try:
                found = os.stat(path)
                state.append((found.st_mtime_ns, found.st_size))
            except OSError:
                state.append(None)
        return state

    def unchanged(self) -> bool:
        """Would a fresh interpreter find the same modules?"""
        return self._look() == self._state


class StartFiles:
    """The files that a kernel reads or opens in its start, besides modules."""

    def __init__(self, app: "Any") -> None:
        manager = app.shell.history_manager
        self._history = str(manager.hist_file)
        self._opened = self._identify()
        self._configuration = [
            os.path.join(folder, name + extension)
            for folder in app.config_file_paths
            for name in ("ipython_config", "ipython_kernel_config")
            for extension in (".py", ".json")
        ]
        self.harmless = not app.loaded_config_files and (
            self._opened is not None or not manager.enabled
        )
        """There is no code among them, which would have to run when the kernel starts; and the
        history is in a file, if there is any."""

    def _identify(self) -> "Any":
        try:
            found = os.stat(self._history)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def unchanged(self) -> bool:
        """Would a kernel that starts now find the same?"""
        return self._identify() == self._opened and not any(
            map(os.path.exists, self._configuration)
        )


def differences(before: "Any", after: "Any") -> "Dict[str, Any]":
    """The variables that differ, with their new values; None if they are gone."""
    names = {*before, *after}
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def set_environment(environment: "Dict[str, str]", changes: "Dict[str, Any]") -> None:
    """Set the environment, with the changes that the kernel's own start has made to it."""
    os.environ.clear()
    os.environ.update(environment)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
