"""The data plane, under ``boxd-ID.sandbox.superserve.ai`` or the shared host with the sandbox's id
in a header (SDK 0.11.4: ``_config.data_plane_target``). It needs the sandbox's own token.

``GET /exec/connect`` follows the OpenAPI document (execConnect) and ``command_session.py``: binary
frames with a channel byte, JSON text frames for control, 64 KiB at most from the client. When the
connection goes away the command runs on (docs: command sessions, network drops); its output is
thrown away, and its stdin stays open (assumed: the worse of two). The exit code of a command that
a signal ended is 128 + N (assumed: "reflects the signal"). Signals go to the process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox_kernel.errors import ExecFailed, SandboxError, SandboxGone
from sandbox_kernel.sandboxes.base import ExecStream

from ..faults import Faults
from ..http import Request, Response, Server, WebSocket
from .state import Sandbox, Service

PROTOCOL = "superserve.exec.v1"
_MAX_MESSAGE = 64 * 1024
_HOST = re.compile(r"boxd-([0-9a-f-]{36})\..*")
_PAUSED = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}


class DataPlane:
    """Adds its routes to a server."""

    def __init__(self, service: Service, server: Server, faults: Faults) -> None:
        self._service = service
        self._faults = faults
        server.route("GET", "/exec/connect", self._connect)
        server.route("GET", "/files", self._read)
        server.route("POST", "/files", self._write)

    def _sandbox(self, request: Request, token: str | None) -> Sandbox | Response:
        named = _HOST.fullmatch(request.host)
        wanted = named[1] if named else request.headers.get("x-superserve-sandbox-id", "")
        sandbox = self._service.sandboxes.get(wanted)
        if sandbox is None:
            return Response(404, {"error": "sandbox not found"})
        if sandbox.status != "active":
            # The proxy's own words before the sandbox is reached (SDK: _build_error_body).
            word = "paused" if sandbox.status in ("paused", "pausing") else "stopped"
            return Response(503, body=f"sandbox is {word}\n".encode(), headers=_PAUSED)
        if token != sandbox.token:
            return Response(401, {"error": "invalid access token"})
        request.owner = sandbox.id
        return sandbox

    # --- files (SDK: files.py; docs: read-write). Any absolute path; folders are made.

    async def _read(self, request: Request) -> Response:
        found = self._sandbox(request, request.headers.get("x-access-token"))
        if isinstance(found, Response):
            return found
        try:
            return Response(200, body=await found.jail.read(request.query["path"]))
        except FileNotFoundError:
            return Response(404, {"error": "file not found"})

    async def _write(self, request: Request) -> Response:
        found = self._sandbox(request, request.headers.get("x-access-token"))
        if isinstance(found, Response):
            return found
        try:
            await found.jail.write(request.query["path"], request.body)
        except PermissionError as error:
            return Response(403, {"error": str(error)})
        return Response(200, {"path": request.query["path"], "size": len(request.body)})

    # --- commands

    async def _connect(self, request: Request) -> Response | None:
        offered = [p.strip() for p in request.headers.get("sec-websocket-protocol", "").split(",")]
        token = next((p[6:] for p in offered if p.startswith("token.")), None)
        found = self._sandbox(request, token)
        if isinstance(found, Response):
            return found
        if PROTOCOL not in offered:
            return Response(400, {"error": f"offer {PROTOCOL}"})
        cut = self._faults.take(request, "cut")
        socket = await request.websocket(PROTOCOL, max_message=_MAX_MESSAGE)
        first = await socket.receive()
        if not isinstance(first, str):
            return None
        start = json.loads(first)
        try:
            stream = await found.jail.start(
                start["command"], start.get("env") or {}, start.get("working_dir")
            )
        except SandboxGone:
            return None  # its end cuts the connection
        except ExecFailed as error:
            await socket.send(json.dumps({"error": str(error), "code": "bad_request"}))
            await socket.close()
            return None
        command = _Command(self._service, stream, socket, request.connection.cut, cut)
        await command.run(start.get("timeout_s"))
        return None


_LINGER = 10.0
"""Seconds in which a client answers that its connection is closed."""


class _Command:
    """A running command and the websocket of whoever started it, as long as that is there."""

    def __init__(
        self,
        service: Service,
        stream: ExecStream,
        socket: WebSocket,
        drop: Callable[[], None],
        cut: Any,
    ) -> None:
        self._settings = service.settings
        self._stream = stream
        self._socket = socket
        self._drop = drop
        self._left = cut.bytes if cut else None
        self._attached = True

    async def run(self, timeout: float | None) -> None:
        taking = asyncio.ensure_future(self._take())
        try:
            await asyncio.wait_for(self._serve(), timeout)
        except asyncio.TimeoutError:
            await self._finish(124)
        except SandboxError:
            pass  # the sandbox is gone, and its connections with it
        else:
            # A connection that is closed over unread input is reset, and what was said last lost.
            await asyncio.wait([taking], timeout=_LINGER)
        finally:
            taking.cancel()
            await asyncio.gather(taking, self._stream.close(), return_exceptions=True)

    async def _serve(self) -> None:
        await asyncio.gather(
            self._give(1, self._stream.read), self._give(2, self._stream.read_stderr)
        )
        code = await self._stream.wait()
        await self._finish(code if code >= 0 else 128 - code)

    async def _finish(self, code: int) -> None:
        if self._attached:
            with contextlib.suppress(ConnectionError):
                await self._socket.send(json.dumps({"exit_code": code, "finished": True}))
                await self._socket.close()

    async def _give(self, channel: int, read: Callable[[], Awaitable[bytes]]) -> None:
        head = bytes([channel])
        while data := await read():
            for start in range(0, len(data), self._settings.chunk):
                piece = data[start : start + self._settings.chunk]
                if self._settings.rate:
                    await asyncio.sleep(len(piece) / self._settings.rate)
                if self._attached:
                    await self._send(head + piece)

    async def _send(self, message: bytes) -> None:
        if self._left is not None:
            self._left -= len(message)
            if self._left < 0:
                self._attached = False
                return self._drop()
        try:
            await self._socket.send(message)
        except ConnectionError:
            self._attached = False

    async def _take(self) -> None:
        while (message := await self._socket.receive()) is not None:
            if isinstance(message, bytes):
                if message[:1] == b"\0":
                    with contextlib.suppress(OSError):  # it reads no more
                        await self._stream.write(message[1:])
                continue
            control = json.loads(message)
            if control.get("type") == "stdin_close":
                await self._stream.close_stdin()
            elif control.get("type") == "signal":
                await self._stream.send_signal(signal.Signals[control["name"]])
        self._attached = False
