"""Output that was made while there was no server: what of it a client has not got yet.

Every message of the kernel's iopub channel has an id. ``Outlet`` keeps the id of the last that a
client got; after a restart the recording from the sandbox is cut there. A message counts as got
when the operating system has taken all of it for the client's connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.errors import SandboxGone
from sandbox_kernel.jupyter.server.kept import Seen, digest
from sandbox_kernel.jupyter.server.voice import Voice
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.recordings import Recording
from sandbox_kernel.tunnel.background import run

_DELIMITER = b"<IDS|MSG>"
_MAX_HEADER = 1 << 20


@dataclass(frozen=True)
class Envelope:
    """The headers of a message, as far as they are needed here."""

    header: dict[str, Any]
    parent: dict[str, Any]
    content_part: bytes

    @property
    def id(self) -> str:
        return str(self.header["msg_id"])

    @property
    def kind(self) -> str:
        return str(self.header.get("msg_type"))

    def content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.content_part)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def open_envelope(parts: Sequence[bytes]) -> Envelope | None:
    """None if that is no Jupyter message. Signatures are for the client's own reading."""
    try:
        start = list(parts).index(_DELIMITER)
        header_part, parent_part, content_part = (bytes(parts[start + i]) for i in (2, 3, 5))
        if len(header_part) > _MAX_HEADER or len(parent_part) > _MAX_HEADER:
            return None
        header, parent = json.loads(header_part), json.loads(parent_part)
    except (ValueError, IndexError, RecursionError):
        return None
    if not isinstance(header, dict) or not isinstance(header.get("msg_id"), str):
        return None
    return Envelope(header, parent if isinstance(parent, dict) else {}, content_part)


class Outlet:
    """What goes from one kernel to its clients. ``due`` says that the next client that connects
    is to get first what no client has got yet."""

    def __init__(
        self,
        kernel_id: str,
        kernel: Callable[[], SandboxedKernel | None],
        limit: int,
        hint: Callable[[Mapping[str, Any]], str],
    ) -> None:
        self.due = False
        self.voice = Voice()
        self.hint = hint
        """What to say after an error of a cell (the content of its message); empty: nothing."""
        self._kernel = kernel
        self._limit = limit
        self._seen = Seen(kernel_id)
        self._sent = self._got = 0

    def sending(self, message_id: str) -> Callable[[], None]:
        """This message is sent to a client now; to be called when the client has got it. That
        may be known late, after it is known for messages that were sent later."""
        self._sent = number = self._sent + 1

        def got() -> None:
            if number > self._got:
                self._got = number
                self._seen.mark(message_id)

        return got

    async def recorded(self, since: int = 0) -> Recording:
        kernel = self._kernel()
        if kernel is None:
            raise SandboxGone("The kernel has no sandbox any more.")
        return await run(kernel.recorded(self._limit, since))

    async def missed(self) -> tuple[Recording, list[list[bytes]], bool]:
        """The whole recording, the part of it that no client has got, and whether there may have
        been more, which had to make room."""
        recording = await self.recorded()
        return await asyncio.to_thread(self._cut, recording)

    def _cut(self, recording: Recording) -> tuple[Recording, list[list[bytes]], bool]:
        last = self._seen.last()
        if not last:
            return recording, recording.messages, recording.first > 0
        for index in range(len(recording.messages) - 1, -1, -1):
            envelope = open_envelope(recording.messages[index])
            if envelope is not None and digest(envelope.id) == last:
                return recording, recording.messages[index + 1 :], False
        return recording, recording.messages, recording.first > 0

    def close(self) -> None:
        self._seen.close()


def last_state(recording: Recording, counts: Callable[[str], bool]) -> str:
    """``busy`` or ``idle``, by the kernel's last word on a request of a kind that counts."""
    for parts in reversed(recording.messages):
        envelope = open_envelope(parts)
        if envelope is None or envelope.kind != "status":
            continue
        if counts(str(envelope.parent.get("msg_type"))):
            return "busy" if envelope.content().get("execution_state") == "busy" else "idle"
    return "idle"


def protocol_version(recording: Recording) -> str:
    """The version of Jupyter's protocol that the kernel speaks, as its messages say; or empty."""
    for parts in reversed(recording.messages):
        envelope = open_envelope(parts)
        if envelope is not None and isinstance(envelope.header.get("version"), str):
            return str(envelope.header["version"])[:20]
    return ""


def unanswered(recording: Recording, missed: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Cells that ended in the last ``missed`` messages of a recording: (header of the request,
    content of the reply).

    A reply itself goes to the one who asked, and who was gone. What it said follows from what the
    kernel told everybody.
    """
    replies: dict[str, dict[str, Any]] = {}
    ended = []
    for number, parts in enumerate(recording.messages, missed - len(recording.messages)):
        envelope = open_envelope(parts)
        if envelope is None or envelope.parent.get("msg_type") != "execute_request":
            continue
        request = str(envelope.parent.get("msg_id"))
        reply = replies.setdefault(
            request,
            {"status": "ok", "execution_count": None, "user_expressions": {}, "payload": []},
        )
        if envelope.kind == "execute_input":
            reply["execution_count"] = envelope.content().get("execution_count")
        elif envelope.kind == "error":
            error = envelope.content()
            reply.update({k: error.get(k) for k in ("ename", "evalue", "traceback")})
            reply["status"] = "error"
        elif number >= 0 and envelope.content().get("execution_state") == "idle":
            ended.append((envelope.parent, reply))
    return ended
