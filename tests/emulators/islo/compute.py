"""The compute plane: ``islo/sandboxes/raw_client.py`` and ``islo/custom/files.py`` of 0.3.20.

The exec stream's events are ``stdout``, ``stderr``, ``exit`` and ``error`` (from integrations; the
SDK names none). Their data is a JSON object with ``data`` (assumed). When the client of an exec
stream goes away, the command runs on and its output is thrown away (assumed: the worse of two).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.base import ExecStream

from ..faults import Faults
from ..http import Request, Response, Server, Stream
from ..service import Refused
from .control import authorized
from .multipart import uploaded
from .state import Sandbox, Service

_NAME = "/sandboxes/([^/]+)"


class ComputePlane:
    """Adds its routes to a server."""

    def __init__(self, service: Service, server: Server, faults: Faults) -> None:
        self._service = service
        self._faults = faults
        for method, pattern, handler in (
            ("GET", "/sandboxes", self._list),  # list_sandboxes
            ("POST", "/sandboxes", self._create),  # create_sandbox
            ("GET", "/sandboxes/-/by-id/([^/]+)", self._by_id),  # get_sandbox_by_id
            ("GET", _NAME, self._get),  # get_sandbox
            ("DELETE", _NAME, self._delete),  # delete_sandbox
            ("POST", f"{_NAME}/exec", self._exec),  # exec_in_sandbox
            ("POST", f"{_NAME}/exec/stream", self._stream),  # exec_in_sandbox_stream
            ("GET", f"{_NAME}/exec/([^/]+)", self._result),  # get_exec_result
            ("GET", f"{_NAME}/files", self._read),  # download_file
            ("POST", f"{_NAME}/files", self._write),  # upload_file
            ("POST", f"{_NAME}/pause", self._pause),  # pause_sandbox
            ("POST", f"{_NAME}/resume", self._resume),  # resume_sandbox
            ("POST", f"{_NAME}/stop", self._stop),  # stop_sandbox
        ):
            server.route(method, pattern, authorized(service, handler))

    def _found(self, request: Request) -> Sandbox:
        return self._service.find(request.match[1])

    async def _list(self, request: Request) -> Response:
        """Filters by ``name_prefix``; pages by limit and cursor (assumed: an offset)."""
        prefix = request.query.get("name_prefix", "")
        found = [s for s in self._service.sandboxes.values() if s.name.startswith(prefix)]
        limit = int(request.query.get("limit", "50"))
        start = int(request.query.get("cursor") or request.query.get("offset") or "0")
        page = found[start : start + limit]
        more = start + limit < len(found)
        return Response(
            200,
            {
                "items": [sandbox.as_json() for sandbox in page],
                "limit": limit,
                "offset": start,
                "total": len(found),
                "next_cursor": str(start + limit) if more else None,
            },
        )

    async def _create(self, request: Request) -> Response:
        return Response(201, (await self._service.create(request.json())).as_json())

    async def _by_id(self, request: Request) -> Response:
        sandbox = self._service.sandboxes.get(request.match[1])
        if sandbox is None:
            raise Refused(404, "SANDBOX_NOT_FOUND", "no sandbox has this id")
        return Response(200, sandbox.as_json())

    async def _get(self, request: Request) -> Response:
        return Response(200, self._found(request).as_json())

    async def _delete(self, request: Request) -> Response:
        await self._service.delete(self._found(request))
        return Response(204)

    async def _pause(self, request: Request) -> Response:
        await self._service.pause(self._found(request))
        return Response(200, self._found(request).as_json())

    async def _resume(self, request: Request) -> Response:
        await self._service.resume(self._found(request))
        return Response(200, self._found(request).as_json())

    async def _stop(self, request: Request) -> Response:
        await self._service.stop(self._found(request))
        return Response(204)

    # --- commands

    async def _started(self, request: Request) -> tuple[Sandbox, ExecStream]:
        asked = request.json()
        sandbox, jail = await self._service.use(request.match[1])
        stream = await self._service.start(
            jail, asked.get("command") or [], asked.get("env") or {}, asked.get("workdir")
        )
        return sandbox, stream

    async def _exec(self, request: Request) -> Response:
        """``timeout_secs`` is taken and does nothing, as its description says."""
        sandbox, stream = await self._started(request)
        command = self._service.run(sandbox, stream)
        body = {"exec_id": command.id, "sandbox_id": sandbox.id, "status": command.status}
        return Response(200, body)

    async def _result(self, request: Request) -> Response:
        """Answers for a paused sandbox, too (assumed)."""
        command = self._found(request).commands.get(request.match[2])
        if command is None:
            raise Refused(404, "RESOURCE_NOT_FOUND", "no such exec")
        return Response(200, command.as_json())

    async def _stream(self, request: Request) -> None:
        sandbox, stream = await self._started(request)
        cut = self._faults.take(request, "cut")
        request.owner = sandbox.id
        command = _Streamed(self._service, request, stream, cut.bytes if cut else None)
        sandbox.streams += 1
        try:
            await command.run()
        finally:
            sandbox.streams -= 1
            await stream.close()

    # --- files. Any absolute path; folders are made (assumed).

    async def _read(self, request: Request) -> Response:
        _, jail = await self._service.use(request.match[1])
        try:
            return Response(200, body=await jail.read(request.query["path"]))
        except FileNotFoundError:
            raise Refused(404, "FILE_NOT_FOUND", "no such file") from None

    async def _write(self, request: Request) -> Response:
        _, jail = await self._service.use(request.match[1])
        try:
            await jail.write(request.query["path"], uploaded(request))
        except (PermissionError, ValueError) as error:
            raise Refused(400, "FILE_OPERATION_ERROR", str(error)) from None
        return Response(200, {"status": "uploaded"})


class _Streamed:
    """A running command, and whoever listens to it."""

    def __init__(
        self, service: Service, request: Request, stream: ExecStream, left: int | None
    ) -> None:
        self._settings = service.settings
        self._request = request
        self._stream = stream
        self._left = left
        self._attached = True
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        sink = await self._request.stream()
        gone = asyncio.ensure_future(self._watch())
        try:
            await self._stream.close_stdin()
            await asyncio.gather(
                self._give(sink, "stdout", self._stream.read),
                self._give(sink, "stderr", self._stream.read_stderr),
            )
            code = await self._stream.wait()
            await self._send(sink, "exit", {"exit_code": code if code >= 0 else 128 - code})
            if self._attached:
                with contextlib.suppress(ConnectionError):
                    await sink.close()
        except SandboxError:
            self._request.connection.cut()  # the sandbox is gone, and its connections with it
        finally:
            gone.cancel()

    async def _watch(self) -> None:
        """The client says nothing more; that its side ends says that it is gone."""
        with contextlib.suppress(ConnectionError):
            while await self._request.connection.reader.read(4096):
                pass
        self._attached = False

    async def _give(self, sink: Stream, name: str, read: Callable[[], Awaitable[bytes]]) -> None:
        while data := await read():
            for start in range(0, len(data), self._settings.chunk):
                # Each piece is decoded by itself: a character that is split over two is lost.
                piece = data[start : start + self._settings.chunk]
                if self._settings.rate:
                    await asyncio.sleep(len(piece) / self._settings.rate)
                await self._send(sink, name, {"data": piece.decode(errors="replace")})

    async def _send(self, sink: Stream, name: str, data: dict[str, object]) -> None:
        if not self._attached:
            return
        text = json.dumps(data)
        if self._settings.plain_events and "data" in data:
            text = "\ndata: ".join(str(data["data"]).split("\n"))
        event = f"event: {name}\ndata: {text}\n\n".encode()
        if self._left is not None:
            self._left -= len(event)
            if self._left < 0:
                self._attached = False
                return self._request.connection.cut()
        try:
            async with self._lock:
                await sink.send(event)
        except ConnectionError:
            self._attached = False
