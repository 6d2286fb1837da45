"""Control server: answers control calls, lines of JSON on the stream with the target ``control``.

The host sends ``{"id": n, "call": name, "args": {...}}`` and gets ``{"id": n, "result": ...}`` or
``{"id": n, "error": {"kind": ..., "message": ...}}``. Events (``{"event": name, ...}``) come
unasked.
"""

import json
from typing import Any, Callable, Dict

from ..wire.frames import Buffer
from ..wire.lines import LineReader
from ..wire.mux import Stream
from ..wire.peer import Peer


class CallError(Exception):
    """A control call has failed. ``kind`` is for programs, the message for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Later:
    """Returned by a call that answers later, with ``finish`` or ``fail``."""

    def __init__(self) -> None:
        self._send: "Callable[[Dict[str, Any]], object] | None" = None
        self._answer: "Dict[str, Any] | None" = None

    def finish(self, result: Any) -> None:
        self._set({"result": result})

    def fail(self, error: CallError) -> None:
        self._set(_error(error.kind, error))

    def _set(self, answer: Dict[str, Any]) -> None:
        self._answer = answer
        if self._send is not None:
            self._send(answer)

    def send_with(self, send: "Callable[[Dict[str, Any]], object]") -> None:
        self._send = send
        if self._answer is not None:
            send(self._answer)


def _error(kind: str, error: Exception) -> Dict[str, Any]:
    return {"error": {"kind": kind, "message": str(error)}}


class ControlServer:
    """Handles one control stream; ``calls`` maps a name to a function of keyword arguments."""

    def __init__(
        self,
        peer: Peer,
        stream: Stream,
        calls: Dict[str, Callable[..., Any]],
        on_closed: "Callable[[ControlServer], object]",
    ) -> None:
        self._peer = peer
        self._stream = stream
        self._calls = calls
        self._on_closed = on_closed
        self._lines = LineReader()
        stream.owner = self

    def send(self, message: Dict[str, Any]) -> None:
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._peer.flush_soon()

    def on_data(self, payload: Buffer) -> None:
        try:
            for line in self._lines.feed(payload):
                self._call(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._stream.reset("control: %r" % error)
            self._on_closed(self)
            return
        self._stream.consumed(len(payload))

    def _call(self, request: Dict[str, Any]) -> None:
        id_, name, args = request["id"], request["call"], request["args"]
        function = self._calls.get(name)
        try:
            if function is None:
                raise CallError("unknown-call", "the agent has no call %r" % name)
            result = function(**args)
        except CallError as error:
            answer = _error(error.kind, error)
        except (TypeError, ValueError, OSError) as error:
            answer = _error(type(error).__name__, error)
        else:
            if isinstance(result, Later):
                result.send_with(lambda later: self.send({"id": id_, **later}))
                return
            answer = {"result": result}
        self.send({"id": id_, **answer})

    def on_finished(self) -> None:
        self._stream.finish()
        self._on_closed(self)

    def on_reset(self, reason: str) -> None:
        self._on_closed(self)

    def on_room(self) -> None:
        """Nothing waits for room: answers are few and small."""
