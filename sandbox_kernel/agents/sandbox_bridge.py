"""SandboxBridge: one sandbox of an agent, for frameworks that run commands and want files.

The adapters of this package stand on it. The sandbox is made, or found, on first use. It lives as
long as this process uses it: ``close`` removes it, ``detach`` leaves it to its lease, and so does
the end of the process. All methods may be called from any thread and any asyncio loop; they work on
the background loop (``tunnel/background.py``). Callers without a loop say ``blocking(call(...))``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sandbox_kernel import audit, guest_program
from sandbox_kernel.agents.collected_output import Output, collected
from sandbox_kernel.errors import SandboxGone, SandboxPaused, SandboxTimeout
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.sandboxes.capabilities import EgressWay
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.exec_stream import ExecStream
from sandbox_kernel.spec import DEFAULT_BACKEND, SandboxSpec
from sandbox_kernel.tunnel import background

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds that a command may take, and reading or writing a file, if the caller says nothing."""
MAX_OUTPUT = 10 * 2**20
"""Bytes of each of stdout and stderr that are kept."""
_END_GRACE, _CLOSE_TIMEOUT = 5.0, 60.0
_LOADER = """
import os
def exactly(size, data=b""):
    while len(data) < size:
        data += os.read(0, size - len(data)) or os._exit(1)
    return data
exec(exactly(int(exactly(11))))
"""
"""Runs the program that comes first on stdin: a command line is for all processes to see."""
_HOLD = ("cat",)
"""It waits for input that never comes."""
_log = logging.getLogger(__name__)


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a bridge to its end, for callers without a loop. Ctrl-C cancels it."""
    outcome = background.submit(coroutine)
    try:
        return outcome.result()
    except BaseException:
        outcome.cancel()
        raise


@dataclass(frozen=True)
class Outcome:
    """How a command ended. Its exit code is a shell's: 128 + N for signal N."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    truncated: bool = False
    """There was more output, which is gone."""
    timed_out: str = ""
    """It was killed, because of its time limit: in words."""

    @property
    def out(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def err(self) -> str:
        return self.stderr.decode(errors="replace")

    @classmethod
    def of(cls, output: Output, exit_code: int, timed_out: str = "") -> Outcome:
        stdout, stderr = bytes(output.stdout), bytes(output.stderr)
        return cls(stdout, stderr, exit_code, output.truncated, timed_out)


class SandboxBridge:
    """``settings`` are those of SandboxSpec. With ``attach``, it is a sandbox that exists, by its
    name; otherwise a new one."""

    def __init__(
        self, backend: str = DEFAULT_BACKEND, *, attach: str | None = None, **settings: Any
    ) -> None:
        self.backend = backend
        self.name = attach
        """Of the sandbox: known once it exists."""
        self._made = attach is not None
        self._spec = None if attach else SandboxSpec.from_mapping(settings, where="the call")
        self._client: SandboxClient | None = None
        self._handle: SandboxHandle | None = None
        self._kernel: Any = None
        self._hold: ExecStream | None = None
        self._held: asyncio.Task[int] | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._over = False

    # --- its life

    async def open(self) -> SandboxHandle:
        """The sandbox, which is made or found if this is the first call."""
        return await background.run(self._open())

    async def close(self) -> None:
        """Remove the sandbox, also if the caller is cancelled. Idempotent."""
        await background.carry_through(self._close(remove=True))

    async def detach(self) -> None:
        """Leave the sandbox running; it ends with its lease, unless somebody attaches to it."""
        await background.carry_through(self._close(remove=False))

    async def _open(self) -> SandboxHandle:
        async with self._opening:
            if self._closed:
                raise SandboxGone(
                    f"Sandbox {self.name or '(never made)'!r} was closed. Make a new one to go on."
                )
            if self._client is None:
                self._client = load_backend(self.backend)
            if self._handle is None:
                if self._spec is not None and not self._made:
                    self._handle = await self._create(self._client, self._spec)
                    self.name, self._made = self._handle.name, True
                else:
                    self._handle = await self._attach(self._client, self.name or "")
            await self._keep(self._handle)
            return self._handle

    async def _create(self, client: SandboxClient, spec: SandboxSpec) -> SandboxHandle:
        """With an agent only if that must carry the sandbox's connections, as for a kernel."""
        client.check(spec)
        if not _needs_agent(client, spec):
            return await client.create(spec)
        from sandbox_kernel.kernels import SandboxedKernel  # lazy: start-up time

        self._kernel = await SandboxedKernel.create(client, spec, _log)
        return self._kernel.handle  # type: ignore[no-any-return]

    async def _attach(self, client: SandboxClient, name: str) -> SandboxHandle:
        handle = await client.get(name)
        if client.capabilities.pause and (await handle.info()).status == "paused":
            await handle.resume()
        if _needs_agent(client, handle.spec):
            from sandbox_kernel.kernels import SandboxedKernel  # lazy: start-up time

            self._kernel = await SandboxedKernel.attach(client, name, _log, sandbox_id=handle.id)
            return self._kernel.handle  # type: ignore[no-any-return]
        audit.note(handle, "attached")
        return handle

    async def _keep(self, handle: SandboxHandle) -> None:
        """An open stream holds off the lease, also while the agent thinks. The tunnel is one."""
        if self._kernel is not None or (self._held is not None and not self._held.done()):
            return
        await self._let_go()
        try:
            self._hold = await handle.open_command(Command(_HOLD))
        except SandboxPaused:
            await handle.resume()
            self._hold = await handle.open_command(Command(_HOLD))
        self._held = asyncio.ensure_future(self._hold.wait())

    async def _let_go(self) -> None:
        hold, held, self._hold, self._held = self._hold, self._held, None, None
        if hold is not None:
            await hold.close()
        if held is not None:
            await asyncio.wait([held], timeout=_CLOSE_TIMEOUT)
            if held.done() and not held.cancelled():
                held.exception()  # the next command says it

    async def _close(self, *, remove: bool) -> None:
        self._closed = True
        async with self._opening:
            if self._over or not self._made:
                return
            self._over = True
            client = self._client or load_backend(self.backend)
            try:
                await self._let_go()
                if self._kernel is not None:
                    await (self._kernel.remove() if remove else self._kernel.detach())
                elif remove and self.name:
                    await asyncio.shield(client.remove(self.name))
            finally:
                await client.close()

    # --- what agents do

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        merged: bool = False,
        max_output: int = MAX_OUTPUT,
    ) -> Outcome:
        """Run a command to its end; what it leaves in the background goes on. When its time is
        over, or the caller is cancelled, it is killed with all of its session. ``merged``: stderr
        goes to stdout, in order."""
        request = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd or "", "merged": merged}
        limit = TIMEOUT if timeout is None else timeout
        return await background.run(self._run(request, stdin, limit, max_output))

    async def _run(
        self, request: dict[str, Any], stdin: bytes, timeout: float, max_output: int
    ) -> Outcome:
        handle = await self._open()
        request["cwd"] = request["cwd"] or handle.workdir
        if self._kernel is not None:
            request["env"] = {**self._kernel.exposed_variables(), **request["env"]}
        audit.note_command(handle, request["argv"])
        output = Output()
        given = _program("guest.tool_command") + _framed(json.dumps(request)) + stdin
        stream = await self._python(handle)
        try:
            async with asyncio.timeout(timeout) as limit:
                await collected(stream, given, max_output, output)
                code = await stream.wait()
        except TimeoutError:
            await self._end(stream)
            if not limit.expired():
                raise
            words = (
                f"{request['argv'][0]!r} in sandbox {handle.name!r} did not end within "
                f"{timeout:g} s and was killed. Give a longer timeout if it needs one."
            )
            return Outcome.of(output, 124, words)
        except asyncio.CancelledError:
            await asyncio.shield(self._end(stream))
            raise
        finally:
            await asyncio.shield(stream.close())
        return Outcome.of(output, 128 - code if code < 0 else code)

    async def ask(self, request: Mapping[str, Any], stdin: bytes, most: int) -> tuple[bytes, str]:
        """For BridgeFiles: the answer of ``guest/tool_files.py``, and the sandbox's name."""
        line = json.dumps(request).encode() + b"\n"
        return await background.run(self._ask(line + stdin, most))

    async def _ask(self, stdin: bytes, most: int) -> tuple[bytes, str]:
        handle, output = await self._open(), Output()
        given = _program("guest.tool_files") + stdin
        async with await self._python(handle) as stream:
            try:
                async with asyncio.timeout(TIMEOUT) as limit:
                    await collected(stream, given, most, output)
                    await stream.wait()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise SandboxTimeout(
                    f"Sandbox {handle.name!r} did not answer within {TIMEOUT:g} s: a file could "
                    f"not be read or written. `sandbox-kernel logs {handle.name}` may say why."
                ) from None
        # What a program of ours says on stderr is how it failed.
        return bytes(output.stdout or output.stderr), handle.name

    async def _python(self, handle: SandboxHandle) -> ExecStream:
        argv = [handle.python or "python3", "-I", "-S", "-c", _LOADER]
        return await handle.open_command(Command(argv, cwd=handle.workdir))

    async def _end(self, stream: ExecStream) -> None:
        """Have the command's whole session killed: ``close`` alone may reach only its leader."""
        try:
            async with asyncio.timeout(_END_GRACE):
                await stream.send_signal(signal.SIGTERM)
                await stream.wait()
        except (TimeoutError, SandboxGone) as error:
            _log.debug("a command did not end in order: %s", error)


def _program(module: str) -> bytes:
    return _framed(guest_program.program(module))


def _framed(text: str) -> bytes:
    data = text.encode()
    return b"%010d\n" % len(data) + data


def _needs_agent(client: SandboxClient, spec: SandboxSpec) -> bool:
    way = client.capabilities.egress_way(spec.egress)
    return way is EgressWay.GATEWAY or client.capabilities.puts_in_secrets(spec)
