"""The argv launcher: a process that looks like a kernel's, for clients without provisioners.

Such a client writes a connection file, runs a kernelspec's ``argv`` and knows its kernel only as
that process. So this one listens exactly where the file says, passes signals on to the kernel in
the sandbox, ends when the kernel or its own parent ends, and removes the sandbox then.

A client may kill its kernel's process (SIGKILL), or be killed with all its children. For this case
the launcher forks a guardian, before it has threads, which waits for its end and cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.jupyter import connections, kernel_factory
from sandbox_kernel.jupyter.companions import set_up_companions
from sandbox_kernel.jupyter.file_plan import with_folder
from sandbox_kernel.jupyter.kernel_command import guest_environment
from sandbox_kernel.jupyter.pool import starting_a_kernel
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.spec import KernelConfiguration
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks

DEFAULTS: dict[str, Any] = {"lease_seconds": 60.0}
"""Nobody re-attaches to a kernel whose launcher and guardian have died, so the lease is short."""
PARENT_INTERVAL = 1.0
SHUTDOWN_GRACE = 1.0
"""Seconds for the kernel to end after SIGTERM. Clients kill a launcher that takes long."""
DOUBLE_INTERRUPT = 3.0
_REMOVE_TIMEOUT = 60.0
_SIZE = 64 * 1024

_log = logging.getLogger(__name__)


class Guardian:
    """The launcher's side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def start(cls) -> Guardian:
        """To be called before this process has threads."""
        read, write = os.pipe()
        if os.fork():
            os.close(read)
            return cls(write)
        try:
            _wait(_become_guardian(read))
        finally:
            os._exit(0)

    def watch(self, handle: SandboxHandle) -> None:
        """End this sandbox if this process ends without doing so."""
        sandbox = {"backend": handle.backend, "name": handle.name, "sandbox_id": handle.id}
        os.write(self._fd, json.dumps(sandbox).encode() + b"\n")


def _become_guardian(read: int) -> int:
    """Leave the launcher's process group, and keep only the pipe's read end; its descriptor."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.dup2(read, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return 3


def _wait(pipe: int) -> None:
    sandboxes = b""
    while piece := os.read(pipe, _SIZE):
        sandboxes += piece
    for line in sandboxes.splitlines():
        asyncio.run(_remove(**json.loads(line)))


async def _remove(backend: str, name: str, sandbox_id: str) -> None:
    """Ignores errors: nobody reads the output of this process, and the lease ends the sandbox."""
    try:
        if Records().load(backend, name).id == sandbox_id:
            async with asyncio.timeout(_REMOVE_TIMEOUT):
                await load_backend(backend).remove(name)
    except (SandboxError, OSError):
        return


class Launcher:
    """One kernel for one connection file. Lives on the background loop.

    Cancelling ``run`` (SIGTERM) shuts the kernel down and removes the sandbox.
    """

    def __init__(
        self,
        connection_file: str,
        configuration: KernelConfiguration,
        argv: Sequence[str] = (),
        guardian: Guardian | None = None,
    ) -> None:
        self._path = connection_file
        self._guardian = guardian
        self._configuration = with_folder(configuration)
        self._argv = list(argv)
        self._kernel: SandboxedKernel | None = None
        self._parent = Parent(os.environ)
        self._by_hand = sys.stdin is not None and sys.stdin.isatty()
        self._interrupted_at = float("-inf")
        self._tasks = OwnedTasks()

    async def run(self) -> int:
        """Exit code of the kernel, as a shell would give it."""
        if self._configuration.notebook:
            raise SpecError(
                "A kernel that is started through a launcher has no saved workspace, so "
                "SANDBOX_KERNEL_WORKSPACE cannot name a notebook. Use a kernelspec with the "
                "provisioner (`sandbox-kernel install`)."
            )
        connection = connections.read_connection_file(self._path)
        running = self._tasks.start(self._run_kernel(connection))
        orphaned = self._tasks.start(self._parent.wait())
        try:
            await asyncio.wait({running, orphaned}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                _log.warning(
                    "The process that started the kernel of %s has ended, so the kernel ends, too.",
                    self._path,
                )
                return 128 + signal.SIGHUP
            code = running.result()
            return code if code >= 0 else 128 - code
        finally:
            await self._tasks.cancel()

    def on_signal(self, signum: int) -> bool:
        """Called on the background loop. False if the launcher should end."""
        if signum != signal.SIGINT:
            return False
        now = asyncio.get_running_loop().time()
        twice = now - self._interrupted_at < DOUBLE_INTERRUPT
        self._interrupted_at = now
        # Clients interrupt as often as they like; only a person at a terminal means to leave.
        if self._by_hand and (twice or self._kernel is None):
            return False
        if self._kernel is not None:
            self._tasks.start(self._interrupt(self._kernel))
        return True

    async def _run_kernel(self, connection: Mapping[str, Any]) -> int:
        endpoints = connections.addresses(connection)
        connections.check_free(endpoints)
        argv = self._argv or default_argv(self._configuration)
        with contextlib.ExitStack() as start:
            start.enter_context(starting_a_kernel())
            return await self._run_in_sandbox(argv, connection, endpoints, launched=start.close)

    async def _run_in_sandbox(
        self,
        argv: Sequence[str],
        connection: Mapping[str, Any],
        endpoints: Mapping[str, str | tuple[str, int]],
        launched: Callable[[], object],
    ) -> int:
        kernel = await kernel_factory.create_kernel(self._configuration, argv, _log)
        stays = self._configuration.pause_on_exit or self._configuration.keep_on_exit
        if self._guardian is not None and not stays:
            self._guardian.watch(kernel.handle)
        try:
            kernel.listen(endpoints)
            await kernel.launch(
                argv,
                env=guest_environment(os.environ, (), self._configuration.spec),
                cwd=kernel.handle.workdir,
                connection=connections.guest_connection(connection),
                transport=self._configuration.guest_transport,
                warm=self._configuration.warm_start,
                spare=False,  # no second kernel will be started in this sandbox
            )
            await set_up_companions(kernel, self._configuration, connection)
            self._kernel = kernel
            launched()
            return await kernel.wait()
        except asyncio.CancelledError:
            await self._shut_down(kernel)
            raise
        finally:
            self._kernel = None
            await kernel_factory.remove_kernel(kernel)

    async def _shut_down(self, kernel: SandboxedKernel) -> None:
        if self._kernel is None:
            return
        with contextlib.suppress(SandboxError, TimeoutError):
            # A kernel that does not end in time ends with the sandbox, right after this.
            async with asyncio.timeout(SHUTDOWN_GRACE):
                await kernel.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SHUTDOWN_GRACE):
                await kernel.wait()

    async def _interrupt(self, kernel: SandboxedKernel) -> None:
        try:
            await kernel.send_signal(signal.SIGINT)
        except SandboxError as error:
            name = kernel.handle.name
            _log.warning("The kernel in sandbox %s could not be interrupted: %s", name, error)


class Parent:
    """The process that started this one, and the one that it names in JPY_PARENT_PID."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._pid = os.getppid()
        named = environ.get("JPY_PARENT_PID", "")
        self._named = int(named) if named.isascii() and named.isdigit() else 0

    def gone(self) -> bool:
        if os.getppid() != self._pid:
            return True
        try:
            if self._named > 0:
                os.kill(self._named, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it is there, but not ours
        return False

    async def wait(self) -> None:
        """Until it has ended. There is no event for the end of a process that is no child."""
        while not self.gone():  # noqa: ASYNC110
            await asyncio.sleep(PARENT_INTERVAL)


def default_argv(configuration: KernelConfiguration) -> list[str]:
    """ipykernel, in the interpreter that the sandbox shows or, if it has its own, in that."""
    shown = load_backend(configuration.backend).capabilities.python
    python = (configuration.spec.python or sys.executable) if shown else "python3"
    return [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
