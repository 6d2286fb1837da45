"""One sandbox at Islo: commands, streams, its states and its end."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxPaused,
    SandboxTimeout,
)
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.base import MAX_OUTPUT, Command, ExecResult, SandboxInfo
from sandbox_kernel.sandboxes.hosted import HostedHandle
from sandbox_kernel.sandboxes.islo.api import Api, InvalidState
from sandbox_kernel.sandboxes.islo.pushes import Pusher
from sandbox_kernel.sandboxes.islo.stream import IDLE, IsloStream, RecordReader, relay_command
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.untrusted_text import last_lines, printable

if TYPE_CHECKING:
    from sandbox_kernel.sandboxes.islo.client import IsloClient

log = logging.getLogger(__name__)

T = TypeVar("T")

IO_FOLDER = "/tmp/.sandbox-kernel-io"  # noqa: S108  (a path inside the sandbox)
MARKER = "SANDBOX_KERNEL_ID"
"""Variable of the sandbox by which one that was made without our seeing it is known as ours."""
STATES = {
    word: state
    for state, words in {
        "starting": "creating provisioning pending queued starting resuming restarting",
        "running": "running ready active",
        "paused": "paused pausing",
        "stopped": "stopped stopping",
        "gone": "failed error deleting deleted",
    }.items()
    for word in words.split()
}
"""Islo's states of a sandbox -> ours."""
_PASSING = ("pausing", "stopping")
"""Islo's words for states that do not last, beside those for ``starting``."""
_POLL_FIRST, _POLL_MOST = 0.03, 2.0
_STATE_TIMEOUT = 120.0
_GRACE = 60.0
"""Seconds for Islo's answer, on top of a command's own time limit."""
_UPLOAD_TIMEOUT = 600.0
_GOODBYE = 5.0
_INLINE_STDIN = 24 * 1024
_LOG_SIZE = 256 * 1024
_GIVE_UP_TIMEOUT = 20.0


class IsloHandle(HostedHandle):
    """A sandbox that runs, is paused or stopped; ``resume`` brings it back from each."""

    backend = "islo"

    def __init__(self, record: Record, client: IsloClient) -> None:
        super().__init__(record)
        self._remote: str = record.data["sandbox"]
        self._api: Api = client.api(record)
        self._sandboxes = self._api.sandboxes

    # --- commands

    def _request(self, command: Command, kind: str) -> tuple[dict[str, Any], Mapping[str, str]]:
        """A command as the relay takes it, with a folder of its own, and its variables."""
        if any("\0" in word for word in command.argv):
            raise ExecFailed(
                f"{command.program!r} cannot be run in sandbox {self.name!r}: a NUL in it."
            )
        command = command.with_defaults(self.spec.env, self.workdir)
        folder = f"{IO_FOLDER}/{kind}-{secrets.token_hex(8)}"
        return {"folder": folder, "argv": list(command.argv), "cwd": command.cwd}, command.env

    async def open_command(self, command: Command) -> IsloStream:
        """As the surface says; there is no duplex socket."""
        config, env = self._request(command, "stream")
        line = relay_command("stream", {**config, "tty": command.tty})
        output = self._api.exec_stream(self._remote, line, env, idle=IDLE)
        pusher = Pusher(config["folder"], self._push)
        stream = IsloStream(output, pusher, self.name, self._broken)
        await stream.started(self._not_run(command))
        return stream

    async def _push(self, command: Sequence[str]) -> None:
        execute = self._sandboxes.exec_in_sandbox
        await self._call(execute, command=list(command), doing="input was pushed")

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
        config, env = self._request(command, "run")
        config |= {"timeout": timeout, "max_output": max_output}
        if len(stdin) > _INLINE_STDIN:
            config["stdin_file"] = f"{config['folder']}.in"
            await self.write_file(config["stdin_file"], stdin)
        else:
            config["stdin"] = base64.b64encode(stdin).decode()
        limit = None if timeout is None else timeout + _GRACE
        try:
            answer = await self._relay("run", config, self._not_run(command), env, limit)
        except (asyncio.CancelledError, SandboxTimeout):
            await asyncio.shield(self._give_up(config["folder"]))
            raise
        if answer.get("timed_out"):
            raise self._too_slow(command, timeout)
        code = answer.get("code")
        return ExecResult(
            stdout=_decoded(answer.get("out"))[:max_output].decode(errors="replace"),
            stderr=_decoded(answer.get("err"))[:max_output].decode(errors="replace"),
            exit_code=code if isinstance(code, int) and abs(code) < 2**31 else -1,
            truncated=bool(answer.get("truncated")),
        )

    def _not_run(self, command: Command, what: str = "run") -> str:
        return f"{command.program!r} could not be {what} in sandbox {self.name!r}"

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
        config, env = self._request(command, "spawn")
        await self._relay("spawn", config, self._not_run(command, "started"), env)

    async def set_up(self) -> str:
        """What a sandbox needs each time it has booted; its marker. Shows that commands run."""
        config = {"folder": IO_FOLDER, "workdir": self.workdir, "variable": MARKER}
        answer = await self._relay("setup", config, f"Sandbox {self.name!r} could not be set up")
        return str(answer.get("marker", ""))

    async def read_file(self, path: str) -> bytes:
        """A file anywhere in the sandbox, by the files API. ExecFailed if there is none."""
        try:
            return await self._api.download(self._remote, path)
        except (SandboxNotFound, InvalidState) as error:
            if isinstance(error, SandboxNotFound) and await self._state() == "running":
                raise ExecFailed(f"There is no file {path} in sandbox {self.name!r}.") from error
            raise await self._broken(error) from error

    async def write_file(self, path: str, content: bytes) -> None:
        await self._call(
            self._sandboxes.upload_file,
            path=path,
            file=("file", content),
            doing=f"a file was put to {path}",
            timeout=_UPLOAD_TIMEOUT,
        )

    # --- the relay, whose answers are untrusted

    async def _relay(
        self,
        mode: str,
        config: Mapping[str, Any],
        problem: str,
        env: Mapping[str, str] | None = None,
        limit: float | None = _GRACE,
    ) -> dict[str, Any]:
        """Run the relay to its end by POST and asking; what it says. The request may arrive any
        number of times: the relay does it once. ExecFailed, which begins with ``problem``, if it
        says that it failed."""
        started = await self._call(
            self._sandboxes.exec_in_sandbox,
            command=relay_command(mode, config),
            env=dict(env or {}),
            doing="a command was run",
        )
        asking, doing = self._sandboxes.get_exec_result, "a command's result was asked for"
        async for _ in attempts(limit, first=_POLL_FIRST, most=_POLL_MOST, growth=1.3):
            result = await self._call(asking, started.exec_id, doing=doing)
            if result.status in ("completed", "failed", "timeout"):
                answer = await self._answer(mode, result)
                if answer.get("failed") is not None:
                    raise ExecFailed(f"{problem}: {printable(str(answer['failed']))[:500]}")
                return answer
        raise SandboxTimeout(
            f"Islo gave no result of a command in sandbox {self.name!r} within {limit:g} s. Look "
            f"at it with `sandbox-kernel ps`."
        )

    async def _answer(self, mode: str, result: Any) -> dict[str, Any]:
        for kind, payload in RecordReader().feed(result.stdout or ""):
            if kind == "r":
                answer = _json(_decoded(payload))
                if isinstance(path := answer.get("file"), str):
                    answer = _json(await self._ask(self._api.download(self._remote, path)))
                return answer
        said = printable(f"{result.stderr or ''} {result.stdout or ''}").strip()[-500:]
        if await self._state() != "running":
            raise await self._broken(None)
        raise ExecFailed(
            f"No command can be run in sandbox {self.name!r} ({mode}, exit code "
            f"{result.exit_code}): {said or 'it said nothing'}. The image needs python3."
        )

    async def _call(self, method: Callable[..., Awaitable[T]], *more: Any, **fields: Any) -> T:
        return await self._ask(self._api.call(method, self._remote, *more, **fields))

    async def _ask(self, asking: Awaitable[T]) -> T:
        try:
            return await asking
        except (SandboxNotFound, InvalidState) as error:
            raise await self._broken(error) from error

    # --- its state

    async def _look(self) -> str:
        """Islo's own state; ``deleted`` if it has no such sandbox."""
        try:
            asking = self._sandboxes.get_sandbox
            found = await self._api.call(asking, self._remote, doing="a sandbox was looked up")
        except SandboxNotFound:
            return "deleted"
        # Another one may have the name now.
        return str(found.status).lower() if found.id == self.id else "deleted"

    async def _state(self) -> str:
        """``running``, ``paused``, ``stopped``, ``gone``, ``starting`` or ``unknown``."""
        return STATES.get(await self._look(), "unknown")

    async def reached(self, *wanted: str, timeout: float) -> str:
        """Wait for Islo's own word for the state to be one that lasts; SandboxTimeout if it is
        not one of ours (``wanted``) by then. A failed or deleted one is SandboxGone at once."""
        word = ""
        async for _ in attempts(timeout, first=_POLL_FIRST, most=_POLL_MOST, growth=1.5):
            word = await self._look()
            state = STATES.get(word, "unknown")
            if state in wanted and word not in _PASSING:
                return state
            if state == "gone":
                raise SandboxGone(f"Sandbox {self.name!r} has ended: Islo says {word!r}.")
        raise SandboxTimeout(
            f"Sandbox {self.name!r} is {word!r} at Islo after {timeout:g} s, not "
            f"{' or '.join(wanted)}. Try again later."
        )

    async def _broken(self, error: BaseException | None) -> SandboxError:
        """The error for a sandbox that could not be used."""
        if self._stored() is None:
            return SandboxGone(f"Sandbox {self.name!r} has ended: it was removed. Make a new one.")
        word = await self._look()
        state = STATES.get(word, "unknown")
        if state == "paused":
            return SandboxPaused(
                f"Sandbox {self.name!r} is paused: it was asked to, or not used for its lease of "
                f"{self.spec.lease_seconds:g} s. `sandbox-kernel resume {self.name}` lets it go on."
            )
        if state in ("stopped", "gone"):
            reason = self._noted("ended") or f"Islo says it is {word!r}"
            way_out = f"Clear it away with `sandbox-kernel rm {self.name}`."
            if state == "stopped":
                way_out = f"`sandbox-kernel resume {self.name}` starts it again with its files."
            return SandboxGone(f"Sandbox {self.name!r} has ended: {reason}. {way_out}")
        return SandboxError(
            f"The connection to sandbox {self.name!r} broke (it is {word!r}): "
            f"{error or 'the stream ended early'}"
        )

    # --- its life

    async def pause(self) -> None:
        """Freeze it with its memory. Every stream to it breaks."""
        state = await self.reached("running", "paused", "stopped", timeout=_STATE_TIMEOUT)
        if state == "stopped":
            raise SandboxGone(f"Sandbox {self.name!r} is stopped, so it cannot be paused.")
        if state == "running":
            await self._change(self._sandboxes.pause_sandbox, "it was paused", "paused")

    async def resume(self) -> None:
        """Bring it back, from paused or stopped. Never makes a second one."""
        state = await self.reached("running", "paused", "stopped", timeout=_STATE_TIMEOUT)
        if state != "running":
            await self._change(self._sandboxes.resume_sandbox, "it was resumed", "running")
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
                await self._relay("goodbye", {"seconds": _GOODBYE}, "No goodbye")
                self._note(log=await self.logs())
            except SandboxError as error:
                log.debug("sandbox %s is stopped without goodbye: %s", self.name, error)
        await self._end("it was stopped")

    async def kill(self) -> None:
        if await self._state() not in ("stopped", "gone"):
            await self._end("it was killed")

    async def _end(self, reason: str) -> None:
        self._note(ended=reason)
        try:
            await self._change(self._sandboxes.stop_sandbox, "it was stopped", "stopped")
        except SandboxGone:
            pass

    # --- what is known

    async def logs(self, *, tail: int | None = None) -> str:
        """What spawned commands print. Of a stopped one, what it had said when it was stopped."""
        try:
            content = await self._api.download(self._remote, f"{IO_FOLDER}/log")
            text = content[-_LOG_SIZE:].decode(errors="replace")
        except (SandboxNotFound, InvalidState):
            text = self._noted("log")
        return last_lines(text, tail)

    async def info(self) -> SandboxInfo:
        word = await self._look()
        state = STATES.get(word, "unknown").replace("starting", "running")
        record = self._stored() or self._record
        detail: dict[str, Any] = {"sandbox": self._remote, "status": word}
        if state == "stopped" and record.data.get("ended"):
            detail["reason"] = record.data["ended"]
        if record.data.get("profile"):
            detail["gateway_profile"] = record.data["profile"].get("id")
        return self._info(state, detail=detail)


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SandboxError("The relay in the sandbox gave an answer that is none.")
    return found


def _decoded(value: object) -> bytes:
    try:
        return base64.b64decode(value if isinstance(value, (str, bytes)) else b"")
    except ValueError:
        raise SandboxError("The relay in the sandbox gave output that is none.") from None
