"""Control client: calls to the agent, and its events."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable
from typing import Any

from sandbox_kernel import errors
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.tunnel.clock import since_boot
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.wire import WireError
from sandbox_kernel.wire.frames import Buffer
from sandbox_kernel.wire.lines import LineReader
from sandbox_kernel.wire.mux import CONTROL
from sandbox_kernel.wire.peer import Peer

log = logging.getLogger("sandbox_kernel.tunnel")

SPARE, SPARE_A_SECOND = 4096, 10.0
"""Unrequested messages (events, late answers) that an agent may send at once, and each second."""
_ERRORS = {"launch": errors.KernelLaunchFailed, "missing": errors.KernelProgramMissing}


class ControlClient:
    """Belongs to one session. Each call is made exactly once, also over a broken link."""

    def __init__(
        self, peer: Peer, sandbox: str, on_event: Callable[[dict[str, Any]], object]
    ) -> None:
        self._peer = peer
        self._sandbox = sandbox
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._lines = LineReader()
        self._failure: SandboxError | None = None
        self._spare, self._counted_at = float(SPARE), since_boot()
        self._stream = peer.mux.open("control", CONTROL)
        self._stream.owner = self

    async def call(self, name: str, *, timeout: float = 30.0, **args: Any) -> Any:
        """Call the agent. After a SandboxTimeout it may still happen, when the link is back."""
        if self._failure is not None:
            raise self._failure
        id_ = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[id_] = future
        self._stream.write(json.dumps({"id": id_, "call": name, "args": args}).encode() + b"\n")
        self._peer.flush_soon()
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise errors.SandboxTimeout(
                f"The agent in sandbox {self._sandbox!r} did not answer {name!r} within "
                f"{timeout:g} s. `sandbox-kernel logs {self._sandbox}` may say why."
            ) from None
        finally:
            self._waiting.pop(id_, None)

    def fail(self, error: SandboxError) -> None:
        """End all calls, those under way and those to come."""
        self._failure = self._failure or error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def on_data(self, payload: Buffer) -> None:
        events: list[dict[str, Any]] = []
        try:
            for line in self._lines.feed(payload):
                self._message(json.loads(line), events)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"control message is not readable ({type(error).__name__})"
            raise WireError(why) from error
        self._stream.consumed(len(payload))
        for event in events:
            try:
                self._on_event(event)
            except Exception:  # a bug of ours must not end the session and its other calls
                log.exception(
                    "A mistake in sandbox-kernel: an event of sandbox %s was not handled. Please "
                    "report it.",
                    self._sandbox,
                )

    def _message(self, message: Any, events: list[dict[str, Any]]) -> None:
        if not isinstance(message, dict):
            raise TypeError("no object")
        if "event" in message:
            self._unasked()
            events.append(message)
            return
        future = self._waiting.get(message["id"])
        if future is None or future.done():
            return self._unasked()  # the caller has given up
        error = message.get("error")
        if error is None:
            future.set_result(message["result"])
        else:
            kind, text = _ERRORS.get(error["kind"], SandboxError), str(error["message"])[:2000]
            future.set_exception(kind(f"In sandbox {self._sandbox!r}: {printable(text)}"))

    def _unasked(self) -> None:
        now = since_boot()
        passed = (now - self._counted_at) * SPARE_A_SECOND
        self._spare = min(SPARE, self._spare + passed) - 1
        self._counted_at = now
        if self._spare < 0:
            raise WireError("too many control messages that nobody asked for")

    def on_finished(self) -> None:
        self.on_reset("closed by the agent")

    def on_reset(self, reason: str) -> None:
        # Without it the kernel could not even be killed, so the session ends, too.
        raise WireError(f"the control stream has ended: {reason[:200]!r}")

    def on_room(self) -> None:
        """Nothing waits for room: calls are few and small."""
