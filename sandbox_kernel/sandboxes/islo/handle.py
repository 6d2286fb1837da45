"""One sandbox at Islo: commands, streams, its states and its end."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxPaused,
    SandboxTimeout,
)
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.base import (
    GUEST_PATH,
    MAX_OUTPUT,
    ExecResult,
    SandboxHandle,
    SandboxInfo,
)
from sandbox_kernel.sandboxes.islo.api import Api, InvalidState
from sandbox_kernel.sandboxes.islo.stream import IsloStream, relay_command, relay_records
from sandbox_kernel.text import last_lines, printable

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
"""Islo's words for a sandbox's state -> ours. Those on its way up are in ``STARTING``."""
STARTING = ("creating", "provisioning", "pending", "queued", "starting", "resuming", "restarting")
PASSING = (*STARTING, "pausing", "stopping")
_POLL_FIRST, _POLL_MOST = 0.03, 2.0
_STATE_TIMEOUT = 120.0
_GOODBYE = 5.0
_INLINE_STDIN = 24 * 1024
_LOG_SIZE = 256 * 1024
_GRACE = 60.0
_GIVE_UP_TIMEOUT = 20.0


class IsloHandle(SandboxHandle):
    """A sandbox that runs, is paused or stopped; ``resume`` brings it back from each."""

    backend = "islo"
    python = "python3"

    def __init__(self, record: Record, client: IsloClient) -> None:
        self._client = client
        self._record = record
        self._remote: str = record.data["sandbox"]
        self._api: Api = client.api(record)
        self.name = record.name
        self.id = record.id
        self.spec = record.sandbox_spec()

    @property
    def agent_lease(self) -> float:
        """Islo pauses the sandbox when its lease is over, and the agent goes on after that."""
        return self.spec.lease_seconds + 30 * 86400.0

    # --- commands

    def _env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**self.spec.env, **(env or {})}

    async def open_stream(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        tty: tuple[int, int] | None = None,
        duplex: bool = False,
    ) -> IsloStream:
        """As the surface says; there is no duplex socket."""
        self._check_words(argv)
        config = {
            "folder": f"{IO_FOLDER}/stream-{secrets.token_hex(8)}",
            "cwd": cwd or self.workdir,
            "tty": tty,
        }
        return await IsloStream.open(
            self._api,
            self._remote,
            argv,
            config,
            self._env(env),
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

    async def exec(
        self,
        cmd: str,
        args: Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """As the surface says: a POST, and then asking for the result. The time limit is kept
        inside the sandbox, so the command is killed also if this process is gone by then."""
        argv = [cmd, *(args or ())]
        self._check_words(argv)
        folder = f"{IO_FOLDER}/run-{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "folder": folder,
            "argv": argv,
            "cwd": cwd or self.workdir,
            "timeout": timeout,
            "max_output": max_output,
        }
        if len(stdin) > _INLINE_STDIN:
            config["stdin_file"] = f"{folder}.in"
            await self.write_file(config["stdin_file"], stdin)
        else:
            config["stdin"] = base64.b64encode(stdin).decode()
        try:
            answer = await self._run("run", config, self._env(env), timeout)
        except (asyncio.CancelledError, SandboxTimeout):
            await asyncio.shield(self._give_up(folder))
            raise
        if answer.get("failed") is not None:
            raise ExecFailed(
                f"{cmd!r} could not be run in sandbox {self.name!r}: "
                f"{printable(str(answer['failed']))[:500]}"
            )
        if answer.get("timed_out"):
            raise SandboxTimeout(
                f"{cmd!r} in sandbox {self.name!r} did not end within {timeout:g} s and was "
                f"killed. Give a longer timeout if it needs one."
            )
        return ExecResult(
            stdout=_decoded(answer.get("out"), max_output),
            stderr=_decoded(answer.get("err"), max_output),
            exit_code=_integer(answer.get("code")),
            truncated=bool(answer.get("truncated")),
        )

    async def _give_up(self, folder: str) -> None:
        """Nobody waits for a command any more: the relay is to kill it."""
        script = 'mkdir -p -m 700 "$0" && : > "$0/kill"'
        try:
            await asyncio.wait_for(self._push(["/bin/sh", "-c", script, folder]), _GIVE_UP_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError) as error:
            log.warning("A command in sandbox %s may run on: %s", self.name, error)

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        main: bool = False,
    ) -> None:
        """As the surface says. The sandbox does not end with a ``main`` command: only from
        outside can it be ended, and Islo pauses it when it is not used."""
        self._check_words(argv)
        folder = f"{IO_FOLDER}/spawn-{secrets.token_hex(8)}"
        config = {"folder": folder, "argv": list(argv), "cwd": cwd or self.workdir}
        answer = await self._run("spawn", config, self._env(env), _GRACE)
        if answer.get("failed") is not None:
            raise ExecFailed(
                f"{argv[0]!r} could not be started in sandbox {self.name!r}: "
                f"{printable(str(answer['failed']))[:500]}"
            )

    async def set_up(self) -> str:
        """What a sandbox needs each time it has booted; its marker. Shows that commands run."""
        config = {"folder": IO_FOLDER, "workdir": self.workdir, "variable": MARKER}
        answer = await self._run("setup", config, {}, _GRACE)
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
        await self._asked(self._api.upload(self._remote, path, content))

    async def install_guest(self, zipapp: bytes) -> None:
        """One upload; the default would need a command, too."""
        await self.write_file(GUEST_PATH, zipapp)

    def _check_words(self, argv: Sequence[str]) -> None:
        if any("\0" in word for word in argv):
            raise ExecFailed(f"{argv[0]!r} cannot be run in sandbox {self.name!r}: a NUL in it.")

    async def _run(
        self, mode: str, config: Mapping[str, Any], env: Mapping[str, str], timeout: float | None
    ) -> dict[str, Any]:
        """Run the relay to its end by POST and asking; what it says. The request may arrive any
        number of times: the relay does it once."""
        started = await self._asked(
            self._api.call(
                self._api.sandboxes.exec_in_sandbox,
                self._remote,
                command=relay_command(mode, config),
                env=dict(env),
                doing="a command was run",
            )
        )
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout + _GRACE
        delay = _POLL_FIRST
        while True:
            result = await self._asked(
                self._api.call(
                    self._api.sandboxes.get_exec_result,
                    self._remote,
                    started.exec_id,
                    doing="a command's result was asked for",
                )
            )
            if result.status in ("completed", "failed", "timeout"):
                return await self._answer(mode, result)
            if deadline is not None and loop.time() > deadline:
                raise SandboxTimeout(
                    f"Islo gave no result of a command in sandbox {self.name!r} within "
                    f"{(timeout or 0) + _GRACE:g} s. Look at it with `sandbox-kernel ps`."
                )
            await asyncio.sleep(delay)
            delay = min(_POLL_MOST, 1.3 * delay)

    async def _answer(self, mode: str, result: Any) -> dict[str, Any]:
        for kind, payload in relay_records(result.stdout or ""):
            if kind == "r":
                answer = _json(base64.b64decode(payload))
                if isinstance(answer.get("file"), str):
                    answer = _json(
                        await self._asked(self._api.download(self._remote, answer["file"]))
                    )
                return answer
        said = printable(f"{result.stderr or ''} {result.stdout or ''}").strip()[-500:]
        if await self._state() != "running":
            raise await self._broken(None)
        raise ExecFailed(
            f"No command can be run in sandbox {self.name!r} ({mode}, exit code "
            f"{result.exit_code}): {said or 'it said nothing'}. The image needs python3."
        )

    async def _asked(self, asking: Any) -> Any:
        try:
            return await asking
        except (SandboxNotFound, InvalidState) as error:
            raise await self._broken(error) from error

    # --- its state

    async def _look(self) -> str:
        """Islo's own word for the state; ``deleted`` if it has no such sandbox."""
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

    async def reached(self, *wanted: str, timeout: float) -> str:
        """Wait for Islo's own word for the state to be one that lasts; SandboxTimeout if it is
        not one of ours (``wanted``) by then. A failed or deleted one is SandboxGone at once."""
        loop = asyncio.get_running_loop()
        deadline, delay = loop.time() + timeout, _POLL_FIRST
        while True:
            word = await self._look()
            state = STATES.get(word, "unknown")
            if word not in PASSING and state in wanted:
                return state
            if state == "gone":
                raise SandboxGone(f"Sandbox {self.name!r} has ended: Islo says {word!r}.")
            if loop.time() > deadline:
                raise SandboxTimeout(
                    f"Sandbox {self.name!r} is {word!r} at Islo after {timeout:g} s, not "
                    f"{' or '.join(wanted)}. Try again later."
                )
            await asyncio.sleep(delay)
            delay = min(_POLL_MOST, 1.5 * delay)

    async def _broken(self, error: BaseException | None) -> SandboxError:
        """What to tell who used the sandbox and could not."""
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
        return Records().current(self._record)

    def _note(self, **facts: Any) -> None:
        if self._record.data.get("elsewhere"):
            self._record.data.update(facts)
        else:
            Records().note(self._record, **facts)

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
                await self._run("goodbye", {"seconds": _GOODBYE}, {}, _GRACE)
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
        return SandboxInfo(
            name=self.name,
            id=self.id,
            backend=self.backend,
            status=state,
            created=self._record.created,
            limits={str(k): str(v) for k, v in self._record.data.get("limits", {}).items()},
            detail=detail,
        )


def whole_seconds(seconds: float) -> int:
    return max(1, math.ceil(seconds))


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SandboxError("The relay in the sandbox gave an answer that is none.")
    return found


def _decoded(value: object, limit: int) -> str:
    try:
        return base64.b64decode(str(value or ""))[:limit].decode(errors="replace")
    except ValueError:
        raise SandboxError("The relay in the sandbox gave output that is none.") from None


def _integer(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < 2**31 else -1
