"""A kernel in a sandbox, without Jupyter's classes: sandbox + agent + tunnel + kernel process.

The provisioner, the launcher and the Python API are thin shells around SandboxedKernel. Its
methods are coroutines for the background loop (``tunnel.background.run``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import secrets
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.death import Before, cause_of_death, describe_exit, last_words
from sandbox_kernel.errors import (
    KernelDied,
    ProtocolError,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxTimeout,
    SessionRefused,
)
from sandbox_kernel.paths import data_dir, private_dir
from sandbox_kernel.recordings import OVERHEAD, Recording, parse_recording
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.sandboxes.left import in_use, released
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.text import printable
from sandbox_kernel.tunnel.endpoints import PRIORITY
from sandbox_kernel.tunnel.links import links_closed
from sandbox_kernel.tunnel.program import guest_program
from sandbox_kernel.tunnel.tunnel import Tunnel

Log = logging.Logger | logging.LoggerAdapter[Any]
_LOG_LINES, _LOG_SIZE = 20, 4000
_INTERRUPT_TIMEOUT, _SIGNAL_TIMEOUT, _LOCAL_TIMEOUT = 10.0, 30.0, 3.0
_UNANSWERED_TIMEOUT, _UNDELIVERED_TIMEOUT = 0.5, 5.0
_FORCE_TIMEOUT, _COMMAND_TIMEOUT = 5.0, 15.0
_EXPLAIN_TIMEOUT = 1.0
_RECORDING_TIMEOUT = 60.0
UNUSED_LEASE = 10.0
"""Seconds that a sandbox outlives its process if no client has ever used its kernel."""


class SandboxedKernel:
    """One sandbox with its agent attached, and the kernel that runs in it (or does not, yet).

    ``exit_code`` is None while the kernel runs; afterwards ``death`` says in words why it ended,
    and ``unasked`` whether nobody had asked it to. ``on_exit`` is called, on the background loop,
    when the kernel or its sandbox ends.
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
        self._records = Records(data_dir() / "records")
        self.log = log
        self._generation = 0
        self._last_exit = (0, 0)
        self._expected = False
        self._exited = asyncio.Event()
        self._before = Before()
        self._endpoint_folder: str | None = None
        self._explaining: dict[int, asyncio.Task[None]] = {}
        self._companions: list[asyncio.Task[None]] = []
        self.pause_on_exit = False
        """``leave`` pauses the sandbox instead of deleting it."""
        self.before_pause: Callable[[], Awaitable[bool]] | None = None
        """What ``pause`` does first, while the sandbox still runs: save its files. It tells its
        failures itself; the answer is whether they are saved."""
        self.ending: Callable[[float], Awaitable[object]] | None = None
        """How whoever made this kernel ends it when the process exits: it saves its files first,
        and gives that up after so many seconds without progress."""
        self._saved = False
        self._key = ""
        """Fingerprint of the key that the kernel signs with, if this process has launched it."""
        self._unused = False
        """It has not had its whole lease yet."""
        self._lengthening: asyncio.Task[None] | None = None
        self._unanswered = False
        """The agent has left a signal without an answer, so it is not waited for long again."""

    @property
    def taken_over(self) -> bool:
        """The sandbox, its kernel and its endpoints belong to another process now. The record
        decides, not the word of the agent, which may be hostile and not want to be removed."""
        if not isinstance(self.tunnel.failure, SessionRefused):
            return False
        try:
            record = self._records.load(self.handle.backend, self.handle.name)
        except SandboxNotFound:
            return False
        return record.kernel.get("owner") != self._owner

    # --- making and ending

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
            handle = await client.create(spec)
            for text in handle.weaknesses:
                log.info("Sandbox %s: %s", handle.name, text)
            kernel = cls(client, handle, log)
            try:
                if not keep_unused and spec.lease_seconds > UNUSED_LEASE:
                    kernel._unused = await handle.set_lease(UNUSED_LEASE)
                await kernel._start_agent(warm_argv)
            except BaseException:
                await asyncio.shield(client.remove(handle.name))
                raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise SandboxError(
                f"Sandbox {spec.name!r} could not be made: {error}."
                + (f" Free some space on the disk that holds {data_dir()}." if full else "")
            ) from error
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
        record = self._records.load(handle.backend, handle.name)
        record.kernel = {"token": token, "owner": self._owner, **in_use()}
        self._records.save(record)
        await self._open_tunnel(token)

    async def _packages(self) -> dict[str, str]:
        # Imported here, because it takes time, and jails have no image that lacks something.
        from sandbox_kernel.images.packages import provide

        return await provide(self.handle, self.log)

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
        record = kernel._records.load(handle.backend, handle.name)
        token = record.kernel.get("token")
        if not isinstance(token, str):
            raise SandboxNotFound(
                f"Sandbox {name!r} has no kernel to attach to: it was made without one."
            )
        known = record.kernel.get("key")
        if key and known and known != fingerprint(key):
            raise SandboxGone(
                f"The kernel in sandbox {name!r} is another one than before: it signs with another "
                f"key."
            )
        if client.capabilities.pause and (await handle.info()).status == "paused":
            await handle.resume()
            record = kernel._records.load(handle.backend, handle.name)  # with what that changed
        record.kernel.update(owner=kernel._owner, **in_use())
        kernel._records.save(record)
        await kernel._open_tunnel(token)
        try:
            await handle.set_lease(handle.spec.lease_seconds)
            kernel._started(await kernel.tunnel.control.call("status"))
        except BaseException:
            await kernel.tunnel.close()
            raise
        return kernel

    @classmethod
    async def restart(
        cls, client: SandboxClient, handle: SandboxHandle, log: Log
    ) -> SandboxedKernel:
        """Start a sandbox that has stopped again, with an agent and without a kernel: its files are
        there. For backends with the capability ``restart``."""
        kernel = cls(client, handle, log)
        await handle.resume()
        await kernel._start_agent(())
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
        record = self._records.load(handle.backend, handle.name)
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
        record.kernel = {"token": request["new_token"], "owner": self._owner, **in_use()}
        self._records.save(record)
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
        self.tunnel.on_request = self._first_request
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
        self._before = Before.now(await self.handle.info())

    async def pause(self) -> bool:
        """Freeze the sandbox, kernel and all. What a client sends next resumes it, and so does
        ``resume``. False, and nothing is frozen, if a client has sent something while the files
        were saved, or what the kernel has not got yet. For backends with the capability
        ``pause``."""
        if self.tunnel.paused:
            return True
        last_input = self.tunnel.last_input
        if self.before_pause is not None:
            self._saved = await self.before_pause()
        if not await self._has_got_all() or self.tunnel.last_input != last_input:
            return False
        self.tunnel.sleep()
        try:
            await self.handle.pause()
        except BaseException:
            self.tunnel.want()
            raise
        return True

    async def _has_got_all(self) -> bool:
        """Whether all that clients have sent has reached the sandbox, which it has not if the link
        is down. What the agent has got, it acknowledges with its next answer at the latest."""
        if self.tunnel.has_undelivered_input():
            try:
                await self.tunnel.control.call("status", timeout=_UNDELIVERED_TIMEOUT)
            except SandboxError as error:
                self.log.debug("sandbox %s may lack some input: %s", self.handle.name, error)
        return not self.tunnel.has_undelivered_input()

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
        self.note(**released(waits=False))
        self.accompany(None)
        await self.tunnel.close()
        try:
            await self.handle.pause()
        except (SandboxGone, SandboxNotFound) as error:
            self.log.warning("Sandbox %s could not be paused: %s", self.handle.name, error)
        await self._let_go()

    async def release(self) -> None:
        """End the kernel's use by this process, for good; the sandbox stays as it is."""
        self._expected = True
        self.accompany(None)
        await self.tunnel.close()
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

    def _first_request(self) -> None:
        self.tunnel.on_request = None
        if self._unused:
            self._lengthening = asyncio.get_running_loop().create_task(self._whole_lease())

    async def _whole_lease(self) -> None:
        """Somebody uses the kernel, or is to find it again: it is worth its lease."""
        if not self._unused:
            return
        try:
            await self.handle.set_lease(self.handle.spec.lease_seconds)
            self._unused = False
        except SandboxGone:
            pass  # there is nothing to be kept, as the tunnel knows by itself
        except (SandboxError, OSError) as error:
            self.tunnel.on_request = self._first_request
            self.log.warning(
                "Sandbox %s would end %g s after this process instead of waiting for its lease: %s "
                "The next cell tries again to change that.",
                *(self.handle.name, UNUSED_LEASE, error),
            )

    async def detach(self) -> None:
        """Leave the sandbox to itself; ``attach`` finds it again until its lease is over."""
        await self._whole_lease()
        self.note(**released(waits=True))
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
        try:
            await self.tunnel.close()
        finally:
            try:
                await self._remove_or_kill()
            finally:
                await self._let_go()

    async def _remove_or_kill(self) -> None:
        """What runs here and cannot be removed, because its record cannot be read, say, ends all
        the same. A service that removes nothing would not kill either, and take its time."""
        try:
            if self._still_ours():
                await self.client.remove(self.handle.name)
        except (SandboxError, OSError):
            if not self.client.capabilities.hosted:
                with contextlib.suppress(SandboxError, OSError, asyncio.TimeoutError):
                    await asyncio.wait_for(self.handle.kill(), _SIGNAL_TIMEOUT)
            raise

    def _still_ours(self) -> bool:
        """False if somebody has removed the sandbox, and made another one with its name."""
        try:
            found = self._records.load(self.handle.backend, self.handle.name)
        except SandboxNotFound:
            return True  # what is left of it goes, too
        return not (found.id and self.handle.id) or found.id == self.handle.id

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
        spare: bool = True,
    ) -> None:
        """Start the kernel. ``{connection_file}`` in ``argv`` stands for its connection file.

        ``warm`` allows it to be forked from an interpreter that has its imports done, if the
        command line is ipykernel's; ``spare`` keeps such a one for the next kernel here.
        """
        self._expected = False
        self._key = fingerprint(str(connection.get("key", "")))
        self.tunnel.want()
        await self._look_before()
        status = await self.tunnel.control.call(
            "launch",
            argv=list(self.handle.kernel_argv(argv)),
            env=dict(env),
            cwd=cwd,
            connection=dict(connection),
            transport=transport,
            warm=warm,
            spare=spare,
            timeout=self.handle.spec.start_timeout,
        )
        self._started(status)

    async def _look_before(self) -> None:
        """What the sandbox has killed so far has not killed the kernel that is launched now.
        Hosted ones do not tell, and asking them takes time."""
        if self.client.capabilities.hosted:
            return
        try:
            info = await asyncio.wait_for(self.handle.info(), _EXPLAIN_TIMEOUT)
        except (SandboxError, OSError, asyncio.TimeoutError) as error:
            self.log.debug("Sandbox %s does not tell its state: %s", self.handle.name, error)
        else:
            self._before = Before.now(info)

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
        if not self.client.capabilities.hosted:
            timeout = _UNANSWERED_TIMEOUT if self._unanswered else _LOCAL_TIMEOUT
        try:
            await self.tunnel.control.call("signal", signum=int(signum), timeout=timeout)
            self._unanswered = False
        except SandboxTimeout as error:
            self._unanswered = True
            if signum != signal.SIGINT:
                raise
            self.log.warning("%s The kernel is interrupted when it can be reached again.", error)

    async def end_by_force(self) -> None:
        """End a kernel whose agent does not answer, from outside: with everything else in the
        sandbox but the agent, where the backend can, or by a command in the sandbox, so that its
        files can still be saved; else with the whole sandbox. Takes some seconds at most, and
        raises nothing: afterwards the kernel is dead, for all who ask."""
        self._expected = True
        name = self.handle.name
        try:
            if not await asyncio.wait_for(self.handle.clear(), _FORCE_TIMEOUT):
                await self._kill_inside()
            await asyncio.wait_for(self._exited.wait(), _FORCE_TIMEOUT)
            return
        except (SandboxError, OSError, asyncio.TimeoutError) as error:
            self.log.warning("The agent in sandbox %s is silent (%s): all of it ends.", name, error)
        try:
            await asyncio.wait_for(self.handle.kill(), _SIGNAL_TIMEOUT)
        except (SandboxError, OSError, asyncio.TimeoutError) as error:
            self.log.warning(
                "Sandbox %s could not be killed (%s); it is about to be removed.",
                *(name, error or "no answer"),
            )
        self.give_up()

    async def _kill_inside(self) -> None:
        """Kill the kernel by a command in the sandbox, which the agent has no part in. The agent
        may only be stopped, and then continues."""
        if self.pid is None:
            raise SandboxError("The kernel's pid is not known.")
        script = f"kill -CONT -1; kill -KILL -{self.pid:d} {self.pid:d}"
        command = self.handle.exec("/bin/sh", ["-c", script], cwd="/")
        await asyncio.wait_for(command, _COMMAND_TIMEOUT)

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
        # Another sandbox's kernel must not wait for this one's past.
        return await asyncio.to_thread(parse_recording, data, self.handle.name)

    @property
    def unasked(self) -> bool:
        """The kernel has ended, and nobody had asked it to."""
        return self.exit_code is not None and not self._expected

    def note(self, **facts: Any) -> None:
        """Put down in the sandbox's record what others should know of the kernel, such as the
        notebook that it belongs to (``ps``). Not if the sandbox is gone or somebody else's."""
        try:
            record = self._records.load(self.handle.backend, self.handle.name)
            if record.id == self.handle.id and record.kernel.get("owner") == self._owner:
                record.kernel.update(facts)
                self._records.save(record)
        except SandboxNotFound:
            return
        except (SandboxError, OSError) as error:
            self.log.warning("The record of sandbox %s is not true: %s", self.handle.name, error)

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
        if status.get("running"):
            self.note(running=True, pid=self.pid, **({"key": self._key} if self._key else {}))
        else:
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
                info = await asyncio.wait_for(self.handle.info(), _EXPLAIN_TIMEOUT)
                self.death = cause_of_death(code, self.pid, info, self._before)
                output = await self.tunnel.control.call(
                    "logs", size=_LOG_SIZE, timeout=_EXPLAIN_TIMEOUT
                )
            except (SandboxError, OSError, asyncio.TimeoutError) as error:
                output = f"(its output could not be read: {error})"
            if self.exit_code is not None or generation != self._generation:
                return  # meanwhile the sandbox was lost, too, or the kernel started anew
            tail = last_words(str(output)[-_LOG_SIZE:])
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
            if not self._expected:  # else it is started again, or the sandbox removed, in a moment
                self.note(running=False, pid=None)
            self.on_exit()

    async def _log_tail(self) -> str:
        try:
            return (await self.handle.logs(tail=_LOG_LINES)).strip() or "(empty)"
        except SandboxError as error:
            return f"(unreadable: {error})"


def fingerprint(key: str) -> str:
    """Tells kernels apart without telling the key that they sign with."""
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""


def _integer(message: Mapping[str, Any], key: str) -> int:
    value = message.get(key)
    return value if isinstance(value, int) and abs(value) < 2**31 else 0
