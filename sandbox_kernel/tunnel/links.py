"""Links: byte streams to the agent, each made by running a connector in the sandbox."""

from __future__ import annotations

import asyncio
import logging
import os

from sandbox_kernel.errors import LinkLost, ProtocolError, SessionRefused
from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.stream_link import StreamLink
from sandbox_kernel.tunnel.owned_tasks import OwnedTasks
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.wire import WireError
from sandbox_kernel.wire.codec import BASE64, RAW
from sandbox_kernel.wire.connection import HostConnection
from sandbox_kernel.wire.fdlink import FdLink
from sandbox_kernel.wire.handshake import Hello, Refuse
from sandbox_kernel.wire.peer import Peer

log = logging.getLogger("sandbox_kernel.tunnel")

HANDSHAKE_TIMEOUT = 30.0
AnyLink = FdLink | StreamLink


class Links:
    """Makes the links to one sandbox, and closes their exec streams behind them."""

    def __init__(self, handle: SandboxHandle, folder: str, *, byte_exact: bool) -> None:
        self._handle = handle
        self._codec = RAW if byte_exact else BASE64
        self.folder = folder
        self._closing = OwnedTasks()

    async def connect(self, peer: Peer, hello: Hello) -> tuple[AnyLink, HostConnection]:
        """Run a connector and shake hands with the agent, for ``peer.attach``. LinkLost for what
        may pass; SessionRefused, ProtocolError or SandboxGone for what will not."""
        link = await self._open()
        hello = hello._replace(checked=isinstance(link, StreamLink))
        connection = HostConnection(peer.mux, hello, self._codec)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                await self._shake_hands(peer, link, connection)
        except TimeoutError:
            link.close()
            raise LinkLost(f"The agent in sandbox {self._handle.name!r} did not answer.") from None
        except BaseException:
            link.close()
            raise
        return link, connection

    async def closed(self) -> None:
        """Wait until the exec streams of closed links are closed, too."""
        await self._closing.wait(HANDSHAKE_TIMEOUT)

    async def _open(self) -> AnyLink:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                connector = self._handle.guest_argv("connect", self.folder, self._codec)
                stream = await self._handle.open_command(Command(connector, duplex=True))
        except TimeoutError:
            raise LinkLost(
                f"No command could be started in sandbox {self._handle.name!r} within "
                f"{HANDSHAKE_TIMEOUT:g} s."
            ) from None
        link: AnyLink
        if stream.socket is not None:
            # The link owns a descriptor of its own, so that stream.close() cannot pull it away.
            try:
                fd = os.dup(stream.socket.fileno())
            except OSError:
                await stream.close()
                raise
            link = FdLink(asyncio.get_running_loop(), fd, fd)
        else:
            link = StreamLink(stream, stream.write_ahead)
        link.on_closed = lambda: self._closing.start(self._close(link, stream))
        link.start()
        return link

    async def _shake_hands(self, peer: Peer, link: AnyLink, connection: HostConnection) -> None:
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        sandbox = f"sandbox {self._handle.name!r}"

        def received(data: bytes) -> None:
            if answered.done():
                return
            try:
                connection.receive_data(data)
                for event in connection.events(peer.clock()):
                    answered.set_result(event)
                    link.hold()  # until ``peer.attach``
                    return
            except WireError as error:
                kind, who = ProtocolError if error.fatal else LinkLost, f"The agent in {sandbox}"
                answered.set_exception(kind(f"{who} broke the protocol: {error}."))

        def lost(why: str) -> None:
            banner = printable(connection.banner[-1000:].decode(errors="replace")).strip()
            if not answered.done():
                text = f"The link to {sandbox} broke: {why}. {banner}".strip()
                answered.set_exception(LinkLost(text))

        link.on_data, link.on_lost = received, lost
        link.write(connection.data_to_send(link.room))
        answer = await answered
        if isinstance(answer, Refuse):
            raise SessionRefused(
                f"The agent in {sandbox} refused the session: "
                f"{printable(answer.message[:200])} ({printable(answer.code[:40])})."
            )

    async def _close(self, link: AnyLink, stream: ExecStream) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                if isinstance(link, StreamLink):
                    await link.ended()
                await stream.close()
        except Exception as error:  # noqa: BLE001  (a provider's SDK may raise anything)
            log.debug("sandbox %s: closing an exec stream failed: %s", self._handle.name, error)
