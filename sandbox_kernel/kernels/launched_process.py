"""The kernel process in a sandbox: launching, signalling and watching it through its agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandbox_kernel import audit
from sandbox_kernel.errors import ProtocolError, SandboxError, SandboxTimeout, SessionRefused
from sandbox_kernel.kernel_death import cause_of_death, describe_exit, last_words
from sandbox_kernel.kernels.kernel_record import KernelRecord, fingerprint
from sandbox_kernel.recordings import OVERHEAD, Recording, parse_recording
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle, SandboxInfo
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks
from sandbox_kernel.tunnel.tunnel import Tunnel

Log = logging.Logger | logging.LoggerAdapter[Any]

KILL_TIMEOUT = 30.0
_LOG_SIZE = 4000
_INTERRUPT_TIMEOUT, _SIGNAL_TIMEOUT, _LOCAL_TIMEOUT = 10.0, 30.0, 3.0
_UNANSWERED_TIMEOUT = 0.5
_FORCE_TIMEOUT, _COMMAND_TIMEOUT = 5.0, 15.0
_EXPLAIN_TIMEOUT = 1.0
_RECORDING_TIMEOUT = 60.0


LAUNCHED = "the kernel is launched"
"""The last of ``KernelProcess.steps``."""


class KernelProcess:
    """The kernel that runs in a sandbox (or does not, yet).

    ``exit_code`` is None while the kernel runs; afterwards ``death`` says why it ended, and
    ``unasked`` whether nobody had asked it to. ``on_exit`` is called on the background loop.
    """

    def __init__(self, client: SandboxClient, handle: SandboxHandle, log: Log) -> None:
        self.client = client
        self.handle = handle
        self.log = log
        self.tunnel: Tunnel
        self.exit_code: int | None = None
        self.death = ""
        self.pid: int | None = None
        self.notebook = ""
        """Path of the notebook that the kernel belongs to, as far as its starter knows."""
        self.on_exit: Callable[[], object] = lambda: None
        self.steps: dict[str, float] = {}
        """When each step of the last start was done, by ``time.perf_counter``."""
        self._record = KernelRecord(handle)
        self._tasks = OwnedTasks()
        self._generation = 0
        self._last_exit = (0, 0)
        self._explained = 0
        """Generation of the last kernel whose exit was looked into."""
        self._expected = False
        self._exited = asyncio.Event()
        self._before: SandboxInfo | None = None
        self._key = ""
        """Fingerprint of the key that the kernel signs with, if this process launched it."""
        self._unanswered = False
        """The agent did not answer the last signal, so the next wait for it is short."""

    # --- starting

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
        command line is ipykernel's; ``spare`` keeps such an interpreter for the next kernel.
        """
        self._expected = False
        self._key = fingerprint(str(connection.get("key", "")))
        self.tunnel.want()
        await self._note_earlier_kills()
        status = await self.tunnel.control.call(
            "launch",
            argv=list(self.handle.kernel_argv(argv)),
            env={**env, **self.exposed_variables()},
            cwd=cwd,
            connection=dict(connection),
            transport=transport,
            warm=warm,
            spare=spare,
            timeout=self.handle.spec.start_timeout,
        )
        self.steps[LAUNCHED] = time.perf_counter()
        await self._started(status, launched=True)

    def exposed_variables(self) -> Mapping[str, str]:
        """Secrets that the sandbox may know: in no record, and recorded as exposed by their names
        whenever they are given to a process."""
        return {}

    async def _note_earlier_kills(self) -> None:
        """Processes that the sandbox killed earlier do not explain the next kernel's death. Hosted
        sandboxes do not report kills, and asking them takes time."""
        if self.client.capabilities.hosted:
            return
        try:
            async with asyncio.timeout(_EXPLAIN_TIMEOUT):
                self._before = await self.handle.info()
        except (SandboxError, OSError) as error:
            self.log.debug("Sandbox %s does not report its state: %s", self.handle.name, error)

    async def _started(self, status: Any, *, launched: bool = False) -> None:
        """The agent's answer to "launch" or "status"."""
        if not isinstance(status, dict):
            raise ProtocolError(f"The agent in sandbox {self.handle.name!r} sent no status.")
        self._generation = _integer(status, "generation")
        self.pid = _integer(status, "pid") if status.get("pid") is not None else None
        if launched:  # noted before its end may be
            kind = "kernel-restarted" if self._generation > 1 else "kernel-started"
            audit.note(self.handle, kind, pid=self.pid, notebook=self.notebook)
        self.exit_code = None
        self.death = ""
        self._exited.clear()
        if status.get("running"):
            key = {"key": self._key} if self._key else {}
            self._look_into_exit()
            await self.note(running=True, pid=self.pid, **key)
        else:
            self._set_exited(_integer(status, "exit_code"))

    async def note(self, **facts: Any) -> None:
        """Write facts about the kernel to the sandbox's record, such as the notebook that it
        belongs to (``ps``). Not if the sandbox is gone or another process uses it."""
        try:
            await self._record.note(**facts)
        except (SandboxError, OSError) as error:
            self.log.warning("Sandbox %s: its record is not updated: %s", self.handle.name, error)

    # --- signals

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel's process group. No error if it has ended.

        SandboxTimeout if the sandbox does not answer; but not for SIGINT, which is only late then,
        and with which every shutdown begins.
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
        files can still be saved; else with the whole sandbox. Takes some seconds at most and
        raises nothing: afterwards the kernel counts as dead."""
        self._expected = True
        name = self.handle.name
        try:
            async with asyncio.timeout(_FORCE_TIMEOUT):
                cleared = await self.handle.clear()
            if not cleared:
                await self._kill_inside()
            async with asyncio.timeout(_FORCE_TIMEOUT):
                await self._exited.wait()
            return
        except (SandboxError, OSError) as error:
            self.log.warning(
                "The agent in sandbox %s does not answer (%s), so the whole sandbox ends.",
                *(name, error or "timeout"),
            )
        try:
            async with asyncio.timeout(KILL_TIMEOUT):
                await self.handle.kill()
        except (SandboxError, OSError) as error:
            why = error or "timeout"
            self.log.warning("Sandbox %s could not be killed (%s); it is removed next.", name, why)
        self.give_up()

    async def _kill_inside(self) -> None:
        """Kill the kernel by a command in the sandbox. An agent that was only stopped continues."""
        if self.pid is None:
            raise SandboxError(f"The pid of the kernel in {self.handle.name!r} is not known.")
        script = f"kill -CONT -1; kill -KILL -{self.pid:d} {self.pid:d}"
        async with asyncio.timeout(_COMMAND_TIMEOUT):
            await self.handle.run_command(Command(["/bin/sh", "-c", script], cwd="/"))

    # --- output

    async def logs(self) -> str:
        """What the kernel process itself printed (not the output of cells)."""
        return str(await self.tunnel.control.call("logs"))

    async def record(self, limit: int) -> None:
        """Keep up to ``limit`` bytes of what the kernel, and later ones, publish from now on
        (0: nothing) in the sandbox, for a host process that could not listen."""
        await self.tunnel.control.call("record", limit=limit)

    async def recorded(self, limit: int, since: int = 0) -> Recording:
        """What the sandbox kept, from message number ``since`` on. ``limit`` as for ``record``."""
        target, most = f"recorded:{since}", limit + OVERHEAD
        data = await self.tunnel.fetch(target, most, timeout=_RECORDING_TIMEOUT)
        # In a thread: parsing a large recording must not delay the kernels of other sandboxes.
        return await asyncio.to_thread(parse_recording, data, self.handle.name)

    # --- the end

    @property
    def unasked(self) -> bool:
        """The kernel has ended, and nobody had asked it to."""
        return self.exit_code is not None and not self._expected

    def expect_exit(self) -> None:
        """The kernel is about to be shut down: its exit is no accident."""
        self._expected = True

    def give_up(self) -> None:
        """Consider the kernel dead: its sandbox is about to be removed."""
        self._expected = True
        self._set_exited(-signal.SIGKILL)

    async def exited_within(self, seconds: float) -> None:
        """Return when the kernel has ended, or after this time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)

    async def wait(self) -> int:
        """Exit code of the kernel, when it has ended."""
        await self._exited.wait()
        assert self.exit_code is not None
        return self.exit_code

    def _on_event(self, message: Mapping[str, Any]) -> None:
        if message.get("event") == "kernel_exited":
            # The event may arrive before the answer to "launch".
            self._last_exit = _integer(message, "generation"), _integer(message, "exit_code")
            self._look_into_exit()

    def _look_into_exit(self) -> None:
        generation, code = self._last_exit
        known = self.exit_code is not None or generation == self._explained
        if generation and generation == self._generation and not known:
            self._explained = generation
            self._tasks.start(self._explain(code, generation))

    async def _explain(self, code: int, generation: int) -> None:
        """Find out why the kernel ended, then report that it has."""
        self.death = describe_exit(code)
        if not self._expected:
            try:
                async with asyncio.timeout(_EXPLAIN_TIMEOUT):
                    info = await self.handle.info()
                self.death = cause_of_death(code, self.pid, info, self._before)
                control = self.tunnel.control
                output = await control.call("logs", size=_LOG_SIZE, timeout=_EXPLAIN_TIMEOUT)
            except (SandboxError, OSError) as error:
                output = f"(its output could not be read: {error})"
            if self.exit_code is not None or generation != self._generation:
                return  # meanwhile the sandbox was lost, too, or the kernel was restarted
            tail = last_words(str(output)[-_LOG_SIZE:])
            self.log.log(
                logging.ERROR if code else logging.INFO,  # a client may have shut it down
                "The kernel in sandbox %s died: %s.%s",
                self.handle.name,
                self.death,
                f" It printed last:\n{tail}" if tail else "",
            )
        kind = "kernel-ended" if self._expected else "kernel-died"
        audit.note(self.handle, kind, why=self.death, exit_code=code)
        self._set_exited(code)

    def _on_tunnel_failed(self, error: SandboxError) -> None:
        if self.exit_code is not None:
            return
        self.death = str(error)
        if not self._expected:
            taken = " The process that took it over uses it now."
            self.log.error(
                "The kernel in sandbox %s is lost: %s%s",
                *(self.handle.name, error, taken if isinstance(error, SessionRefused) else ""),
            )
            if not isinstance(error, SessionRefused):
                audit.note(self.handle, "kernel-died", why=self.death)
        self._set_exited(-signal.SIGKILL)

    def _set_exited(self, code: int) -> None:
        self.exit_code = code
        self.death = self.death or describe_exit(code)
        if not self._exited.is_set():
            self._exited.set()
            if not self._expected:  # else it is restarted, or the sandbox removed, in a moment
                self._tasks.start(self.note(running=False, pid=None))
            self.on_exit()


def _integer(message: Mapping[str, Any], key: str) -> int:
    value = message.get(key)
    return value if isinstance(value, int) and abs(value) < 2**31 else 0
