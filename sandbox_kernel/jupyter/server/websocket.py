"""The connection between a browser and a kernel, which first sends what no client has got, and by
which the server speaks in the notebook (``voice``).

The class is made from the one that the server uses. For kernels of other provisioners it changes
nothing. For ours it notes which message was the last that a client got and, on the first
connection after a kernel was adopted, *joins* the recording and the live channel: live messages
are held back until the recording is known to contain the first of them, so nothing is missing
between the two and nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from jupyter_server.services.kernels.connection.base import (
    deserialize_msg_from_ws_v1,
    serialize_msg_to_ws_v1,
)
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from tornado.websocket import WebSocketClosedError

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.replay import Envelope, Outlet, open_envelope, unanswered

_REQUEST = "execute_request"
V1 = "v1.kernel.websocket.jupyter.org"
_JOIN_ATTEMPTS, _JOIN_PAUSE = 40, 0.05
_AT_ONCE = 100
"""Messages that are replayed without a pause."""
_MOST_HELD = 32 * 2**20
"""Bytes of live messages that wait for the recording to catch up with them."""

Outlets = Callable[[str], "Outlet | None"]


def replaying_class(base: type[Any], outlets: Outlets) -> type[Any] | None:
    """The server's class with replay; None if it is of another family."""
    if not issubclass(base, ZMQChannelsWebsocketConnection):
        return None
    name = f"Replaying{base.__name__}"
    return type(name, (ReplayingConnection, base), {"_outlets": staticmethod(outlets)})


class ReplayingConnection(ZMQChannelsWebsocketConnection):
    """See above. All of it runs on the server's loop."""

    _outlets: Outlets

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._outlet: Outlet | None = None
        self._joining: asyncio.Task[None] | None = None
        self._held: list[list[bytes]] = []
        self._held_bytes = 0
        self._arrived = asyncio.Event()
        self._answered: set[str] | None = set()
        """Requests whose replies have come since this connection is there; None when nobody asks
        any more."""
        self._sent: set[str] = set()
        """Ids of what the recording has given, while live messages may still be among them."""
        self._unlimited = False
        self._message_id = ""

    async def prepare(self) -> None:
        provisioner = getattr(self.kernel_manager, "provisioner", None)
        if isinstance(provisioner, SandboxProvisioner) and provisioner.paused:
            self.log.info("Kernel %s was paused, and goes on", self.kernel_id)
            await provisioner.resume()
        await super().prepare()

    def connect(self) -> Any:
        self._outlet = outlet = self._outlets(self.kernel_id)
        if outlet is not None:
            outlet.voice.join(self)
        due = outlet is not None and outlet.due
        if outlet is not None and due:
            outlet.due = False
            # Set before the channels are open: not one live message may slip through.
            self._joining = asyncio.ensure_future(self._join(outlet))
        connected = super().connect()
        if connected is None and due:
            self._stop_joining()
        return connected

    def disconnect(self) -> None:  # type: ignore[override]
        self._stop_joining()
        if self._outlet is not None:
            self._outlet.voice.leave(self)
        super().disconnect()

    def _stop_joining(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None
            if self._outlet is not None:
                self._outlet.due = True  # the next client gets the rest

    # --- from the browser to the kernel

    def handle_incoming_message(self, incoming_msg: Any) -> None:
        if self._outlet is not None:
            request = self._execute_request(incoming_msg)
            if request is not None:
                self._outlet.voice.cell_sent(self, request)
        super().handle_incoming_message(incoming_msg)

    def _execute_request(self, message: str | bytes) -> dict[str, Any] | None:
        """The header, if it is one. What is no message is for the server to refuse."""
        try:
            if self.subprotocol == V1 and isinstance(message, bytes):
                channel, parts = deserialize_msg_from_ws_v1(message)
                header = json.loads(parts[0]) if channel == "shell" else None
            elif isinstance(message, str) and _REQUEST in message:
                header = json.loads(message).get("header")
            else:
                header = None
        except (ValueError, IndexError, AttributeError, RecursionError):
            return None
        found = isinstance(header, dict) and header.get("msg_type") == _REQUEST
        return header if found else None

    # --- the server's own words

    @property
    def tab(self) -> str:
        return str(self.session.session)

    def speak(self, text: str, cell: dict[str, Any]) -> None:
        content = {"name": "stderr", "text": f"{text}\n"}
        try:
            self._send("iopub", self.session.msg("stream", content, parent=cell))
        except WebSocketClosedError:
            self.log.warning(
                "The tab of kernel %s is gone, and was not told: %s", self.kernel_id, text
            )

    def _send_status_message(self, status: str) -> None:
        """The kernel has died, and is restarted or given up. The cell that ran gets the reason as
        its last output, for then the browser lets go of it; the status has it, too."""
        provisioner = getattr(self.kernel_manager, "provisioner", None)
        outlet = self._outlet
        if outlet is None or not isinstance(provisioner, SandboxProvisioner):
            super()._send_status_message(status)
            return
        iopub = self.channels.get("iopub")
        if iopub is not None and not iopub.closed():
            iopub.flush()  # what the dead kernel had said comes first
        reason = provisioner.obituary
        if reason:
            outlet.voice.kernel_died(self, reason)
        content = {"execution_state": status, **({"reason": reason} if reason else {})}
        self._send("iopub", self.session.msg("status", content))

    # --- from the kernel to the browser

    def handle_outgoing_message(self, stream: Any, outgoing_msg: list[Any]) -> None:
        if self._outlet is None:
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
        """The live channel lags behind the recording, so it may begin with what has been sent."""
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
        self._message_id = envelope.id if envelope is not None else ""
        try:
            super().handle_outgoing_message(iopub, parts)
        finally:
            self._message_id = ""
        if envelope is not None:
            self._hear(envelope)

    def _hear(self, envelope: Envelope) -> None:
        """What was passed on may be of interest to the server's voice."""
        if self._outlet is None:
            return
        if envelope.kind == "error" and not self._unlimited:
            cell = self._outlet.voice.cell(self, str(envelope.parent.get("msg_id")))
            if cell is not None and (text := self._outlet.hint(envelope.content())):
                self.speak(text, cell)
        if envelope.kind == "status" and envelope.content().get("execution_state") == "idle":
            self._outlet.voice.cell_ended(self, str(envelope.parent.get("msg_id")))

    @property
    def write_message(self) -> Callable[..., Any]:
        write = self.websocket_handler.write_message
        message_id, outlet = self._message_id, self._outlet
        if not message_id or outlet is None:
            return write

        got = outlet.sending(message_id)

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

    def _limit_rate(self, channel: Any, msg: Any, msg_list: Any) -> Any:
        return False if self._unlimited else super()._limit_rate(channel, msg, msg_list)

    # --- joining

    async def _join(self, outlet: Outlet) -> None:
        sent = self._sent
        try:
            # The channels are opened by the caller of this turn of the loop.
            await asyncio.sleep(0)
            recording, messages, incomplete = await outlet.missed()
            sent.update(await asyncio.to_thread(_ids, recording.messages))
            if incomplete:
                self._tell_lost(messages)
            await self._replay(messages)
            self._reply(await asyncio.to_thread(unanswered, recording, len(messages)))
            await self._first_live(outlet, sent, recording.next)
        except SandboxError as error:
            self.log.error(
                "Output of kernel %s that was made while there was no server is lost: %s",
                *(self.kernel_id, error),
            )
        except WebSocketClosedError:
            outlet.due = True
        self._joining = None
        held, self._held, self._held_bytes = self._held, [], 0
        for parts in held:
            self._live(parts)

    async def _first_live(self, outlet: Outlet, sent: set[str], since: int) -> None:
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
                    "Kernel %s prints faster than what it printed before can be replayed; some of "
                    "that may be missing.",
                    self.kernel_id,
                )
                return
            recording = await outlet.recorded(since)
            since = recording.next
            sent.update(await asyncio.to_thread(_ids, recording.messages))
            await self._replay(recording.messages)
            if not first & sent:
                await asyncio.sleep(_JOIN_PAUSE)
        self.log.warning("Kernel %s publishes what its sandbox does not record.", self.kernel_id)

    async def _replay(self, messages: Sequence[list[bytes]]) -> None:
        if messages:
            self.log.info("Replaying %d messages of kernel %s", len(messages), self.kernel_id)
        for start in range(0, len(messages), _AT_ONCE):
            self._unlimited = True
            try:
                for parts in messages[start : start + _AT_ONCE]:
                    self._pass_on(parts)
            finally:
                self._unlimited = False
            await asyncio.sleep(0)  # other kernels' clients have a turn

    def _reply(self, ended: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """The replies that this client has missed."""
        for request, content in ended:
            mine = request.get("session") == self.session.session
            if mine and str(request.get("msg_id")) not in (self._answered or ()):
                self._send("shell", self.session.msg("execute_reply", content, parent=request))
        self._answered = None

    def _tell_lost(self, messages: Sequence[list[bytes]]) -> None:
        text = (
            f"Some output of kernel {self.kernel_id} that was made while there was no server is "
            f"lost: there was more of it than SandboxServer.record_mib allows.\n"
        )
        self.log.warning(text.strip())
        envelope = open_envelope(messages[0]) if messages else None
        parent = envelope.parent if envelope is not None else None
        content = {"name": "stderr", "text": text}
        self._send("iopub", self.session.msg("stream", content, parent=parent))

    def _send(self, channel: str, message: dict[str, Any]) -> None:
        if self.subprotocol == V1:
            packed = serialize_msg_to_ws_v1(message, channel, self.session.pack)
            self.write_message(packed, binary=True)
        else:
            packed = self._reserialize_reply({**message, "buffers": []}, channel)
            self.write_message(packed, binary=isinstance(packed, bytes))


def _ids(messages: Sequence[Sequence[bytes]]) -> list[str]:
    return [e.id for e in map(open_envelope, messages) if e is not None]
