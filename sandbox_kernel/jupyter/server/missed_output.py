"""The output that a kernel made while there was no server, and that no client has received yet.

Every message of the kernel's iopub channel has an id. ``KernelOutput`` marks the last one that a
client received; after a restart the recording from the sandbox is cut there. A message counts as
received when the operating system has taken all of it for the client's connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sandbox_kernel.errors import SandboxGone
from sandbox_kernel.jupyter.envelopes import Envelope, open_envelope
from sandbox_kernel.jupyter.server.cell_lines import CellLines
from sandbox_kernel.jupyter.server.notices import Notices
from sandbox_kernel.jupyter.server.saved_kernels import Seen, digest
from sandbox_kernel.recordings import Recording
from sandbox_kernel.tunnel.background import run

if TYPE_CHECKING:
    from sandbox_kernel.jupyter.server.server_kernels import ServerKernels


class KernelOutput:
    """The output of one kernel on its way to clients. With ``due``, the next client that connects
    first gets the output that no client has received."""

    def __init__(self, kernels: ServerKernels, kernel_id: str) -> None:
        self.due = False
        self.notices = Notices()
        self._kernels = kernels
        self._kernel_id = kernel_id
        self._seen = Seen(kernel_id)
        self._sent = self._got = 0
        self._lines = CellLines()

    def sending(self, message_id: str) -> Callable[[], None]:
        """A message is being sent to a client; call the result when the client has received it,
        which may be known later than for messages that were sent later."""
        self._sent = number = self._sent + 1

        def got() -> None:
            if number > self._got:
                self._got = number
                self._seen.mark(message_id)

        return got

    def hint(self, error: Mapping[str, Any]) -> str:
        """A hint after an error of a cell (the content of its message), or an empty string."""
        return self._kernels.hint(self._kernel_id, error)

    def hear(self, envelope: Envelope) -> None:
        """A message of a cell's output is passed on."""
        if (provisioner := self._kernels.provisioner(self._kernel_id)) is not None:
            self._lines.hear(provisioner, envelope)

    def at_end(self) -> str:
        """What to say before a cell ends, or an empty string."""
        provisioner = self._kernels.provisioner(self._kernel_id)
        return "" if provisioner is None else self._lines.at_end(provisioner)

    async def recorded(self, since: int = 0) -> Recording:
        kernel = self._kernels.kernel(self._kernel_id)
        if kernel is None:
            raise SandboxGone(f"Kernel {self._kernel_id} has no sandbox any more.")
        return await run(kernel.recorded(self._kernels.record_limit, since))

    async def missed(self) -> tuple[Recording, list[list[bytes]], bool]:
        """The recording, the part that no client has received, and whether older output is lost."""
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
    """``busy`` or ``idle``, by the kernel's last status for a request of a kind that counts."""
    for parts in reversed(recording.messages):
        envelope = open_envelope(parts)
        if envelope is None or envelope.kind != "status":
            continue
        if counts(envelope.parent_kind):
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
    """Header of the request and content of the reply, for each cell that ended in the last
    ``missed`` messages. The reply itself went to a client that was gone."""
    replies: dict[str, dict[str, Any]] = {}
    ended = []
    for number, parts in enumerate(recording.messages, missed - len(recording.messages)):
        envelope = open_envelope(parts)
        if envelope is None or envelope.parent_kind != "execute_request":
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
