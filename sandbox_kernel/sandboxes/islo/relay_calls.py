"""Running the relay in an Islo sandbox to its end: a POST, then asking for the result."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sandbox_kernel.errors import ExecFailed, SandboxError, SandboxNotFound, SandboxTimeout
from sandbox_kernel.sandboxes.islo.api import Api, InvalidState
from sandbox_kernel.sandboxes.islo.stream import WhyBroken, relay_command, relay_records
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.untrusted_text import printable

GRACE = 60.0
"""Seconds for Islo's answer, on top of a command's own time limit."""
_POLL_FIRST, _POLL_MOST = 0.03, 2.0


class RelayCalls:
    """Calls of the relay in one sandbox, for its handle. Answers are untrusted."""

    def __init__(
        self,
        api: Api,
        remote: str,
        name: str,
        *,
        runs: Callable[[], Awaitable[bool]],
        why_broken: WhyBroken,
    ) -> None:
        self._api = api
        self._remote = remote
        self._name = name
        self._runs = runs
        self._why_broken = why_broken

    async def run(
        self, mode: str, config: Mapping[str, Any], env: Mapping[str, str], timeout: float | None
    ) -> dict[str, Any]:
        """Run the relay to its end by POST and asking; what it says. The request may arrive any
        number of times: the relay does it once."""
        started = await self._ask(
            self._api.call(
                self._api.sandboxes.exec_in_sandbox,
                self._remote,
                command=relay_command(mode, config),
                env=dict(env),
                doing="a command was run",
            )
        )
        limit = None if timeout is None else timeout + GRACE
        async for _ in attempts(limit, first=_POLL_FIRST, most=_POLL_MOST, growth=1.3):
            result = await self._ask(
                self._api.call(
                    self._api.sandboxes.get_exec_result,
                    self._remote,
                    started.exec_id,
                    doing="a command's result was asked for",
                )
            )
            if result.status in ("completed", "failed", "timeout"):
                return await self._answer(mode, result)
        raise SandboxTimeout(
            f"Islo gave no result of a command in sandbox {self._name!r} within {limit:g} s. Look "
            f"at it with `sandbox-kernel ps`."
        )

    async def _answer(self, mode: str, result: Any) -> dict[str, Any]:
        for kind, payload in relay_records(result.stdout or ""):
            if kind == "r":
                answer = _json(base64.b64decode(payload))
                if isinstance(answer.get("file"), str):
                    answer = _json(
                        await self._ask(self._api.download(self._remote, answer["file"]))
                    )
                return answer
        said = printable(f"{result.stderr or ''} {result.stdout or ''}").strip()[-500:]
        if not await self._runs():
            raise await self._why_broken(None)
        raise ExecFailed(
            f"No command can be run in sandbox {self._name!r} ({mode}, exit code "
            f"{result.exit_code}): {said or 'it said nothing'}. The image needs python3."
        )

    async def _ask(self, asking: Awaitable[Any]) -> Any:
        try:
            return await asking
        except (SandboxNotFound, InvalidState) as error:
            raise await self._why_broken(error) from error


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SandboxError("The relay in the sandbox gave an answer that is none.")
    return found


def decoded(value: object, limit: int) -> str:
    try:
        return base64.b64decode(str(value or ""))[:limit].decode(errors="replace")
    except ValueError:
        raise SandboxError("The relay in the sandbox gave output that is none.") from None


def integer(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < 2**31 else -1
