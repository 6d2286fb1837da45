"""A kernel in a sandbox, without Jupyter's classes: sandbox + agent + tunnel + kernel process.

The provisioner, the launcher and the Python API are thin shells around SandboxedKernel. Its
methods are coroutines for the background loop (``tunnel.background.run``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import (
    KernelDied,
    ProtocolError,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
    SessionRefused,
)
from sandbox_kernel.paths import private_dir
from sandbox_kernel.recordings import OVERHEAD, Recording, parse_recording
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.text import printable
from sandbox_kernel.tunnel.endpoints import PRIORITY
from sandbox_kernel.tunnel.links import links_closed
from sandbox_kernel.tunnel.program import guest_program
from sandbox_kernel.tunnel.tunnel import Tunnel

Log = logging.Logger | logging.LoggerAdapter[Any]
_LOG_LINES, _LOG_SIZE = 20, 4000
_INTERRUPT_TIMEOUT, _SIGNAL_TIMEOUT = 10.0, 30.0
_RECORDING_TIMEOUT = 60.0


class SandboxedKernel:
    """One sandbox with its agent attached, and the kernel that runs in it (or does not, yet).

    ``exit_code`` is None while the kernel runs; afterwards ``death`` says in words why it ended.
    ``on_exit`` is called, on the background loop, when the kernel or its sandbox ends.
    """

    def __init__(self, client: SandboxClient, handle: SandboxHandle, log: Log) -> None:
        self.client = client
        self.handle = handle
        self.exit_code: int | None = None
        self.death = ""
        self.pid: int | None = None
        self.on_exit: Callable[[], object] = lambda: None
        self.tunnel: Tunnel
        self._owner = secrets.token_hex(8)
        self.log = log
        self._generation = 0
        self._last_exit = (0, 0)
        self._expected = False
        self._exited = asyncio.Event()
        self._oom_kills = 0
        self._endpoint_folder: str | None = None
        self._explaining: dict[int, asyncio.Task[None]] = {}
        self._companions: list[asyncio.Task[None]] = []
        self.pause_on_exit = False
        """``leave`` pauses the sandbox instead of deleting it."""
        self.before_pause: Callable[[], Awaitable[bool]] | None = None
        """What ``pause`` does first, while the sandbox still runs: save its files. It tells its
        failures itself; the answer is whether they are saved."""
        self._saved = False

    @property
    def taken_over(self) -> bool:
        """The sandbox, its kernel and its endpoints belong to another process now. The record
        decides, not the word of the agent, which may be hostile and not want to be removed."""
        if not isinstance(self.tunnel.failure, SessionRefused):
            return False
        try:
            record = Records().load(self.handle.backend, self.handle.name)
        except SandboxNotFound:
            return False
        return record.kernel.get("owner") != self._owner

    # --- making and ending

    @classmethod
    async def create(
        cls, client: SandboxClient, spec: SandboxSpec, log: Log, *, warm_argv: Sequence[str] = ()
    ) -> SandboxedKernel:
        """A new sandbox with a running agent. On any failure (and on cancel) nothing is left.

        ``warm_argv`` is the command line of the kernel to come, if it may be made ready while
        everything else starts.
        """
        handle = await client.create(spec)
        kernel = cls(client, handle, log)
        try:
            await kernel._start_agent(warm_argv)
        except BaseException:
            await asyncio.shield(client.remove(handle.name))
            raise
        return kernel

    async def revive(self, warm_argv: Sequence[str] = ()) -> None:
        """Start the sandbox again after it had stopped: its files are there, its processes are
        not. For backends with the capability ``restart``, when the tunnel has failed."""
        await self.tunnel.close()
        await self.handle.resume()
        await self._start_agent(warm_argv)

    async def _start_agent(self, warm_argv: Sequence[str]) -> None:
        handle = self.handle
        self._generation, self._last_exit = 0, (0, 0)  # a new agent counts anew
        # First what says in plain words that an image has no Python, or the wrong one.
        environment = await self._packages() if handle.python else {}
        await handle.install_guest(guest_program())
        warm = handle.kernel_argv(warm_argv) if warm_argv else ()
        lease = str(handle.agent_lease)
        await handle.spawn(
            handle.guest_argv("agent", handle.agent_folder, lease, *warm),
            env=environment,
            main=True,
        )
        token = secrets.token_hex(32)
        records = Records()
        record = records.load(handle.backend, handle.name)
        record.kernel = {"token": token, "owner": self._owner}
        records.save(record)
        await self._open_tunnel(token)

    async def _packages(self) -> dict[str, str]:
        # Imported here, because it takes time, and jails have no image that lacks something.
        from sandbox_kernel.images.packages import provide

        return await provide(self.handle, self.log)

    @classmethod
    async def attach(cls, client: SandboxClient, name: str, log: Log) -> SandboxedKernel:
        """Take over a sandbox that another process made (or this one, earlier)."""
        handle = await client.get(name)
        if client.capabilities.pause and (await handle.info()).status == "paused":
            await handle.resume()
        records = Records()
        record = records.load(handle.backend, handle.name)
        token = record.kernel.get("token")
        if not isinstance(token, str):
            raise SandboxNotFound(
                f"Sandbox {name!r} has no kernel to attach to: it was made without one."
            )
        kernel = cls(client, handle, log)
        record.kernel["owner"] = kernel._owner
        records.save(record)
        await kernel._open_tunnel(token)
        try:
            kernel._started(await kernel.tunnel.control.call("status"))
        except BaseException:
            await kernel.tunnel.close()
            raise
        return kernel

    async def fork(self, name: str = "") -> SandboxedKernel:
        """A second sandbox whose kernel goes on from this one's memory, while this one goes on,
        too: with the same variables, and nothing shared from now on. The copy has no endpoints
        until its ``listen`` is called. For backends with the capability ``fork``."""
        handle = await self.handle.fork(name)
        return await self._adopt(self.client, handle, self.log)

    @classmethod
    async def restore(
        cls, client: SandboxClient, snapshot: str, spec: SandboxSpec, log: Log
    ) -> SandboxedKernel:
        """A new sandbox whose kernel goes on where the snapshot was taken. A snapshot can be
        restored any number of times. For backends with the capability ``memory``."""
        return await cls._adopt(client, await client.restore(snapshot, spec), log)

    @classmethod
    async def _adopt(
        cls, client: SandboxClient, handle: SandboxHandle, log: Log
    ) -> SandboxedKernel:
        """Make a copied sandbox one of its own. On any failure it is removed."""
        kernel = cls(client, handle, log)
        try:
            await kernel._open_tunnel(await kernel._rekey())
            try:
                kernel._started(await kernel.tunnel.control.call("status"))
            except BaseException:
                await kernel.tunnel.close()
                raise
        except BaseException:
            await asyncio.shield(client.remove(handle.name))
            raise
        return kernel

    async def _rekey(self) -> str:
        """Tell the agent of a copied sandbox that it is a copy; its new token."""
        handle = self.handle
        records = Records()
        record = records.load(handle.backend, handle.name)
        token = record.kernel.get("token")
        if not isinstance(token, str):
            raise SandboxNotFound(
                f"Sandbox {handle.name!r} was copied from one without a kernel, so there is none "
                f"to go on with."
            )
        request = {
            "token": token,
            "new_token": secrets.token_hex(32),
            "name": handle.name,
            "entropy": secrets.token_hex(64),
        }
        command, *arguments = handle.guest_argv("rekey", handle.agent_folder)
        result = await handle.exec(
            command,
            arguments,
            stdin=json.dumps(request).encode() + b"\n",
            timeout=handle.spec.start_timeout,
            max_output=_LOG_SIZE,
        )
        if not result.ok:
            raise SessionRefused(
                f"The agent in sandbox {handle.name!r} did not take its new token: "
                f"{printable(result.output).strip()}"
            )
        record.kernel = {"token": request["new_token"], "owner": self._owner}
        records.save(record)
        return request["new_token"]

    async def _open_tunnel(self, token: str) -> None:
        self.tunnel = Tunnel(
            self.handle,
            self.handle.agent_folder,
            token,
            byte_exact=self.client.capabilities.byte_exact_streams,
            on_event=self._event,
            on_failed=self._tunnel_failed,
            log=self.log,
        )
        try:
            await asyncio.wait_for(self.tunnel.open(), self.handle.spec.start_timeout)
        except asyncio.TimeoutError:
            await self.tunnel.close()
            raise SandboxError(
                f"The agent in sandbox {self.handle.name!r} did not answer within "
                f"{self.handle.spec.start_timeout:g} s (start_timeout). Its log ends: "
                f"{await self._log_tail()}"
            ) from None
        except BaseException:
            await self.tunnel.close()
            raise
        self._oom_kills = (await self.handle.info()).oom_kills

    async def pause(self) -> bool:
        """Freeze the sandbox, kernel and all. What a client sends next resumes it, and so does
        ``resume``. False, and nothing is frozen, if a client has sent something while the files
        were saved. For backends with the capability ``pause``."""
        if self.tunnel.paused:
            return True
        if self.before_pause is not None:
            last_input = self.tunnel.last_input
            self._saved = await self.before_pause()
            if self.tunnel.last_input != last_input:
                return False
        self.tunnel.sleep()
        try:
            await self.handle.pause()
        except BaseException:
            self.tunnel.want()
            raise
        return True

    @property
    def at_rest(self) -> bool:
        """Paused by this process, with its files saved: there is nothing to save. If somebody
        else has paused it, there may be."""
        return self._saved and self.tunnel.slept

    def resume(self) -> None:
        """Let a paused sandbox go on; what waits for it goes on, too, in a moment."""
        self.tunnel.want()

    def accompany(self, task: asyncio.Task[None] | None) -> None:
        """A task that ends when this process lets go of the kernel, in place of earlier ones."""
        for earlier in self._companions:
            earlier.cancel()
        self._companions = [task] if task is not None else []

    async def leave(self) -> None:
        """End the kernel's use by this process as ``pause_on_exit`` says: the sandbox is paused
        or removed. Idempotent."""
        if not self.pause_on_exit or self.taken_over:
            return await self.remove()
        self._expected = True
        self.accompany(None)
        await self.tunnel.close()
        try:
            await self.handle.pause()
        except (SandboxGone, SandboxNotFound) as error:
            self.log.warning("It could not be paused: %s", error)
        await self._let_go()

    async def _let_go(self) -> None:
        await links_closed()
        if self._endpoint_folder is not None:
            shutil.rmtree(self._endpoint_folder, ignore_errors=True)
        self._set_exited(self.exit_code if self.exit_code is not None else -signal.SIGKILL)

    def give_up(self) -> None:
        """Take the kernel for dead: its sandbox is about to be deleted."""
        self._expected = True
        self._set_exited(-signal.SIGKILL)

    async def detach(self) -> None:
        """Leave the sandbox to itself; ``attach`` finds it again until its lease is over."""
        self.accompany(None)
        await self.tunnel.close()
        await links_closed()

    async def remove(self) -> None:
        """End the sandbox and delete it with all that it holds, unless another process has taken
        it over meanwhile. Idempotent."""
        self._expected = True
        if self.taken_over:
            return await self.detach()
        self.accompany(None)
        await self.tunnel.close()
        await self.client.remove(self.handle.name)
        await self._let_go()

    # --- the kernel process

    async def launch(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        connection: Mapping[str, Any],
        transport: str = "ipc",
        warm: bool = True,
    ) -> None:
        """Start the kernel. ``{connection_file}`` in ``argv`` stands for its connection file.

        ``warm`` allows it to be forked from an interpreter that has its imports done, if the
        command line is ipykernel's.
        """
        self._expected = False
        self.tunnel.want()
        status = await self.tunnel.control.call(
            "launch",
            argv=list(self.handle.kernel_argv(argv)),
            env=dict(env),
            cwd=cwd,
            connection=dict(connection),
            transport=transport,
            warm=warm,
            timeout=self.handle.spec.start_timeout,
        )
        self._started(status)

    def listen(
        self, addresses: Mapping[str, str | tuple[str, int]], folder: str | None = None
    ) -> None:
        """Carry the clients of these addresses (channel -> address) to the kernel's channels.

        ``folder`` is made for them if it is not there, and deleted with the sandbox. Clients that
        are carried already stay: when a kernel is restarted, they have come back to wait for the
        new one, and what they have asked for must reach it.
        """
        self._endpoint_folder = folder
        if folder is not None:
            private_dir(Path(folder))
        self.tunnel.close_endpoints(keep=addresses.values())
        for channel, address in addresses.items():
            self.tunnel.listen(address, f"kernel:{channel}", PRIORITY[channel])

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel's process group. No error if it has ended.

        SandboxTimeout if the sandbox does not answer, but not for an interrupt: that one is only
        late, and whoever shuts a kernel down begins with it.
        """
        if self.exit_code is not None:
            return
        if signum in (signal.SIGKILL, signal.SIGTERM):
            self._expected = True
        self.tunnel.want()
        timeout = _INTERRUPT_TIMEOUT if signum == signal.SIGINT else _SIGNAL_TIMEOUT
        try:
            await self.tunnel.control.call("signal", signum=int(signum), timeout=timeout)
        except SandboxTimeout as error:
            if signum != signal.SIGINT:
                raise
            self.log.warning("%s The kernel is interrupted when it can be reached again.", error)

    def expect_exit(self) -> None:
        """The kernel is about to be shut down: its exit is no accident."""
        self._expected = True

    async def wait(self) -> int:
        """Exit code of the kernel, when it has ended."""
        await self._exited.wait()
        assert self.exit_code is not None
        return self.exit_code

    async def logs(self) -> str:
        """What the kernel process itself printed (not the cells' output)."""
        return str(await self.tunnel.control.call("logs"))

    async def record(self, limit: int) -> None:
        """Keep, in the sandbox, up to ``limit`` bytes of what the kernel publishes from now on
        (0: nothing), for a host process that could not listen. It goes on over restarts of the
        kernel and changes of the host process."""
        await self.tunnel.control.call("record", limit=limit)

    async def recorded(self, limit: int, since: int = 0) -> Recording:
        """What has been kept, from message number ``since`` on. ``limit`` as for ``record``."""
        data = await self.tunnel.fetch(
            f"recorded:{since}", limit + OVERHEAD, timeout=_RECORDING_TIMEOUT
        )
        return parse_recording(data, self.handle.name)

    def died(self) -> KernelDied:
        """The error for who needed the kernel after it had died."""
        return KernelDied(f"The kernel in sandbox {self.handle.name!r} died: {self.death}.")

    # --- what happens by itself

    def _started(self, status: Any) -> None:
        if not isinstance(status, dict):
            raise ProtocolError(f"The agent in sandbox {self.handle.name!r} sent no status.")
        self._generation = _integer(status, "generation")
        self.pid = _integer(status, "pid") if status.get("pid") is not None else None
        self.exit_code = None
        self.death = ""
        self._exited.clear()
        if not status.get("running"):
            self._set_exited(_integer(status, "exit_code"))
        self._notice_exit()

    def _event(self, message: Mapping[str, Any]) -> None:
        if message.get("event") == "kernel_exited":
            # It may be here before whoever called "launch" has seen the answer.
            self._last_exit = _integer(message, "generation"), _integer(message, "exit_code")
            self._notice_exit()

    def _notice_exit(self) -> None:
        generation, code = self._last_exit
        known = self.exit_code is not None or generation in self._explaining
        if generation and generation == self._generation and not known:
            task = asyncio.get_running_loop().create_task(self._explain(code, generation))
            self._explaining[generation] = task
            task.add_done_callback(lambda _: self._explaining.pop(generation))

    async def _explain(self, code: int, generation: int) -> None:
        """Say why the kernel ended, then let everybody know that it has."""
        self.death = describe_exit(code)
        if not self._expected:
            try:
                info = await asyncio.wait_for(self.handle.info(), 1.0)
                if info.oom_kills > self._oom_kills or (code == -signal.SIGKILL and info.last_kill):
                    self.death = info.last_kill or "out of memory"
                self._oom_kills = info.oom_kills
                output = await self.tunnel.control.call("logs", size=_LOG_SIZE, timeout=1.0)
            except (SandboxError, OSError, asyncio.TimeoutError) as error:
                output = f"(its output could not be read: {error})"
            if self.exit_code is not None or generation != self._generation:
                return  # meanwhile the sandbox was lost, too, or the kernel started anew
            tail = "\n".join(printable(str(output)[-_LOG_SIZE:]).strip().split("\n")[-_LOG_LINES:])
            self.log.log(
                logging.ERROR if code else logging.INFO,  # a client may have shut it down
                "The kernel in sandbox %s died: %s.%s",
                self.handle.name,
                self.death,
                f" It printed last:\n{tail}" if tail else "",
            )
        self._set_exited(code)

    def _tunnel_failed(self, error: SandboxError) -> None:
        if self.exit_code is not None:
            return
        self.death = str(error)
        if not self._expected:
            hint = (
                " It goes on under the process that has taken it over."
                if isinstance(error, SessionRefused)
                else ""
            )
            self.log.error("The kernel in sandbox %s is lost: %s%s", self.handle.name, error, hint)
        self._set_exited(-signal.SIGKILL)

    def _set_exited(self, code: int) -> None:
        self.exit_code = code
        self.death = self.death or describe_exit(code)
        if not self._exited.is_set():
            self._exited.set()
            self.on_exit()

    async def _log_tail(self) -> str:
        try:
            return (await self.handle.logs(tail=_LOG_LINES)).strip() or "(empty)"
        except SandboxError as error:
            return f"(unreadable: {error})"


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


def _integer(message: Mapping[str, Any], key: str) -> int:
    value = message.get(key)
    return value if isinstance(value, int) and abs(value) < 2**31 else 0
