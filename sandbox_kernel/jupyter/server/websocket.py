"""The connection between a browser and a kernel, which first sends the output that no client has
received, and through which the server shows its notices.

The class is made from the one that the server uses. For kernels of other provisioners it changes
nothing. For ours it marks the last message that a client received and, on the first connection
after a kernel was adopted, *joins* the recording and the live channel: it holds live messages back
until the recording contains the first of them, so nothing is missing and nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from jupyter_client.jsonutil import json_default
from jupyter_server.services.kernels.connection.base import (
    deserialize_msg_from_ws_v1,
    serialize_msg_to_ws_v1,
)
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from tornado.websocket import WebSocketClosedError

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.envelopes import Envelope, json_object, open_envelope
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.cell_ids import note_cell_id
from sandbox_kernel.jupyter.server.missed_output import KernelOutput, unanswered

_REQUEST = "execute_request"
V1 = "v1.kernel.websocket.jupyter.org"
_JOIN_ATTEMPTS, _JOIN_PAUSE = 40, 0.05
_AT_ONCE = 100
"""Messages that are replayed without a pause."""
_MOST_HELD = 32 * 2**20
"""Bytes of live messages that wait for the recording to catch up with them."""

Outputs = Callable[[str], "KernelOutput | None"]


def replaying_class(base: type[Any], outputs: Outputs) -> type[Any] | None:
    """The server's class with replay; None if it is of another family."""
    if not issubclass(base, ZMQChannelsWebsocketConnection):
        return None
    name = f"Replaying{base.__name__}"
    return type(name, (ReplayingConnection, base), {"_outputs": staticmethod(outputs)})


class ReplayingConnection(ZMQChannelsWebsocketConnection):
    """See above. All of it runs on the server's loop."""

    _outputs: Outputs

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._output: KernelOutput | None = None
        self._joining: asyncio.Task[None] | None = None
        self._held: list[list[bytes]] = []
        self._held_bytes = 0
        self._arrived = asyncio.Event()
        self._answered: set[str] | None = set()
        """Requests whose replies came over this connection, until the missed replies are sent."""
        self._sent: set[str] = set()
        """Ids of the recorded messages, while live messages may still be among them."""
        self._replaying = False
        self._message_id = ""

    async def prepare(self) -> None:
        provisioner = getattr(self.kernel_manager, "provisioner", None)
        if isinstance(provisioner, SandboxProvisioner) and provisioner.paused:
            self.log.info("Kernel %s was paused and is resumed: a client connects.", self.kernel_id)
            await provisioner.resume()
        await super().prepare()

    def connect(self) -> Any:
        self._output = output = self._outputs(self.kernel_id)
        if output is not None:
            output.notices.join(self)
            if output.due:
                output.due = False
                # Before the channels are open: no live message may slip through.
                self._joining = asyncio.ensure_future(self._join(output))
        connected = super().connect()
        if connected is None:
            self._stop_joining()
        return connected

    def disconnect(self) -> None:  # type: ignore[override]
        self._stop_joining()
        if self._output is not None:
            self._output.notices.leave(self)
        super().disconnect()

    def _stop_joining(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None
            if self._output is not None:
                self._output.due = True  # the next client gets the rest

    # --- from the browser to the kernel

    def handle_incoming_message(self, incoming_msg: Any) -> None:
        if self._output is not None:
            request = self._execute_request(incoming_msg)
            if request is not None:
                self._output.notices.cell_sent(self, request)
                provisioner = getattr(self.kernel_manager, "provisioner", None)
                note_cell_id(provisioner, request, incoming_msg)
        super().handle_incoming_message(incoming_msg)

    def _execute_request(self, message: str | bytes) -> dict[str, Any] | None:
        """The header, if it is one. The server itself refuses what is no message."""
        header = None
        if self.subprotocol == V1 and isinstance(message, bytes):
            try:
                channel, parts = deserialize_msg_from_ws_v1(message)
                header = json_object(parts[0]) if channel == "shell" else None
            except (ValueError, IndexError):
                return None
        elif isinstance(message, str) and _REQUEST in message:
            header = (json_object(message) or {}).get("header")
        found = isinstance(header, dict) and header.get("msg_type") == _REQUEST
        return header if found else None

    # --- notices of the server

    @property
    def tab_id(self) -> str:
        return str(self.session.session)

    def show(self, text: str, cell: dict[str, Any]) -> None:
        try:
            self._print(text, cell)
        except WebSocketClosedError:
            self.log.warning("A tab of kernel %s has closed without: %s", self.kernel_id, text)

    def _print(self, text: str, cell: dict[str, Any] | None) -> None:
        content = {"name": "stderr", "text": f"{text}\n"}
        self._send("iopub", self.session.msg("stream", content, parent=cell))

    def on_kernel_restarted(self) -> None:
        if not self._announce_death("restarting"):
            super().on_kernel_restarted()

    def on_restart_failed(self) -> None:
        if not self._announce_death("dead"):
            super().on_restart_failed()

    def _announce_death(self, status: str) -> bool:
        """The kernel has died and is restarted or given up. The cell that ran gets the reason as
        its last output, because the browser lets go of the cell with this status; the status has
        the reason, too. False if the server should announce it."""
        provisioner = getattr(self.kernel_manager, "provisioner", None)
        if self._output is None or not isinstance(provisioner, SandboxProvisioner):
            return False
        self.log.warning("Kernel %s died; its status is %r now.", self.kernel_id, status)
        iopub = self.channels.get("iopub")
        if iopub is not None and not iopub.closed():
            iopub.flush()  # the last output of the dead kernel comes first
        reason = provisioner.obituary
        if reason:
            self._output.notices.kernel_died(self, reason)
        content = {"execution_state": status, **({"reason": reason} if reason else {})}
        self._send("iopub", self.session.msg("status", content))
        return True

    # --- from the kernel to the browser

    def handle_outgoing_message(self, stream: Any, outgoing_msg: list[Any]) -> None:
        if self._output is None:
            return super().handle_outgoing_message(stream, outgoing_msg)
        channel = stream if isinstance(stream, str) else getattr(stream, "channel", None)
        if channel != "iopub":
            if self._joining is not None and self._answered is not None:
                envelope = open_envelope(outgoing_msg)
                if envelope is not None:
                    self._answered.add(str(envelope.parent.get("msg_id")))
            return super().handle_outgoing_message(stream, outgoing_msg)
        if self._joining is not None:
            self._held.append(outgoing_msg)
            self._held_bytes += sum(map(len, outgoing_msg))
            self._arrived.set()
            return None
        return self._live(outgoing_msg)

    def _live(self, parts: list[bytes]) -> None:
        """Pass a live message on, unless the recording, which is ahead, had it."""
        if self._sent:
            if not self._sent.isdisjoint(_ids([parts])):
                return
            self._sent.clear()
        self._pass_on(parts)

    def _pass_on(self, parts: list[bytes]) -> None:
        iopub = self.channels.get("iopub")
        if iopub is None:
            return  # closed meanwhile
        envelope = open_envelope(parts)
        if envelope is not None and not self._replaying:
            self._say_before(envelope)
        self._message_id = envelope.id if envelope is not None else ""
        try:
            super().handle_outgoing_message(iopub, parts)
        finally:
            self._message_id = ""
        if envelope is not None:
            self._hear(envelope)

    def _say_before(self, envelope: Envelope) -> None:
        """A message of a cell is about to be passed on. After the last one, a browser shows no more
        output of that cell."""
        output, request = self._output, str(envelope.parent.get("msg_id"))
        cell = output.notices.cell(self, request) if output is not None else None
        if output is None or cell is None:
            return
        if not _is_idle(envelope):
            output.hear(envelope)
        elif text := output.at_end():
            self.show(text, cell)

    def _hear(self, envelope: Envelope) -> None:
        """A message was passed on, after which a notice may be due."""
        if self._output is None:
            return
        if envelope.kind == "error" and not self._replaying:
            cell = self._output.notices.cell(self, str(envelope.parent.get("msg_id")))
            if cell is not None and (text := self._output.hint(envelope.content())):
                self.show(text, cell)
        if _is_idle(envelope):
            self._output.notices.cell_ended(self, str(envelope.parent.get("msg_id")))

    @property
    def write_message(self) -> Callable[..., Any]:
        write = self.websocket_handler.write_message
        message_id, output = self._message_id, self._output
        if not message_id or output is None:
            return write

        got = output.sending(message_id)

        def write_and_note(*args: Any, **kwargs: Any) -> Any:
            written = write(*args, **kwargs)
            connection = self.websocket_handler.ws_connection
            stream = getattr(connection, "stream", None)
            if stream is not None and not stream.writing():
                got()  # the system has it all
            else:
                written.add_done_callback(lambda done: None if done.exception() else got())
            return written

        return write_and_note

    # --- joining

    async def _join(self, output: KernelOutput) -> None:
        sent = self._sent
        try:
            # The caller opens the channels in this turn of the loop.
            await asyncio.sleep(0)
            recording, messages, incomplete = await output.missed()
            sent.update(await asyncio.to_thread(_ids, recording.messages))
            if incomplete:
                self._show_loss(messages)
            await self._replay(messages)
            self._reply(await asyncio.to_thread(unanswered, recording, len(messages)))
            await self._first_live(output, sent, recording.next)
        except SandboxError as error:
            self.log.error(
                "Output that kernel %s made while there was no server is lost: %s",
                *(self.kernel_id, error),
            )
        except WebSocketClosedError:
            output.due = True
        except Exception:  # live output goes on, whatever it was
            self.log.exception("Earlier output of kernel %s cannot be shown", self.kernel_id)
        self._joining = None
        held, self._held, self._held_bytes = self._held, [], 0
        for parts in held:
            self._live(parts)

    async def _first_live(self, output: KernelOutput, sent: set[str], since: int) -> None:
        """Wait for the first live message, then send what the recording has up to it."""
        while not self._held:
            self._arrived.clear()
            await self._arrived.wait()
        first = set(_ids(self._held[:1]))
        for _ in range(_JOIN_ATTEMPTS):
            if not first or first & sent:
                return
            if self._held_bytes > _MOST_HELD:
                self.log.warning(
                    "Kernel %s prints faster than its earlier output can be replayed; some of that "
                    "may be missing.",
                    self.kernel_id,
                )
                return
            recording = await output.recorded(since)
            since = recording.next
            sent.update(await asyncio.to_thread(_ids, recording.messages))
            await self._replay(recording.messages)
            if not first & sent:
                await asyncio.sleep(_JOIN_PAUSE)
        self.log.warning("The sandbox of kernel %s does not record all output.", self.kernel_id)

    async def _replay(self, messages: Sequence[list[bytes]]) -> None:
        if messages:
            self.log.info("Replaying %d messages of kernel %s", len(messages), self.kernel_id)
        for start in range(0, len(messages), _AT_ONCE):
            limit_rate, self.limit_rate, self._replaying = self.limit_rate, False, True
            try:
                for parts in messages[start : start + _AT_ONCE]:
                    self._pass_on(parts)
            finally:
                self.limit_rate, self._replaying = limit_rate, False
            await asyncio.sleep(0)  # other kernels' clients have a turn

    def _reply(self, ended: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """The replies that this client has missed."""
        for request, content in ended:
            mine = request.get("session") == self.session.session
            if mine and str(request.get("msg_id")) not in (self._answered or ()):
                self._send("shell", self.session.msg("execute_reply", content, parent=request))
        self._answered = None

    def _show_loss(self, messages: Sequence[list[bytes]]) -> None:
        text = (
            f"Some output that kernel {self.kernel_id} made while there was no server is lost: "
            f"there was more of it than SandboxServer.record_mib allows."
        )
        self.log.warning(text)
        envelope = open_envelope(messages[0]) if messages else None
        self._print(text, envelope.parent if envelope is not None else None)

    def _send(self, channel: str, message: dict[str, Any]) -> None:
        if self.subprotocol == V1:
            packed = serialize_msg_to_ws_v1(message, channel, self.session.pack)
            self.write_message(packed, binary=True)
        else:
            message = {**message, "channel": channel, "buffers": []}
            self.write_message(json.dumps(message, default=json_default))


def _is_idle(envelope: Envelope) -> bool:
    return envelope.kind == "status" and envelope.content().get("execution_state") == "idle"


def _ids(messages: Sequence[Sequence[bytes]]) -> list[str]:
    return [e.id for e in map(open_envelope, messages) if e is not None]
