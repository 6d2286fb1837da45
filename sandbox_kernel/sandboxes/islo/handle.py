"""One sandbox at Islo: commands, streams, its states and its end."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxPaused,
    SandboxTimeout,
)
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.base import GUEST_PATH, MAX_OUTPUT
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.islo.api import Api, InvalidState
from sandbox_kernel.sandboxes.islo.relay_calls import GRACE, RelayCalls, decoded, integer
from sandbox_kernel.sandboxes.islo.stream import IsloStream
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.sandboxes.recording_client import RecordedHandle
from sandbox_kernel.sandboxes.results import ExecResult, SandboxInfo
from sandbox_kernel.untrusted_text import last_lines, printable

if TYPE_CHECKING:
    from sandbox_kernel.sandboxes.islo.client import IsloClient

log = logging.getLogger(__name__)

IO_FOLDER = "/tmp/.sandbox-kernel-io"  # noqa: S108  (a path inside the sandbox)
MARKER = "SANDBOX_KERNEL_ID"
"""Variable of the sandbox by which one that was made without our seeing it is known as ours."""
STATES = {
    **dict.fromkeys(("running", "ready", "active"), "running"),
    **dict.fromkeys(("paused", "pausing"), "paused"),
    **dict.fromkeys(("stopped", "stopping"), "stopped"),
    **dict.fromkeys(("failed", "error", "deleting", "deleted"), "gone"),
}
"""Islo's states of a sandbox -> ours. ``STARTING`` has those on the way to running."""
STARTING = ("creating", "provisioning", "pending", "queued", "starting", "resuming", "restarting")
PASSING = (*STARTING, "pausing", "stopping")
_POLL_FIRST, _POLL_MOST = 0.03, 2.0
_STATE_TIMEOUT = 120.0
_GOODBYE = 5.0
_INLINE_STDIN = 24 * 1024
_LOG_SIZE = 256 * 1024
_GIVE_UP_TIMEOUT = 20.0


class IsloHandle(RecordedHandle):
    """A sandbox that runs, is paused or stopped; ``resume`` brings it back from each."""

    backend = "islo"
    python = "python3"

    def __init__(self, record: Record, client: IsloClient) -> None:
        super().__init__(record)
        self._remote: str = record.data["sandbox"]
        self._api: Api = client.api(record)
        self._relay = RelayCalls(
            self._api, self._remote, self.name, runs=self._runs, why_broken=self._broken
        )

    @property
    def agent_lease(self) -> float:
        """Islo pauses the sandbox when its lease is over, and the agent goes on after that."""
        return self.spec.lease_seconds + 30 * 86400.0

    # --- commands

    def _checked(self, command: Command) -> Command:
        """The command as it is sent. SpecError if Islo cannot take it."""
        self._check_words(command.argv)
        return command.with_defaults(self.spec.env, self.workdir)

    async def open_command(self, command: Command) -> IsloStream:
        """As the surface says; there is no duplex socket."""
        return await IsloStream.open(
            self._api,
            self._remote,
            self._checked(command),
            f"{IO_FOLDER}/stream-{secrets.token_hex(8)}",
            execute=self._push,
            name=self.name,
            why_broken=self._broken,
        )

    async def _push(self, command: Sequence[str]) -> None:
        try:
            await self._api.call(
                self._api.sandboxes.exec_in_sandbox,
                self._remote,
                command=list(command),
                doing="input was pushed",
            )
        except (SandboxNotFound, InvalidState) as error:
            raise await self._broken(error) from error

    async def run_command(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """As the surface says: a POST, and then asking for the result. The time limit is kept
        inside the sandbox, so the command is killed also if this process is gone by then."""
        command = self._checked(command)
        folder = f"{IO_FOLDER}/run-{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "folder": folder,
            "argv": list(command.argv),
            "cwd": command.cwd,
            "timeout": timeout,
            "max_output": max_output,
        }
        if len(stdin) > _INLINE_STDIN:
            config["stdin_file"] = f"{folder}.in"
            await self.write_file(config["stdin_file"], stdin)
        else:
            config["stdin"] = base64.b64encode(stdin).decode()
        try:
            answer = await self._relay.run("run", config, command.env, timeout)
        except (asyncio.CancelledError, SandboxTimeout):
            await asyncio.shield(self._give_up(folder))
            raise
        if answer.get("failed") is not None:
            raise ExecFailed(
                f"{command.program!r} could not be run in sandbox {self.name!r}: "
                f"{printable(str(answer['failed']))[:500]}"
            )
        if answer.get("timed_out"):
            raise SandboxTimeout(
                f"{command.program!r} in sandbox {self.name!r} did not end within {timeout:g} s "
                f"and was killed. Give a longer timeout if it needs one."
            )
        return ExecResult(
            stdout=decoded(answer.get("out"), max_output),
            stderr=decoded(answer.get("err"), max_output),
            exit_code=integer(answer.get("code")),
            truncated=bool(answer.get("truncated")),
        )

    async def _give_up(self, folder: str) -> None:
        """Make the relay kill a command that nobody waits for."""
        script = 'mkdir -p -m 700 "$0" && : > "$0/kill"'
        try:
            await asyncio.wait_for(self._push(["/bin/sh", "-c", script, folder]), _GIVE_UP_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError) as error:
            log.warning("A command in sandbox %s may run on: %s", self.name, error)

    async def spawn_command(self, command: Command) -> None:
        """As the surface says. The sandbox does not end with a ``main`` command: only from
        outside can it be ended, and Islo pauses it when it is not used."""
        command = self._checked(command)
        folder = f"{IO_FOLDER}/spawn-{secrets.token_hex(8)}"
        config = {"folder": folder, "argv": list(command.argv), "cwd": command.cwd}
        answer = await self._relay.run("spawn", config, command.env, GRACE)
        if answer.get("failed") is not None:
            raise ExecFailed(
                f"{command.program!r} could not be started in sandbox {self.name!r}: "
                f"{printable(str(answer['failed']))[:500]}"
            )

    async def set_up(self) -> str:
        """What a sandbox needs each time it has booted; its marker. Shows that commands run."""
        config = {"folder": IO_FOLDER, "workdir": self.workdir, "variable": MARKER}
        answer = await self._relay.run("setup", config, {}, GRACE)
        if answer.get("failed") is not None:
            raise ExecFailed(
                f"Sandbox {self.name!r} could not be set up: "
                f"{printable(str(answer['failed']))[:500]}"
            )
        return str(answer.get("marker", ""))

    async def read_file(self, path: str) -> bytes:
        """A file anywhere in the sandbox, by the files API. ExecFailed if there is none."""
        try:
            return await self._api.download(self._remote, path)
        except SandboxNotFound as error:
            if await self._state() == "running":
                raise ExecFailed(f"There is no file {path} in sandbox {self.name!r}.") from error
            raise await self._broken(error) from error
        except InvalidState as error:
            raise await self._broken(error) from error

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file anywhere in the sandbox, in one request of the files API."""
        try:
            await self._api.upload(self._remote, path, content)
        except (SandboxNotFound, InvalidState) as error:
            raise await self._broken(error) from error

    async def install_guest(self, zipapp: bytes) -> None:
        """One upload; the default would need a command, too."""
        await self.write_file(GUEST_PATH, zipapp)

    def _check_words(self, argv: Sequence[str]) -> None:
        if any("\0" in word for word in argv):
            raise ExecFailed(f"{argv[0]!r} cannot be run in sandbox {self.name!r}: a NUL in it.")

    # --- its state

    async def _look(self) -> str:
        """Islo's own state; ``deleted`` if it has no such sandbox."""
        try:
            found = await self._api.call(
                self._api.sandboxes.get_sandbox, self._remote, doing="a sandbox was looked up"
            )
        except SandboxNotFound:
            return "deleted"
        # Another one may have the name now.
        return str(found.status).lower() if found.id == self.id else "deleted"

    async def _state(self) -> str:
        """``running``, ``paused``, ``stopped``, ``gone``, ``starting`` or ``unknown``."""
        word = await self._look()
        return "starting" if word in STARTING else STATES.get(word, "unknown")

    async def _runs(self) -> bool:
        return await self._state() == "running"

    async def reached(self, *wanted: str, timeout: float) -> str:
        """Wait for Islo's own word for the state to be one that lasts; SandboxTimeout if it is
        not one of ours (``wanted``) by then. A failed or deleted one is SandboxGone at once."""
        word = ""
        async for _ in attempts(timeout, first=_POLL_FIRST, most=_POLL_MOST, growth=1.5):
            word = await self._look()
            state = STATES.get(word, "unknown")
            if word not in PASSING and state in wanted:
                return state
            if state == "gone":
                raise SandboxGone(f"Sandbox {self.name!r} has ended: Islo says {word!r}.")
        raise SandboxTimeout(
            f"Sandbox {self.name!r} is {word!r} at Islo after {timeout:g} s, not "
            f"{' or '.join(wanted)}. Try again later."
        )

    async def _broken(self, error: BaseException | None) -> SandboxError:
        """The error for a sandbox that could not be used."""
        record = self._stored()
        if record is None:
            return SandboxGone(f"Sandbox {self.name!r} has ended: it was removed. Make a new one.")
        word = await self._look()
        state = STATES.get(word, "unknown")
        if state == "paused":
            return SandboxPaused(
                f"Sandbox {self.name!r} is paused: it was asked to, or not used for its lease of "
                f"{self.spec.lease_seconds:g} s. `sandbox-kernel resume {self.name}` lets it go on."
            )
        if state in ("stopped", "gone"):
            reason = record.data.get("ended") or f"Islo says it is {word!r}"
            return SandboxGone(
                f"Sandbox {self.name!r} has ended: {reason}. "
                + (
                    f"`sandbox-kernel resume {self.name}` starts it again with its files."
                    if state == "stopped"
                    else f"Clear it away with `sandbox-kernel rm {self.name}`."
                )
            )
        return SandboxError(
            f"The connection to sandbox {self.name!r} broke (it is {word!r}): "
            f"{error or 'the stream ended early'}"
        )

    def _stored(self) -> Record | None:
        """This sandbox's record as it is now; None if it was removed."""
        if self._record.data.get("elsewhere"):
            return self._record  # another machine has it
        return super()._stored()

    def _note(self, **facts: Any) -> None:
        if self._record.data.get("elsewhere"):
            self._record.data.update(facts)
        else:
            super()._note(**facts)

    # --- its life

    async def pause(self) -> None:
        """Freeze it with its memory. Every stream to it breaks."""
        state = await self.reached("running", "paused", "stopped", timeout=_STATE_TIMEOUT)
        if state == "stopped":
            raise SandboxGone(f"Sandbox {self.name!r} is stopped, so it cannot be paused.")
        if state == "running":
            await self._change(self._api.sandboxes.pause_sandbox, "it was paused", "paused")

    async def resume(self) -> None:
        """Bring it back, from paused or stopped. Never makes a second one."""
        state = await self.reached("running", "paused", "stopped", timeout=_STATE_TIMEOUT)
        if state != "running":
            await self._change(self._api.sandboxes.resume_sandbox, "it was resumed", "running")
            self._note(ended=None)
        if state == "stopped":
            await self.set_up()

    async def _change(self, method: Any, doing: str, wanted: str) -> None:
        try:
            # A 409 says that it is on its way already, or that somebody was faster.
            await self._api.call(method, self._remote, doing=doing)
        except InvalidState as error:
            log.debug("sandbox %s: %s", self.name, error)
        except SandboxNotFound as error:
            raise await self._broken(error) from error
        await self.reached(wanted, timeout=_STATE_TIMEOUT)

    async def stop(self) -> None:
        """End all processes in an orderly way; files stay, and ``resume`` boots it again."""
        state = await self._state()
        if state in ("stopped", "gone"):
            return
        if state == "running":
            try:
                await self._relay.run("goodbye", {"seconds": _GOODBYE}, {}, GRACE)
                self._note(log=(await self.logs())[-_LOG_SIZE:])
            except SandboxError as error:
                log.debug("sandbox %s is stopped without goodbye: %s", self.name, error)
        await self._end("it was stopped")

    async def kill(self) -> None:
        if await self._state() not in ("stopped", "gone"):
            await self._end("it was killed")

    async def _end(self, reason: str) -> None:
        self._note(ended=reason)
        try:
            await self._api.call(
                self._api.sandboxes.stop_sandbox, self._remote, doing="it was stopped"
            )
            await self.reached("stopped", timeout=_STATE_TIMEOUT)
        except InvalidState:
            await self.reached("stopped", timeout=_STATE_TIMEOUT)
        except (SandboxNotFound, SandboxGone):
            pass

    # --- what is known

    async def logs(self, *, tail: int | None = None) -> str:
        """What spawned commands print. Of a stopped one, what it had said when it was stopped."""
        try:
            content = await self._api.download(self._remote, f"{IO_FOLDER}/log")
            text = content[-_LOG_SIZE:].decode(errors="replace")
        except (SandboxNotFound, InvalidState):
            record = self._stored()
            text = str(record.data.get("log", "")) if record else ""
        return last_lines(text, tail)

    async def info(self) -> SandboxInfo:
        word = await self._look()
        state = STATES.get(word, "running" if word in STARTING else "unknown")
        record = self._stored() or self._record
        detail: dict[str, Any] = {"sandbox": self._remote, "status": word}
        if state == "stopped" and record.data.get("ended"):
            detail["reason"] = record.data["ended"]
        if record.data.get("profile"):
            detail["gateway_profile"] = record.data["profile"].get("id")
        return self._info(state, detail=detail)
