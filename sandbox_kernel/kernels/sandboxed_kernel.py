"""SandboxedKernel: the sandbox of a kernel, from its making to its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox_kernel import audit, guest_program
from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxNotFound, SessionRefused
from sandbox_kernel.kernels.kernel_record import fingerprint
from sandbox_kernel.kernels.launched_process import KILL_TIMEOUT, KernelProcess, Log
from sandbox_kernel.kernels.ways_out import WaysOut, with_egress_variables, with_placeholders
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.unattended import released
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.tunnel.endpoints import PRIORITY, Address
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks
from sandbox_kernel.tunnel.tunnel import Tunnel
from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.kernels.cells import Cells
    from sandbox_kernel.kernels.way_out import WayOut

UNUSED_LEASE = 10.0
"""Seconds that a sandbox outlives its process if no client has ever used its kernel."""
_LOG_LINES, _MAX_OUTPUT = 20, 4000
_UNDELIVERED_TIMEOUT = 5.0
_LEASE_INTERVAL = 5.0
"""Seconds between two attempts to extend a lease."""


class SandboxedKernel(KernelProcess):
    """One sandbox with its agent attached, and the kernel that runs in it (or does not, yet)."""

    def __init__(self, client: SandboxClient, handle: SandboxHandle, log: Log) -> None:
        super().__init__(client, handle, log)
        self.pause_on_exit = False
        """``leave`` pauses the sandbox instead of removing it."""
        self.before_pause: Callable[[], Awaitable[bool]] | None = None
        """``pause`` calls it first, while the sandbox still runs, to save the files; the answer is
        whether they are saved. It reports failures itself."""
        self.ending: Callable[[float], Awaitable[object]] | None = None
        """Saves and ends the kernel when the process exits; its limit without progress is given."""
        self._ways_out = WaysOut(client, handle, log, self.note)
        self._endpoint_folder: str | None = None
        self._companions = OwnedTasks()
        self._short_lease = False
        """Nobody has used the kernel yet, so the sandbox ends soon after its process."""
        self._saved = False

    @property
    def taken_over(self) -> bool:
        """Whether the sandbox, its kernel and its endpoints belong to another process now. The
        record decides, not the agent, which may be hostile and not want to be removed."""
        refused = isinstance(self.tunnel.failure, SessionRefused)
        return refused and self._record.names_another_owner()

    # --- making

    @classmethod
    async def create(
        cls,
        client: SandboxClient,
        spec: SandboxSpec,
        log: Log,
        *,
        warm_argv: Sequence[str] = (),
        keep_unused: bool = True,
    ) -> SandboxedKernel:
        """A new sandbox with a running agent. On any failure (and on cancel) nothing is left.

        ``warm_argv`` is the command line of the kernel to come, if it may be made ready while
        everything else starts. Without ``keep_unused``, and where the backend can do that, the
        sandbox has its whole lease only when a client has used the kernel, or ``detach`` leaves
        it to another process: a process that is killed while it starts a kernel leaves nothing.
        """
        try:
            spec, in_use = await with_placeholders(client, spec)
            handle = await client.create(await with_egress_variables(client, spec))
            kernel = cls(client, handle, log)
            kernel._ways_out.secrets = in_use
            kernel.steps["the sandbox is there"] = time.perf_counter()
            kernel._tell_weaknesses()
            async with kernel._removed_on_failure():
                if not keep_unused and spec.lease_seconds > UNUSED_LEASE:
                    kernel._short_lease = await handle.set_lease(UNUSED_LEASE)
                await kernel._start_agent(warm_argv)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise SandboxError(
                f"Sandbox {spec.name!r} could not be created: {error}."
                + (f" Free some space on the disk that holds {data_dir()}." if full else "")
            ) from error
        return kernel

    async def revive(self, warm_argv: Sequence[str] = ()) -> None:
        """Start the sandbox again after it had stopped: its files are there, its processes are
        not. For backends with the capability ``restart``, when the tunnel has failed."""
        await self.tunnel.close()
        await self.handle.resume()
        audit.note(self.handle, "resumed")
        await self._start_agent(warm_argv)

    @classmethod
    async def restart(
        cls, client: SandboxClient, handle: SandboxHandle, log: Log
    ) -> SandboxedKernel:
        """Start a sandbox that has stopped again, with an agent and without a kernel: its files are
        there. For backends with the capability ``restart``."""
        kernel = cls(client, handle, log)
        await handle.resume()
        audit.note(handle, "resumed")
        await kernel._start_agent(())
        return kernel

    @classmethod
    async def attach(
        cls,
        client: SandboxClient,
        name: str,
        log: Log,
        *,
        sandbox_id: str = "",
        key: str = "",
    ) -> SandboxedKernel:
        """Take over a sandbox that another process made (or this one, earlier). SandboxGone if it
        is not the one with this id, or its kernel not the one with this key, where those are
        known: a name may have become another sandbox's, which then is left alone."""
        handle = await client.get(name)
        if sandbox_id and handle.id != sandbox_id:
            raise SandboxGone(
                f"Sandbox {name!r} is gone: another one (id {handle.id}, not {sandbox_id}) has its "
                f"name since then."
            )
        kernel = cls(client, handle, log)
        token, known = kernel._record.token(), kernel._record.load().kernel.get("key")
        if key and known and known != fingerprint(key):
            raise SandboxGone(
                f"The kernel in sandbox {name!r} is another one than before: it signs with another "
                f"key."
            )
        if client.capabilities.pause and (await handle.info()).status == "paused":
            await handle.resume()
            audit.note(handle, "resumed")
        await kernel._record.claim()
        await kernel._open_tunnel(token)
        async with kernel._closed_on_failure():
            await handle.set_lease(handle.spec.lease_seconds)
            await kernel._started(await kernel.tunnel.control.call("status"))
        audit.note(handle, "attached")
        return kernel

    @classmethod
    async def take_spare(
        cls, client: SandboxClient, name: str, log: Log, *, sandbox_id: str
    ) -> SandboxedKernel:
        """Take over a sandbox that another process made ahead, for its first kernel. The caller
        knows that nobody else does. On any failure it is removed."""
        kernel = cls(client, await client.get(name), log)
        if kernel.handle.id != sandbox_id:
            raise SandboxGone(f"The spare sandbox {name!r} is gone, and another one has its name.")
        kernel._tell_weaknesses()
        async with kernel._removed_on_failure():
            token = kernel._record.token()
            await kernel._record.claim()
            await kernel._open_tunnel(token)
        kernel._short_lease = kernel.handle.spec.lease_seconds > UNUSED_LEASE
        return kernel

    def _tell_weaknesses(self) -> None:
        for text in self.handle.weaknesses:
            self.log.info("Sandbox %s: %s", self.handle.name, text)

    async def fork(self, name: str = "") -> SandboxedKernel:
        """A second sandbox whose kernel goes on from this one's memory, while this one goes on,
        too: with the same variables, and nothing shared from now on. The copy has no endpoints
        until its ``listen`` is called. For backends with the capability ``fork``."""
        copy = await self.handle.fork(name)
        audit.note(self.handle, "forked", into=copy.name)
        return await self._adopt(self.client, copy, self.log)

    @classmethod
    async def restore(
        cls, client: SandboxClient, snapshot: str, spec: SandboxSpec, log: Log
    ) -> SandboxedKernel:
        """A new sandbox whose kernel goes on where the snapshot was taken. A snapshot can be
        restored any number of times. For backends with the capability ``memory``."""
        spec = await with_egress_variables(client, spec)
        handle = await client.restore(snapshot, spec)
        audit.note(handle, "restored", snapshot=snapshot)
        return await cls._adopt(client, handle, log)

    @classmethod
    async def _adopt(
        cls, client: SandboxClient, handle: SandboxHandle, log: Log
    ) -> SandboxedKernel:
        """Make a copied sandbox one of its own. On any failure it is removed."""
        kernel = cls(client, handle, log)
        async with kernel._removed_on_failure():
            await kernel._rekey_agent()
            async with kernel._closed_on_failure():
                await kernel._started(await kernel.tunnel.control.call("status"))
        return kernel

    async def _start_agent(self, warm_argv: Sequence[str]) -> None:
        """``warm_argv`` is the command line of a kernel that the agent should keep ready."""
        self._generation, self._last_exit, self._explained = 0, (0, 0), 0  # a new agent's count
        handle, environment = self.handle, {}
        gateway = asyncio.create_task(self._ways_out.prepare())  # while the agent starts
        try:
            if handle.python:  # an image, which may lack packages
                from sandbox_kernel.sandboxes.missing_packages import provide  # lazy: start-up time

                # First, because it says in plain words that an image has no Python, or the wrong
                # one.
                environment = await provide(handle, self.log)
            await handle.install_guest(guest_program.zipapp())
            warm = handle.kernel_argv(warm_argv) if warm_argv else ()
            agent = handle.guest_argv("agent", handle.agent_folder, str(handle.agent_lease), *warm)
            await handle.spawn_command(Command(agent, environment, main=True))
            token = secrets.token_hex(32)
            await self._record.claim(token)
            await self._open_tunnel(token, gateway)
        finally:
            gateway.cancel()
            await asyncio.gather(gateway, return_exceptions=True)
        self.steps["its agent answers"] = time.perf_counter()

    @property
    def way_out(self) -> WayOut | None:
        """What its connections pass through, if it has rules for egress."""
        return self._ways_out.gateway

    @property
    def cells(self) -> Cells | None:
        """Which cells run, for the audit of what leaves the sandbox; None without a gateway."""
        return None if self.way_out is None else self.way_out.cells

    def belongs_to(self, notebook: str) -> None:
        """For the audit: the path of the kernel's notebook, if that is known."""
        self.notebook = notebook or self.notebook
        if self.cells is not None:
            self.cells.notebook = self.notebook

    async def _rekey_agent(self) -> None:
        """Tell the agent of a copied sandbox that it is a copy, with a token of its own."""
        handle, token = self.handle, secrets.token_hex(32)
        request = {
            "token": self._record.token(),
            "new_token": token,
            "name": handle.name,
            "entropy": secrets.token_hex(64),
        }
        result = await handle.run_command(
            Command(handle.guest_argv("rekey", handle.agent_folder)),
            stdin=json.dumps(request).encode() + b"\n",
            timeout=handle.spec.start_timeout,
            max_output=_MAX_OUTPUT,
        )
        if not result.ok:
            raise SessionRefused(
                f"The agent in sandbox {handle.name!r} refused its new token: "
                f"{printable(result.output).strip()}"
            )
        await self._record.claim(token)
        await self._open_tunnel(token)
        self.steps["its agent answers"] = time.perf_counter()

    async def _open_tunnel(
        self, token: str, gateway: Awaitable[WayOut | None] | None = None
    ) -> None:
        """``gateway`` is one that is being made already."""
        self.tunnel = Tunnel(
            self.handle,
            self.handle.agent_folder,
            token,
            byte_exact=self.client.capabilities.byte_exact_streams,
            on_event=self._on_event,
            on_failed=self._on_tunnel_failed,
            log=self.log,
        )
        self.tunnel.on_request = self._on_first_request
        self._ways_out.serve(self.tunnel, await (gateway or self._ways_out.prepare()))
        async with self._closed_on_failure():
            try:
                async with asyncio.timeout(self.handle.spec.start_timeout):
                    await self.tunnel.open()
            except TimeoutError:
                raise SandboxError(
                    f"The agent in sandbox {self.handle.name!r} did not answer within "
                    f"{self.handle.spec.start_timeout:g} s (start_timeout). Its log ends: "
                    f"{await self._log_tail()}"
                ) from None
            await self._ways_out.open(self.tunnel)
        self._before = await self.handle.info()

    def exposed_variables(self) -> Mapping[str, str]:
        return self._ways_out.exposed_variables()

    @contextlib.asynccontextmanager
    async def _removed_on_failure(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await asyncio.shield(self.client.remove(self.handle.name))
            raise

    @contextlib.asynccontextmanager
    async def _closed_on_failure(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await self.tunnel.close()
            raise

    async def _log_tail(self) -> str:
        try:
            return (await self.handle.logs(tail=_LOG_LINES)).strip() or "(empty)"
        except SandboxError as error:
            return f"(unreadable: {error})"

    # --- clients

    def listen(self, addresses: Mapping[str, Address], folder: str | None = None) -> None:
        """Carry the clients of these addresses (channel -> address) to the kernel's channels.

        ``folder`` is made for them if it is not there, and deleted with the sandbox. Connected
        clients stay: their requests must reach the next kernel after a restart.
        """
        self._endpoint_folder = folder
        if folder is not None:
            private_dir(Path(folder))
        self.tunnel.close_endpoints(keep=addresses.values())
        for channel, address in addresses.items():
            self.tunnel.listen(address, f"kernel:{channel}", PRIORITY[channel])

    def _on_first_request(self) -> None:
        self.tunnel.on_request = None
        self._tasks.start(self._extend_lease_in_the_end())

    async def _extend_lease_in_the_end(self) -> None:
        """Try to extend the lease until that has worked, or the kernel is given up."""
        while True:
            if await self._extend_lease():
                return
            await asyncio.sleep(_LEASE_INTERVAL)

    async def _extend_lease(self) -> bool:
        """Give the sandbox its whole lease: a client, or another process, needs it. False if it
        should be tried again."""
        if not self._short_lease:
            return True
        try:
            await self.handle.set_lease(self.handle.spec.lease_seconds)
            self._short_lease = False
        except SandboxGone:
            pass  # the tunnel reports it
        except (SandboxError, OSError) as error:
            self.log.warning(
                "The lease of sandbox %s could not be extended, so it would end %g s after this "
                "process: %s It is tried again.",
                *(self.handle.name, UNUSED_LEASE, error),
            )
            return False
        return True

    async def keep_unused(self) -> None:
        """Give the sandbox its whole lease, also if no client uses the kernel."""
        await self._extend_lease()

    async def run_alongside(self, *companions: Coroutine[Any, Any, None]) -> None:
        """Run these until the process lets go of the kernel, in place of earlier companions."""
        await self._companions.cancel()
        for companion in companions:
            self._companions.start(companion)

    # --- pausing

    async def pause(self) -> bool:
        """Freeze the sandbox until a client sends something, or ``resume``. False, and nothing is
        frozen, if a client sent something while the files were saved, or something that the kernel
        has not received yet. For backends with the capability ``pause``."""
        if self.tunnel.paused:
            return True
        last_input = self.tunnel.last_input
        if self.before_pause is not None:
            self._saved = await self.before_pause()
        if not await self._has_received_all() or self.tunnel.last_input != last_input:
            return False
        self.tunnel.sleep()
        try:
            await self.handle.pause()
        except BaseException:
            self.tunnel.want()
            raise
        audit.note(self.handle, "paused")
        return True

    async def _has_received_all(self) -> bool:
        """Whether everything that clients sent has reached the sandbox; not if the link is down.
        The agent acknowledges what it has received with its next answer at the latest."""
        if self.tunnel.has_undelivered_input():
            try:
                await self.tunnel.control.call("status", timeout=_UNDELIVERED_TIMEOUT)
            except SandboxError as error:
                self.log.debug("Sandbox %s may lack some input: %s", self.handle.name, error)
        return not self.tunnel.has_undelivered_input()

    @property
    def at_rest(self) -> bool:
        """Paused by this process, with its files saved, so there is nothing to save."""
        return self._saved and self.tunnel.slept

    def resume(self) -> None:
        """Let a paused sandbox go on, and with it whatever waits for it, in a moment."""
        self.tunnel.want()

    # --- ending

    async def detach(self) -> None:
        """Leave the sandbox running; ``attach`` finds it again until its lease is over."""
        await self._extend_lease()
        await self.note(**released(waits=True))
        await self._stop_using()
        await self.tunnel.links_closed()

    async def leave(self) -> None:
        """Pause the sandbox, with ``pause_on_exit``, or remove it. Idempotent."""
        if not self.pause_on_exit or self.taken_over:
            return await self.remove()
        self._expected = True
        await self.note(**released(waits=False))
        await self._stop_using()
        try:
            await self.handle.pause()
            audit.note(self.handle, "paused", why="its kernel was shut down")
        except (SandboxGone, SandboxNotFound) as error:
            self.log.warning("Sandbox %s could not be paused: %s", self.handle.name, error)
        await self._let_go()

    async def release(self) -> None:
        """End the kernel's use by this process, for good; the sandbox stays as it is."""
        self._expected = True
        await self._stop_using()
        await self._let_go()

    async def remove(self) -> None:
        """End and delete the sandbox, unless another process has taken it over. Idempotent."""
        self._expected = True
        if self.taken_over:
            return await self.detach()
        try:
            await self._stop_using()
        finally:
            try:
                await self._remove_or_kill()
            finally:
                await self._let_go()

    async def _stop_using(self) -> None:
        await self._companions.cancel()
        await self._ways_out.close()
        await self._tasks.cancel()
        await self.tunnel.close()

    async def _remove_or_kill(self) -> None:
        """Remove the sandbox. If that fails, for example because its record is unreadable, kill a
        local one. A hosted service that fails to remove it would fail to kill it, too."""
        try:
            if not self._record.names_another_sandbox():
                await self.client.remove(self.handle.name)
        except (SandboxError, OSError):
            if not self.client.capabilities.hosted:
                with contextlib.suppress(SandboxError, OSError):
                    async with asyncio.timeout(KILL_TIMEOUT):
                        await self.handle.kill()
            raise

    async def _let_go(self) -> None:
        await self.tunnel.links_closed()
        if self._endpoint_folder is not None:
            shutil.rmtree(self._endpoint_folder, ignore_errors=True)
        self._set_exited(self.exit_code if self.exit_code is not None else -signal.SIGKILL)
