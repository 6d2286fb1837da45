"""The broker: answers requests about the sandboxes of one SandboxClient.

It knows nothing about the backend behind it. Only processes of the same user are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, is_dataclass, replace
from typing import Any

from sandbox_kernel.errors import SandboxError, SandboxNotFound, SpecError
from sandbox_kernel.sandboxes.async_fd import AsyncFd
from sandbox_kernel.sandboxes.base import Command, ExecStream, SandboxClient, SandboxHandle
from sandbox_kernel.sandboxes.broker.protocol import MAX_MESSAGE, PROTOCOL, error_message
from sandbox_kernel.sandboxes.channel import Channel, Hangup
from sandbox_kernel.spec import SandboxSpec

_log = logging.getLogger(__name__)

_CHECK = 0.5
_REQUEST_TIMEOUT = 30.0
_MAX_CONNECTIONS = 1000

Request = dict[str, Any]


class Broker:
    """Serves ``client`` on a listening socket until nobody has been connected for ``idle``
    seconds, until its socket is deleted so that nobody can find it, or until a client of a newer
    protocol asks it to retire."""

    def __init__(self, client: SandboxClient, listener: socket.socket, idle: float) -> None:
        self._client = client
        self._listener = listener
        self._path = listener.getsockname()
        self._idle = idle
        self._connections: set[asyncio.Task[None]] = set()
        self._busy = 0
        self._used_at = time.monotonic()
        self._retiring = False

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        accepting = loop.create_task(self._accept())
        try:
            while not (self._over() and self._nobody_at_the_door()):
                await asyncio.sleep(min(_CHECK, self._idle))
                if accepting.done():
                    accepting.result()
        finally:
            self._listener.close()
            accepting.cancel()
            for task in list(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, accepting, return_exceptions=True)
            await self._client.close()

    def _over(self) -> bool:
        if self._retiring:
            return not self._busy
        if not os.path.exists(self._path):
            return True
        if self._connections:
            self._used_at = time.monotonic()
        return time.monotonic() - self._used_at > self._idle

    def _nobody_at_the_door(self) -> bool:
        """Rename the socket first: a client that found it has connected by then, and is served."""
        if self._retiring or not os.path.exists(self._path):
            return True
        aside = f"{self._path}.ending"
        os.rename(self._path, aside)
        if select.select([self._listener], [], [], 0)[0] or self._connections:
            os.rename(aside, self._path)
            return False
        os.unlink(aside)
        return True

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # The process has no descriptor left.
                _log.warning("A client of the broker must wait: %s", error)
                await asyncio.sleep(_CHECK)
                continue
            channel = Channel(sock, MAX_MESSAGE)
            if channel.peer_uid() != os.getuid() or len(self._connections) >= _MAX_CONNECTIONS:
                channel.close()
                continue
            task = loop.create_task(self._serve(channel))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, channel: Channel) -> None:
        request: Request = {}
        try:
            request = await asyncio.wait_for(channel.receive(), _REQUEST_TIMEOUT)
            if request.get("protocol") != PROTOCOL:
                await channel.send(self._other_protocol(request))
            elif request.get("kind") == "open_stream":
                await self._open_stream(channel, request)
            else:
                await self._answer(channel, request)
        except (Hangup, asyncio.TimeoutError):
            pass
        except Exception:  # noqa: BLE001  (the broker serves others, and goes on)
            what = request.get("kind"), request.get("name")
            _log.exception("The request %r about sandbox %r failed in the broker.", *what)
        finally:
            channel.close()

    def _other_protocol(self, request: Request) -> Request:
        newer = isinstance(request.get("protocol"), int) and request["protocol"] > PROTOCOL
        self._retiring = self._retiring or newer
        return {"protocol": PROTOCOL, "retiring": newer}

    # --- requests with one answer

    async def _answer(self, channel: Channel, request: Request) -> None:
        work = asyncio.ensure_future(carry_out(self._client, request))
        gone = asyncio.ensure_future(channel.receive())
        self._busy += 1
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # who asked is not there any more
                work.cancel()
                await asyncio.wait({work})
                return
            error = work.exception()
            if error is not None and not isinstance(error, SandboxError):
                what = request.get("kind"), request.get("name")
                _log.warning("%s of sandbox %r failed", *what, exc_info=error)
            await channel.send(error_message(error) if error else {"result": work.result()})
        finally:
            self._busy -= 1
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    # --- streams

    async def _open_stream(self, channel: Channel, request: Request) -> None:
        duplex = len(channel.fds) == 1
        command = Command.from_json(request)
        command = replace(command, duplex=duplex and not command.tty)
        fds = [channel.fds.pop(0) for _ in range(len(channel.fds))]
        ports = [AsyncFd(socket.socket(fileno=fd) if duplex else fd) for fd in fds]
        try:
            stream = await (await _handle(self._client, request)).open_command(command)
        except Exception as error:  # noqa: BLE001  (goes to whoever asked)
            for port in ports:
                port.close()
            return await channel.send(error_message(error))
        try:
            await channel.send({"result": None})
            await _Pumps(request["name"], stream, ports, channel).run()
        finally:
            for port in ports:
                port.close()
            await asyncio.shield(stream.close())
        with contextlib.suppress(SandboxError, Hangup, asyncio.TimeoutError):
            await channel.send({"exit": await asyncio.wait_for(stream.wait(), _CHECK)})


class _Pumps:
    """Carry a stream's bytes between the sandbox and a client's pipes, or its socket."""

    def __init__(
        self, sandbox: str, stream: ExecStream, ports: list[AsyncFd], channel: Channel
    ) -> None:
        self._sandbox = sandbox
        self._stream = stream
        self._channel = channel
        self._stdin = ports[0]
        self._stdout = ports[1] if len(ports) == 3 else ports[0]
        self._stderr = ports[2] if len(ports) == 3 else None

    async def run(self) -> None:
        """Until the client hangs up."""
        async with asyncio.TaskGroup() as group:
            pumps = [
                group.create_task(self._read(self._stream.read, self._stdout)),
                group.create_task(self._read(self._stream.read_stderr, self._stderr)),
                group.create_task(self._feed()),
                group.create_task(self._tell_end()),
            ]
            try:
                await self._obey()
            finally:
                for pump in pumps:
                    pump.cancel()

    async def _obey(self) -> None:
        """Signals and sizes from the client, until it hangs up."""
        with contextlib.suppress(Hangup):
            while True:
                message = await self._channel.receive()
                if "signal" in message:
                    await self._stream.send_signal(int(message["signal"]))
                elif "resize" in message:
                    rows, columns = message["resize"]
                    await self._stream.resize(int(rows), int(columns))

    async def _read(self, read: Callable[[], Awaitable[bytes]], port: AsyncFd | None) -> None:
        try:
            while data := await read():
                if port is not None:
                    await port.write(data)
        except (OSError, SandboxError) as error:
            _log.debug("Sandbox %s: a stream ended: %s", self._sandbox, error)
        if port is not None and port is not self._stdin:
            port.close()
        elif port is not None:
            port.end_input()

    async def _feed(self) -> None:
        with contextlib.suppress(OSError, SandboxError):
            while data := await self._stdin.read():
                await self._stream.write(data)
            await self._stream.close_stdin()
            return
        # The command reads no more: a closed pipe tells the writer.
        if self._stdin is not self._stdout:
            self._stdin.close()

    async def _tell_end(self) -> None:
        try:
            message: Request = {"exit": await self._stream.wait()}
        except SandboxError as error:
            message = error_message(error)
        with contextlib.suppress(Hangup):
            await self._channel.send(message)


async def carry_out(client: SandboxClient, request: Request) -> Any:
    """The result of a request that has one answer, as JSON types."""
    kind = request.get("kind")
    if kind in _OF_CLIENT:
        return _plain(await _OF_CLIENT[kind](client, request))
    if kind in _OF_HANDLE:
        return _plain(await _OF_HANDLE[kind](await _handle(client, request), request))
    raise SandboxError(f"The broker does not know the request {kind!r}.")


async def _handle(client: SandboxClient, request: Request) -> SandboxHandle:
    """The sandbox that a request is about; another one that has its name now is not it."""
    handle = await client.get(request["name"])
    if handle.id != request["id"]:
        raise SandboxNotFound(f"Sandbox {handle.name!r} is another one now.")
    return handle


def _spec(request: Request) -> SandboxSpec:
    values = request["spec"]
    if not isinstance(values, dict):
        raise SpecError("A spec is an object.")
    return SandboxSpec.from_mapping(values)


def _plain(result: Any) -> Any:
    """What a client or a handle returned, as JSON types."""
    if isinstance(result, SandboxHandle):
        return {"name": result.name, "id": result.id}
    if isinstance(result, (list, tuple)):
        return [_plain(item) for item in result]
    is_value = is_dataclass(result) and not isinstance(result, type)
    return asdict(result) if is_value else result


_OF_CLIENT: dict[str, Callable[[SandboxClient, Request], Awaitable[Any]]] = {
    "create": lambda client, request: client.create(_spec(request)),
    "restore": lambda client, request: client.restore(request["snapshot"], _spec(request)),
    "list": lambda client, _: client.list(),
    "remove": lambda client, request: client.remove(request["name"]),
    "snapshots": lambda client, _: client.snapshots(),
    "remove_snapshot": lambda client, request: client.remove_snapshot(request["name"]),
    "diagnose": lambda client, _: client.diagnose(),
}
_OF_HANDLE: dict[str, Callable[[SandboxHandle, Request], Awaitable[Any]]] = {
    "spawn": lambda handle, request: handle.spawn_command(Command.from_json(request)),
    "stop": lambda handle, _: handle.stop(),
    "kill": lambda handle, _: handle.kill(),
    "pause": lambda handle, _: handle.pause(),
    "resume": lambda handle, _: handle.resume(),
    "info": lambda handle, _: handle.info(),
    "logs": lambda handle, request: handle.logs(tail=request["tail"]),
    "snapshot": lambda handle, request: handle.snapshot(request["snapshot"]),
}
