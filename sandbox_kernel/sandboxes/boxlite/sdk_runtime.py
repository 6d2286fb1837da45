"""BoxLite's SDK, as far as it is used here: one runtime, its boxes, and the errors that it raises.

A runtime owns its BOXLITE_HOME: no second process can use it, so this lives in the broker. With
BOXLITE_REST_URL set the boxes are a remote server's, and there is nothing on this machine to own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import boxlite
from boxlite import errors as sdk

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxNotFound,
    SandboxTimeout,
    SandboxUnavailable,
    SpecError,
)
from sandbox_kernel.host_processes import ProcessId, find_processes
from sandbox_kernel.sandboxes.boxlite.backend import home, remote
from sandbox_kernel.sandboxes.untrusted_files import read_end
from sandbox_kernel.untrusted_text import printable

_log = logging.getLogger(__name__)

CONSOLE_TAIL = 1500
_ANSI = re.compile(r"\x1b\[[0-9;]*m|\r")
_KILL_TIMEOUT = 10.0
_REMOVE_ATTEMPTS = 20
_RETRY = 0.25
_CALL_TIMEOUT = 60.0
_NOT_READY, _READY_TIMEOUT = "incompatible container status: `Created`", 60.0
_PROGRAMS = (b"bwrap", b"boxlite-shim")


class State:
    """BoxLite's own record of a box."""

    def __init__(self, info: Any) -> None:
        self.id = str(info.id)
        self.running = bool(info.state.running)
        self.stale = False
        """BoxLite says that it runs, but none of its processes exists."""
        self.pid: int | None = info.state.pid
        self.exit_code: int | None = info.state.exit_code


class Runtime:
    """The boxes of one BOXLITE_HOME, or of one remote server."""

    def __init__(self) -> None:
        self.home: Path | None = None
        if remote():
            self._sdk = boxlite.Boxlite.rest(boxlite.BoxliteRestOptions.from_env())
            return
        self.home = home()
        try:
            self._sdk = boxlite.Boxlite(boxlite.Options(home_dir=str(self.home)))
        except sdk.BoxliteError as error:
            if "Another BoxliteRuntime" in str(error):
                raise SandboxUnavailable(
                    f"Another program uses {self.home}, and BoxLite allows one at a time. Close "
                    f"it, or set BOXLITE_HOME to another folder for one of the two."
                ) from None
            raise SandboxUnavailable(f"BoxLite cannot be used: {_said(error)}.") from error

    async def create(
        self,
        name: str,
        image: Mapping[str, Any],
        *,
        entrypoint: Sequence[str],
        cpus: int | None = None,
        memory_mib: int | None = None,
        disk_gib: int | None = None,
    ) -> str:
        """Create a box that does not run yet, and return its id. It has no network and no volumes,
        runs in BoxLite's jailer, outlives this process, and only ``start`` starts it."""
        closed = boxlite.OutboundNetworkSpec(mode="disabled")
        options = boxlite.BoxOptions(
            **image,
            cpus=cpus,
            memory_mib=memory_mib,
            disk_size_gb=disk_gib,
            working_dir="/",
            entrypoint=list(entrypoint),
            cmd=[],
            network=boxlite.NetworkSpec(
                outbound=closed, inbound=boxlite.InboundNetworkSpec(mode="disabled")
            ),
            detach=True,
            auto_remove=False,
            auto_resume=False,
            advanced=boxlite.AdvancedBoxOptions(security=boxlite.SecurityOptions.standard()),
        )
        box = await self._sdk.create(options, name=name)
        return str(box.id)

    async def start(self, name: str) -> None:
        """Start a box, within the caller's time limit. The SDK gives a VM 30 s to boot, which a
        loaded machine may exceed, so it is tried again."""
        while True:
            try:
                await (await self._box(name)).start()
                return
            except sdk.EngineError as error:
                state = await self.state(name)
                if state is None or "timed out" not in str(error):
                    raise
                if "KVM_EXIT" in self.console(state.id):  # it will never boot
                    raise
                _log.warning("Box %s did not boot in time and is started again.", name)
                await self.finish(state.id)

    async def clone(self, name: str, new_name: str) -> str:
        """Copy a stopped box with its disk, and return the id of the copy."""
        return str((await (await self._box(name)).clone_box(name=new_name)).id)

    async def execute(self, name: str, command: str, args: Sequence[str]) -> Execution:
        """Run a command in a running box. (BoxLite would start a stopped one.) A box that has just
        started may not be ready: its container is created, but not running."""
        deadline = time.monotonic() + _READY_TIMEOUT
        while True:
            box = await self._box(name)
            try:
                return Execution(await box.exec(command, list(args), []))
            except sdk.BoxliteError as error:
                if _NOT_READY not in str(error) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY)

    async def _box(self, name: str) -> Any:
        box = await asyncio.wait_for(self._sdk.get(name), _CALL_TIMEOUT)
        if box is None:
            raise SandboxNotFound(f"BoxLite has no box {name!r}.")
        return box

    async def state(self, name: str) -> State | None:
        """None if there is no such box."""
        try:
            info = await asyncio.wait_for(self._sdk.get_info(name), _CALL_TIMEOUT)
        except sdk.NotFoundError:
            return None
        if info is None:
            return None
        state = State(info)
        if state.running and self.home is not None:
            alive = state.pid is not None and ProcessId.of(state.pid) is not None
            if not alive and not await asyncio.to_thread(self.processes, state.id):
                state.running, state.stale = False, True
        return state

    async def stop(self, name: str, timeout: float) -> None:
        """Stop a box with BoxLite, and kill what is left of it."""
        state = await self.state(name)
        if state is None:
            return
        try:
            await asyncio.wait_for((await self._box(name)).stop(), timeout)
        except (asyncio.TimeoutError, sdk.BoxliteError, SandboxNotFound) as error:
            _log.info("Stopping box %s failed: %s", name, error)
        await self.finish(state.id)

    async def remove(self, name: str) -> None:
        """Delete a box with its disk, running or not. No error if there is none."""
        state = await self.state(name)
        if state is None:
            return
        # A box whose start was interrupted is busy for a while.
        for attempt in range(_REMOVE_ATTEMPTS):
            await self.finish(state.id)
            try:
                await asyncio.wait_for(self._sdk.remove(name, force=True), _CALL_TIMEOUT)
                break
            except sdk.NotFoundError:
                break
            except (asyncio.TimeoutError, sdk.BoxliteError) as error:
                if attempt == _REMOVE_ATTEMPTS - 1:
                    raise SandboxError(
                        f"The box {name!r} could not be removed: {_said(error)}. Try again later."
                    ) from error
            await asyncio.sleep(_RETRY)
        await self.finish(state.id)

    async def finish(self, box_id: str) -> None:
        """Kill a box's processes. (BoxLite 0.10.8 may report a VM as stopped that still runs.)"""
        for process in await asyncio.to_thread(self.processes, box_id):
            if not await asyncio.to_thread(process.kill, _KILL_TIMEOUT):
                raise SandboxError(f"Process {process.pid} of the box {box_id} does not end.")

    def processes(self, box_id: str) -> list[ProcessId]:
        """The host's processes that run a box: BoxLite's jailer and its VM."""
        if self.home is None:
            return []
        folder = os.fsencode(self.home / "boxes" / box_id) + b"/"
        return find_processes(
            lambda words: (
                os.path.basename(words[0]) in _PROGRAMS
                and any(word.startswith(folder) for word in words)
            )
        )

    def console(self, box_id: str) -> str:
        """The last output of the VM and its guest, printable."""
        if self.home is None:
            return ""
        folder = self.home / "boxes" / box_id
        tails = [_tail(folder / name) for name in ("logs/console.log", "shim.stderr")]
        return "\n".join(tail for tail in tails if tail)


def _tail(path: Path) -> str:
    try:
        text = read_end(path, 2 * CONSOLE_TAIL)
    except OSError:
        return ""
    return printable(_ANSI.sub("", text)).strip()[-CONSOLE_TAIL:]


class Execution:
    """A command that BoxLite runs in a box; it carries a link."""

    def __init__(self, execution: Any) -> None:
        self._execution = execution
        self._stdin = execution.stdin()
        self._stdout = execution.stdout()

    async def read(self) -> bytes:
        while True:
            try:
                piece = await self._stdout.__anext__()
            except StopAsyncIteration:
                return b""
            if piece:
                return str(piece).encode(errors="replace")

    async def write(self, data: bytes) -> None:
        await self._stdin.send_input(data)

    async def wait(self) -> int:
        return int((await self._execution.wait()).exit_code)

    async def close(self) -> None:
        closed = self._stdin.close()
        if asyncio.isfuture(closed) or asyncio.iscoroutine(closed):
            await closed


def explain(error: BaseException, sandbox: str, image: str | None, console: str) -> SandboxError:
    """Translate an SDK error from the creation or start of a box."""
    if isinstance(error, SandboxError):
        return error
    said = _said(error)
    what = f"Sandbox {sandbox!r} could not be started"
    if isinstance(error, asyncio.TimeoutError):
        return SandboxTimeout(f"{what} in time. Give a longer start_timeout. {_ends(console)}")
    if "Failed to pull image" in said:
        return _pull_failed(what, image, said)
    if "Container init failed" in said or "spawn_failed" in said:
        return ExecFailed(
            f"{what}: the image {image!r} cannot run `python3`. It must have Python 3.9 or later "
            f"on its PATH, for this machine's architecture. BoxLite said: {said}"
        )
    if isinstance(error, sdk.EngineError):
        return SandboxUnavailable(
            f"{what}: the VM does not boot. {_ends(console)} `sandbox-kernel doctor` says what "
            f"this machine lacks. BoxLite said: {said}"
        )
    if isinstance(error, sdk.StorageError) and "No space" in said:
        return SandboxUnavailable(f"{what}: the disk is full. BoxLite said: {said}")
    if isinstance(error, (sdk.InvalidArgumentError, sdk.ImageError)):
        return SpecError(f"{what}: {said}")
    return SandboxUnavailable(f"{what}: {said}. {_ends(console)}")


def _pull_failed(what: str, image: str | None, said: str) -> SandboxError:
    kind: type[SandboxError] = SpecError
    if re.search("manifest unknown|not found|404|name unknown", said, re.IGNORECASE):
        why = f"there is no image {image!r}"
    elif re.search("no match for platform|architecture|no matching", said, re.IGNORECASE):
        why = f"the image {image!r} is not there for this machine's architecture"
    else:
        kind, why = SandboxUnavailable, f"the registry of {image!r} cannot be reached"
        if re.search("unauthorized|401|denied|403", said, re.IGNORECASE):
            why = f"the registry of {image!r} does not let this user read it"
    return kind(
        f"{what}: {why}. To work without a registry, make an image with `sandbox-kernel image "
        f"build --from debian -t NAME` and set image to its name. BoxLite said: {said}"
    )


def _said(error: BaseException) -> str:
    return printable(str(error) or type(error).__name__)[:800].rstrip(".")


def _ends(console: str) -> str:
    return f"Its console ends: {console}" if console else "Its console is empty."
