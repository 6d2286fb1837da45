"""A warm kernel: an interpreter that has imported ipykernel and waits to be forked.

The agent starts the kernel's own command line (``python -m ipykernel_launcher -f FILE``) with this
folder on PYTHONPATH, so this module runs after ``site`` and before the program. It imports what
every kernel imports, before any thread or ZMQ context exists, and then forks a kernel for each
request of the agent. In the child it simply returns: the interpreter goes on to its program as if
nothing had been, with the right argv, sys.path, name and working directory.

Requests come over a SOCK_SEQPACKET socket: JSON ``{"env": {...}, "cwd": "..."}`` with stdin,
stdout and stderr as descriptors. With ``"layer": true`` a layer of Landlock follows, which the
kernel is to get. With ``"spare": {...}`` the kernel stops in its start (``spare.py``), and the
socket on which it gets its identity comes last. The answer is ``{"pid": n}``, or
``{"stale": true}`` if the packages have changed since they were imported: then this process ends,
and the agent starts another.

Without a socket it is the first step of a kernel that is started plainly, and only lets the
packages in that the image lacks. They come last on ``sys.path``, and neither the kernel's
environment nor its children know of them.
"""

import importlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List

# As in __init__.py, which cannot be imported from here.
FD_VARIABLE = "SANDBOX_KERNEL_WARM_FD"
SAVED_VARIABLE = "SANDBOX_KERNEL_SAVED_PYTHONPATH"
PACKAGES_VARIABLE = "SANDBOX_KERNEL_PACKAGES"
MAX_REQUEST = 2**20
PR_SET_DUMPABLE = 4
LANDLOCK_RESTRICT_SELF = 446
HIGH_FD = 500

# What a kernel has imported by the time that it has run its first cell.
MODULES = (
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "IPython.utils.wildcard",
    "encodings.idna",
    "faulthandler",
    "psutil",
    "pydoc",
    "runpy",
    "sqlite3",
    "tornado.locks",
    "tornado.platform.asyncio",
    "tornado.queues",
)


def hide() -> None:
    """Take this module out of the interpreter, and let the environment's own one in; then the
    packages that the image lacks, behind all that it has."""
    packages = os.environ.pop(PACKAGES_VARIABLE, "")
    folder = os.path.dirname(__file__)
    sys.path[:] = [path for path in sys.path if path != folder]
    sys.path_importer_cache.pop(folder, None)
    saved = os.environ.pop(SAVED_VARIABLE)
    if saved:
        os.environ["PYTHONPATH"] = saved
    else:
        os.environ.pop("PYTHONPATH", None)
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        sys.modules["sitecustomize"] = ours  # which its importer is about to look up
    finally:
        if packages:
            sys.path.append(packages)


def become(request: "Any", fds: "List[int]", spare: "Any", modules: "Any") -> None:
    """In a fork: take on what the request says."""
    import ctypes
    import fcntl
    import socket

    libc = ctypes.CDLL(None)
    if request.get("layer") and libc.syscall(LANDLOCK_RESTRICT_SELF, fds[3], 0) != 0:
        raise OSError("the layer of Landlock was refused")
    identity = None
    if "spare" in request:
        # Out of the way, so that the kernel's other descriptors get their usual numbers.
        identity = fcntl.fcntl(fds[-1], fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    for target, source in enumerate(fds[:3]):
        os.dup2(source, target)
    for source in fds:
        os.close(source)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if identity is not None:
        spare.arm(socket.socket(fileno=identity), request["spare"], modules)
    else:
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def serve(fd: int, spare: "Any") -> None:
    """Fork a kernel a request. Returns in each kernel, never in this process."""
    import ctypes
    import gc
    import json
    import signal
    import socket

    # Kernels run under the same user: none may change what later ones are made from. What is left
    # of an earlier one has a moment until here, unless it is under Landlock.
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    gc.disable()  # nothing that is imported will be garbage
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:  # another version of ipykernel; the kernel will import what it needs
            pass
    gc.freeze()
    if len(os.listdir("/proc/self/task")) != 1:
        os._exit(1)  # a module has started a thread, which no fork would have
    sock = socket.socket(fileno=fd)
    modules = spare.Fingerprint()
    while True:
        message, fds, _, _ = socket.recv_fds(sock, MAX_REQUEST, 5)
        if not message:
            os._exit(0)
        if not modules.unchanged():
            sock.send(json.dumps({"stale": True}).encode())
            os._exit(0)
        request = json.loads(message)
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            for other in fds:
                os.close(other)
            continue
        # The kernel becomes an orphan and thereby a child of the agent, which reaps orphans.
        leads, leading = os.pipe()
        pid = os.fork()
        if pid:
            os.close(leading)
            os.read(leads, 1)  # ends when the kernel leads a group, which can be signalled
            sock.send(json.dumps({"pid": pid}).encode())
            os._exit(0)
        os.setsid()
        os.close(leads)
        os.close(leading)
        sock.close()
        try:
            become(request, fds, spare, modules)
        except BaseException:  # noqa: BLE001 - whatever it is, this process ends
            os._exit(1)  # it must not go on half made
        signal.set_wakeup_fd(-1)
        gc.unfreeze()
        gc.enable()
        return


def load_spare() -> "Any":
    """``spare.py``, which outlives this module and is not in ``sys.modules``. This folder may be in
    an archive."""
    module = importlib.import_module("spare")
    del sys.modules["spare"]
    return module


if SAVED_VARIABLE in os.environ:
    _fd = os.environ.pop(FD_VARIABLE, None)
    if _fd is None:
        hide()
    else:
        try:
            _spare = load_spare()
            hide()
            serve(int(_fd), _spare)
        except BaseException:  # noqa: BLE001 - whatever it is, this process ends
            os._exit(1)  # and does not go on as a kernel that nobody knows of
    # Now this is a kernel; what is left of us is an empty module.
    for _name in [name for name in globals() if not name.startswith("__")]:
        del globals()[_name]
    del _name
