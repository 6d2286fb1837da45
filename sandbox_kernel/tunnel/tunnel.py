"""Tunnel: one session with the agent of one sandbox, over links that come and go.

When a link breaks, the tunnel makes a new one while the sandbox can still exist. It ends when it is
closed, or when the sandbox is gone, or its agent refuses the session or breaks the protocol.

A paused sandbox stays paused: the tunnel sleeps until a client sends something other than a
heartbeat, or the caller wants the sandbox, and then resumes it. If somebody else resumes it, the
tunnel goes on, too. Clients' messages wait meanwhile, and nothing is lost. Unacknowledged messages
from before the pause was noticed are also a reason to resume.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from sandbox_kernel import audit, errors
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.base import SandboxHandle
from sandbox_kernel.tunnel.clock import since_boot
from sandbox_kernel.tunnel.control_client import ControlClient
from sandbox_kernel.tunnel.download import Download
from sandbox_kernel.tunnel.endpoints import Address, Endpoint
from sandbox_kernel.tunnel.handover import Handover
from sandbox_kernel.tunnel.links import Links
from sandbox_kernel.tunnel.outlet import Outlet
from sandbox_kernel.wire import VERSION
from sandbox_kernel.wire.handshake import Hello
from sandbox_kernel.wire.mux import BULK
from sandbox_kernel.wire.peer import Peer
from sandbox_kernel.wire.pump import Pump

FIRST_ATTEMPTS, AT_ONCE = 6, 5.0
FIRST_DELAY, MAX_DELAY = 0.05, 5.0
ALIVE_INTERVAL = 5.0
PAUSED_INTERVAL = 5.0
"""Seconds between two looks at a paused sandbox that somebody else may resume."""
_HEARTBEATS = "kernel:hb"
"""The target whose traffic is no reason to resume a sandbox, which costs money."""
_REQUESTS = "kernel:shell"
_FINAL = (
    *(errors.SandboxGone, errors.SandboxNotFound, errors.SessionRefused),
    *(errors.ProtocolError, errors.InternalError),
)


class Tunnel:
    """Lives on the background loop. Make one with ``Tunnel.open``."""

    def __init__(
        self,
        handle: SandboxHandle,
        folder: str,
        token: str,
        *,
        byte_exact: bool,
        on_event: Callable[[dict[str, Any]], object],
        on_failed: Callable[[SandboxError], object],
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self.failure: SandboxError | None = None
        self.reconnects = 0
        """How many links were made after the first."""
        self._handle = handle
        self._links = Links(handle, folder, byte_exact=byte_exact)
        self._hello = Hello(VERSION, uuid.uuid4().hex, token, 0, False, True)
        self._on_failed = on_failed
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._peer = Peer(self._loop, host=True, clock=since_boot)
        self._peer.on_link_lost = self._link_lost
        self._peer.on_broken = self._broken
        self._endpoints: list[Endpoint] = []
        self._handover: Handover | None = None
        self._endpoints_lost = False
        self._downloads: set[Download] = set()
        self._channels: set[Pump] = set()
        self._lost = asyncio.Event()
        self._wanted = asyncio.Event()
        self._wanted_at = since_boot()
        self.paused = False
        """The sandbox is paused, and the tunnel waits for a reason to resume it."""
        self.slept = False
        """This process paused it, and nobody is known to have resumed it."""
        self.last_input = self._loop.time()
        """When a client last sent something other than a heartbeat."""
        self.on_request: Callable[[], object] | None = None
        """Called when a client sends something on the channel for requests (shell)."""
        self._delay = 0.0
        self._connected_at = self._loop.time()
        self._received_before = 0
        self._task: asyncio.Task[None] | None = None
        self.control = ControlClient(self._peer, handle.name, on_event)
        self.outlet = Outlet(self._peer, handle.name, log)
        """What the sandbox may open; nothing, unless it is given a gateway."""

    async def open(self) -> None:
        """Make the first link. Raises what ``Links.connect`` raises, but LinkLost only after a few
        attempts over a second or two: an agent may be slow to start. The caller sets a timeout."""
        failures, delay = 0, FIRST_DELAY
        while True:
            started = self._loop.time()
            try:
                await self._connect()
                break
            except errors.LinkLost:
                failures += self._loop.time() - started < AT_ONCE
                if failures == FIRST_ATTEMPTS:
                    raise
                await asyncio.sleep(delay)
                delay = min(MAX_DELAY, 2 * delay)
        self._task = self._loop.create_task(self._keep_connected())
        if self._handle.takes_connections:
            await self._open_handover()

    @property
    def connected(self) -> bool:
        return self._peer.link is not None

    def cut(self) -> None:
        """Break the present link, as a network would. The tunnel reconnects."""
        if self._peer.link is not None:
            self._peer.detach()
            self._link_lost("cut on purpose")

    def listen(self, address: Address, target: str, priority: int) -> None:
        """Forward connections to ``address`` to ``target`` in the sandbox. Existing ones stay."""
        for endpoint in self._endpoints:
            if endpoint.address == address:
                return endpoint.renew()
        inputs = {_HEARTBEATS: None, _REQUESTS: self._request}
        own = (self._peer, self._handle.name, address, target, priority)
        on_input = inputs.get(target, self._input)
        hand_over = partial(self._hand_over, target, on_input)
        self._endpoints.append(Endpoint(*own, on_input, hand_over))

    async def _open_handover(self) -> None:
        own = (self._links.folder, self._hello.token, self._hello.session)
        try:
            self._handover = await Handover.open(self._handle, *own)
        except SandboxError as error:
            # The wire carries its clients as well; this only costs time.
            self._log.info("sandbox %s takes no connections: %s", self._handle.name, error)

    def _hand_over(
        self, target: str, on_input: Callable[[], object] | None, connection: socket.socket
    ) -> bool:
        kind, _, channel = target.partition(":")
        taken = (
            self._handover is not None
            and kind == "kernel"
            and self._handover.take(connection, channel)
        )
        if taken and on_input is not None:
            on_input()  # a client opens its connection with a greeting
        return taken

    def want(self) -> None:
        """Resume the sandbox if it is paused."""
        self._wanted_at = since_boot()
        self._wanted.set()

    def sleep(self) -> None:
        """Give the link up until the sandbox is wanted again: the caller is about to pause it."""
        self._wanted.clear()
        self.paused = self.slept = True
        self.cut()

    def _input(self) -> None:
        self.last_input = self._loop.time()
        if self.paused:
            self._wanted.set()

    def _request(self) -> None:
        if self.on_request is not None:
            self.on_request()
        self._input()

    async def fetch(self, target: str, limit: int, *, timeout: float) -> bytes:
        """All bytes that ``target`` in the sandbox sends, at most ``limit``."""
        self._want_link()
        stream = self._peer.mux.open(target, BULK)
        download = Download(self._peer, stream, self._handle.name, limit)
        self._downloads.add(download)
        try:
            async with asyncio.timeout(timeout):
                return await download.done
        except TimeoutError:
            stream.reset("the host waits no longer")
            self._peer.flush_soon()
            raise errors.SandboxTimeout(
                f"The agent in sandbox {self._handle.name!r} did not send {target!r} within "
                f"{timeout:g} s."
            ) from None
        finally:
            self._downloads.discard(download)

    def channel(self, target: str, priority: int) -> socket.socket:
        """A stream to ``target`` as a blocking socket, for another thread. Closing it ends the
        stream; it ends with the stream or the tunnel."""
        self._want_link()
        ours, theirs = socket.socketpair()
        stream = self._peer.mux.open(target, priority)
        self._channels.add(Pump(self._loop, self._peer, stream, ours, self._channels.discard))
        return theirs

    def _want_link(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.want()
        self._peer.flush_soon()

    def close_endpoints(self, keep: Collection[Address] = ()) -> None:
        """Stop listening, except at the addresses in ``keep``."""
        closed = [endpoint for endpoint in self._endpoints if endpoint.address not in keep]
        if closed and self._handover is not None:
            self._handover.close()
        for endpoint in closed:
            endpoint.close()
        self._endpoints = [kept for kept in self._endpoints if kept.address in keep]

    async def close(self) -> None:
        """Detach from the sandbox, which lives on until its lease is over. Idempotent."""
        closed = errors.TunnelError(f"The tunnel to sandbox {self._handle.name!r} was closed.")
        self._end(closed, quiet=True)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def links_closed(self) -> None:
        """Wait until the exec streams of all links are closed."""
        await self._links.closed()

    async def _connect(self) -> None:
        link, connection = await self._links.connect(self._peer, self._hello)
        self._hello = self._hello._replace(resume=True)
        self._lost.clear()
        self._connected_at, self._received_before = self._loop.time(), self._peer.session.received
        try:
            self._peer.attach(link, connection)
        except Exception as error:
            link.close()
            raise errors.InternalError(
                f"The session with sandbox {self._handle.name!r} ended because of a mistake in "
                f"sandbox-kernel, not in the sandbox: {error!r}. Please report it. "
                f"`sandbox-kernel exec {self._handle.name}` still reaches the sandbox's files."
            ) from error

    async def _keep_connected(self) -> None:
        while self.failure is None:
            try:
                async with asyncio.timeout(ALIVE_INTERVAL):
                    await self._lost.wait()
            except TimeoutError:
                self._peer.check_alive()
                self._renew_endpoints()
                continue
            await self._reconnect()

    def _renew_endpoints(self) -> None:
        """Listen again where a socket was deleted, alone or with its folder."""
        lost = [endpoint for endpoint in self._endpoints if endpoint.deleted]
        failed, self._endpoints_lost = self._endpoints_lost, False
        try:
            for endpoint in lost:
                endpoint.renew()
        except SandboxError as error:
            self._endpoints_lost = True
            if not failed:
                where = f"sandbox {self._handle.name}"
                self._log.warning("New clients cannot reach the kernel in %s: %s", where, error)

    async def _reconnect(self) -> None:
        patience = self._handle.agent_lease + 60
        deadline = self._loop.time() + patience
        lasted = self._loop.time() - self._connected_at > ALIVE_INTERVAL
        if lasted or self._peer.session.received > self._received_before:
            self._delay = 0.0  # the last link worked, so the next one may be made at once
        while self.failure is None:
            await asyncio.sleep(self._delay)
            self._delay = min(MAX_DELAY, 2 * self._delay or FIRST_DELAY)
            try:
                if self.paused:
                    await self._wait_until_wanted()
                await self._connect()
                self.paused = self.slept = False
            except _FINAL as error:
                return self._end(error)
            except errors.SandboxPaused as error:
                deadline = self._loop.time() + patience
                if not self.paused:
                    self._notice_pause(error)
            except Exception as error:  # noqa: BLE001  (a provider's SDK may raise anything)
                if self.paused:  # its lease does not run out
                    deadline = self._loop.time() + patience
                if self._loop.time() > deadline:
                    return self._end(
                        errors.SandboxGone(
                            f"Sandbox {self._handle.name!r} could not be reached for "
                            f"{patience:g} s, longer than its lease; the last error was: {error}"
                        )
                    )
                self._log.debug("sandbox %s: %s; trying again", self._handle.name, error)
            else:
                self.reconnects += 1
                return

    def _notice_pause(self, error: errors.SandboxPaused) -> None:
        self.paused = True
        self._delay = 0.0
        if self._wanted_at > self._peer.session.last_heard or self.has_undelivered_input():
            self._log.info("%s It is resumed, because a client has sent something.", error)
            self._wanted.set()
        else:
            self._log.info("%s Its kernel waits.", error)
            self._wanted.clear()

    def has_undelivered_input(self) -> bool:
        """Has a client sent data, other than heartbeats, that the agent has not acknowledged?"""
        beating = [endpoint.pumps for endpoint in self._endpoints if endpoint.target == _HEARTBEATS]
        heartbeats: set[object] = set().union(*beating)
        return any(stream.owner not in heartbeats for stream in self._peer.mux.undelivered())

    async def _wait_until_wanted(self) -> None:
        """Return when the sandbox runs again, whoever has resumed it."""
        while True:
            try:
                async with asyncio.timeout(PAUSED_INTERVAL):
                    await self._wanted.wait()
            except TimeoutError:
                self._renew_endpoints()
                if (await self._handle.info()).status != "paused":
                    return
            else:
                await self._handle.resume()
                audit.note(self._handle, "resumed")
                return

    def _link_lost(self, why: str) -> None:
        self._log.debug("sandbox %s: the link was lost: %s", self._handle.name, why)
        self._lost.set()

    def _broken(self, why: str) -> None:
        self._end(
            errors.ProtocolError(
                f"The agent in sandbox {self._handle.name!r} broke the protocol ({why[:200]}). "
                f"Its kernel cannot be reached any more; remove the sandbox with "
                f"`sandbox-kernel rm {self._handle.name}`."
            )
        )

    def _end(self, error: SandboxError, *, quiet: bool = False) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._peer.detach()
        self.close_endpoints()
        self.control.fail(error)
        for download in self._downloads:
            download.fail(error)
        for pump in list(self._channels):
            pump.close("the tunnel is closed")
        self.outlet.close()
        self._peer.mux.close()
        if not quiet:
            self._on_failed(error)
