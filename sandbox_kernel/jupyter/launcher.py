"""The argv launcher: a process that looks like a kernel's, for clients without provisioners.

Such a client writes a connection file, runs a kernelspec's ``argv`` and knows its kernel only as
that process. So this one listens exactly where the file says, passes signals on to the kernel in
the sandbox, ends when the kernel or its own parent ends, and takes the sandbox with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.jupyter import hosting
from sandbox_kernel.jupyter.configuration import KernelConfiguration
from sandbox_kernel.jupyter.guardian import Guardian
from sandbox_kernel.jupyter.idle import accompany
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.tunnel.endpoints import PRIORITY

DEFAULTS: dict[str, Any] = {"lease_seconds": 60.0}
"""Nobody re-attaches to a kernel whose launcher has died; if its guardian has died, too, the
sandbox need not wait for long."""
PARENT_INTERVAL = 1.0
SHUTDOWN_GRACE = 1.0
"""Seconds for the kernel to end after SIGTERM. Clients kill a launcher that takes long."""
DOUBLE_INTERRUPT = 3.0
_MAX_FILE = 2**20

_log = logging.getLogger(__name__)


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
        self._configuration = configuration
        self._argv = list(argv)
        self._kernel: SandboxedKernel | None = None
        self._parent = Parent(os.environ)
        self._by_hand = sys.stdin is not None and sys.stdin.isatty()
        self._interrupted_at = float("-inf")
        self._signalling: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Exit code of the kernel, as a shell would give it."""
        if self._configuration.notebook:
            raise SpecError(
                "A kernel that is started through a launcher has no saved workspace, so "
                "SANDBOX_KERNEL_WORKSPACE cannot name a notebook. Use a kernelspec with the "
                "provisioner (`sandbox-kernel install`)."
            )
        connection = read_connection_file(self._path)
        hosting_kernel = asyncio.ensure_future(self._host(connection))
        orphaned = asyncio.ensure_future(self._parent.wait())
        try:
            await asyncio.wait({hosting_kernel, orphaned}, return_when=asyncio.FIRST_COMPLETED)
            if not hosting_kernel.done():
                _log.warning("The process that started this kernel has ended, so it ends, too.")
                hosting_kernel.cancel()
                await asyncio.wait({hosting_kernel})
                return 128 + signal.SIGHUP
            code = hosting_kernel.result()
            return code if code >= 0 else 128 - code
        finally:
            for task in (orphaned, hosting_kernel):
                task.cancel()
            await asyncio.wait({orphaned, hosting_kernel})

    def on_signal(self, signum: int) -> bool:
        """Called on the background loop. True: taken care of. False: end."""
        if signum != signal.SIGINT:
            return False
        now = asyncio.get_running_loop().time()
        twice = now - self._interrupted_at < DOUBLE_INTERRUPT
        self._interrupted_at = now
        # Clients interrupt as often as they like; only a person at a terminal means to leave.
        if self._by_hand and (twice or self._kernel is None):
            return False
        if self._kernel is not None:
            self._start(self._interrupt(self._kernel))
        return True

    async def _host(self, connection: Mapping[str, Any]) -> int:
        addresses = hosting.addresses(connection)
        check_free(addresses)
        argv = self._argv or default_argv(self._configuration)
        kernel = await hosting.create_kernel(self._configuration, argv, _log)
        stays = self._configuration.pause_on_exit or self._configuration.keep_on_exit
        if self._guardian is not None and not stays:
            self._guardian.watch(kernel.handle)
        try:
            kernel.listen(addresses)
            await kernel.launch(
                argv,
                env={
                    **{name: os.environ[name] for name in hosting.PASSED_ON if name in os.environ},
                    **self._configuration.spec.env,
                },
                cwd=kernel.handle.workdir,
                connection=hosting.guest_connection(connection),
                transport=self._configuration.guest_transport,
                warm=self._configuration.warm_start,
                spare=False,  # no second kernel will be started in this sandbox
            )
            accompany(kernel, self._configuration, connection)
            self._kernel = kernel
            return await kernel.wait()
        except asyncio.CancelledError:
            await self._shut_down(kernel)
            raise
        finally:
            self._kernel = None
            await hosting.remove_kernel(kernel)

    async def _shut_down(self, kernel: SandboxedKernel) -> None:
        with contextlib.suppress(SandboxError, asyncio.TimeoutError):
            # What does not end by itself ends with the sandbox, right after this.
            if self._kernel is not None:
                await asyncio.wait_for(kernel.send_signal(signal.SIGTERM), SHUTDOWN_GRACE)
                await asyncio.wait_for(kernel.wait(), SHUTDOWN_GRACE)

    async def _interrupt(self, kernel: SandboxedKernel) -> None:
        try:
            await kernel.send_signal(signal.SIGINT)
        except SandboxError as error:
            _log.warning("The kernel could not be interrupted: %s", error)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._signalling.add(task)
        task.add_done_callback(self._signalling.discard)


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


def read_connection_file(path: str) -> dict[str, Any]:
    """The connection that a client has written down. SpecError if it is of no use."""
    refused = f"The connection file {path}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise SpecError(f"{refused} cannot be read: {error.strerror}.") from None
    if len(data) > _MAX_FILE:
        raise SpecError(f"{refused} is larger than {_MAX_FILE} bytes, so it is none.")
    try:
        connection = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{refused} is not JSON: {error}.") from None
    if not isinstance(connection, dict):
        raise SpecError(f"{refused} does not hold a JSON object.")
    connection = {"transport": "tcp", "ip": "127.0.0.1", **connection}
    if connection["transport"] not in ("tcp", "ipc"):
        transport = connection["transport"]
        raise SpecError(f"{refused} has the transport {transport!r}; known are tcp and ipc.")
    for key in ("ip", "key", "signature_scheme"):
        if not isinstance(connection.get(key, ""), str):
            raise SpecError(f"{refused} has {key}={connection[key]!r}, which is no string.")
    for channel in PRIORITY:
        port = connection.get(f"{channel}_port")
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise SpecError(
                f"{refused} has {channel}_port={port!r}. A port from 1 to 65535 is needed for "
                f"each channel; let the Jupyter client write the file."
            )
    if connection["transport"] == "tcp" and connection["ip"] == "*":
        connection["ip"] = "0.0.0.0"  # noqa: S104  (the client's choice, in ZeroMQ's words)
    return connection


def check_free(addresses: Mapping[str, str | tuple[str, int]]) -> None:
    """SandboxError if another process listens at one of them. Found out before a sandbox is made,
    and for Unix sockets, which could be taken from their owner, only here."""
    for channel, address in addresses.items():
        unix = isinstance(address, str)
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as probe:
            try:
                if isinstance(address, str):
                    probe.settimeout(1.0)
                    probe.connect(address)
                else:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                    continue
            except (FileNotFoundError, ConnectionRefusedError):
                continue  # nobody is there
            except OSError as error:
                why = error.strerror or str(error)
            else:
                why = "another process listens there"
        shown = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        raise SandboxError(
            f"The kernel's {channel} endpoint {shown} cannot be used: {why}. End the kernel that "
            f"has this connection file, or let the client choose another one."
        )
