"""The control plane. Every route but the emulator's own needs the team's ``X-API-Key``.

Routes, answers and error bodies follow ``superserve/async_sandbox.py``, ``async_snapshots.py``,
``types.py`` and ``errors.py`` of the SDK 0.11.4, and the OpenAPI document's ``Sandboxes`` part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ..http import Request, Response, Server
from ..service import Refused
from .state import Sandbox, Service

_ID = "([0-9a-f-]{36})"


class ControlPlane:
    """Adds its routes to a server."""

    def __init__(self, service: Service, server: Server) -> None:
        self._service = service
        for method, pattern, handler in (
            ("POST", "/sandboxes", self._create),
            ("GET", "/sandboxes", self._list),
            ("GET", f"/sandboxes/{_ID}", self._get),
            ("PATCH", f"/sandboxes/{_ID}", self._patch),
            ("DELETE", f"/sandboxes/{_ID}", self._delete),
            ("POST", f"/sandboxes/{_ID}/pause", self._pause),
            ("POST", f"/sandboxes/{_ID}/resume", self._resume),
            ("POST", f"/sandboxes/{_ID}/activate", self._activate),
            ("POST", f"/sandboxes/{_ID}/snapshot", self._snapshot),
            ("GET", f"/sandboxes/{_ID}/snapshots", self._snapshots),
            ("GET", f"/snapshots/{_ID}", self._get_snapshot),
            ("DELETE", f"/snapshots/{_ID}", self._delete_snapshot),
        ):
            server.route(method, pattern, self._keyed(handler))
        server.route("POST", "/_emulator/settings", self._settings)
        server.route("GET", "/_emulator/sandboxes", self._all)
        server.route("POST", f"/_emulator/sandboxes/{_ID}/status", self._set_status)

    def _keyed(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            try:
                if request.headers.get("x-api-key") != self._service.api_key:
                    raise Refused(401, "unauthorized", "Missing or invalid API key")
                return await handler(request)
            except Refused as refused:
                error = {"code": refused.code, "message": refused.message}
                return Response(refused.status, {"error": error})

        return checked

    def _found(self, request: Request) -> Sandbox:
        return self._service.find(request.match[1])

    async def _create(self, request: Request) -> Response:
        sandbox = await self._service.create(request.json())
        return Response(201, {**sandbox.as_json(), "access_token": sandbox.token})

    async def _list(self, request: Request) -> Response:
        """Filters by ``metadata.KEY`` (all must match) and ``status``; pages by limit, offset."""
        wanted = {k[9:]: v for k, v in request.query.items() if k.startswith("metadata.")}
        status = request.query.get("status", "").split(",")
        found: list[dict[str, Any]] = []
        for sandbox in self._service.sandboxes.values():
            metadata = sandbox.get("metadata") or {}
            if any(metadata.get(key) != value for key, value in wanted.items()):
                continue
            if status != [""] and sandbox.status not in status:
                continue
            found.append(sandbox.as_json())
        start = int(request.query.get("offset", "0"))
        limit = request.query.get("limit")
        return Response(200, found[start : start + int(limit) if limit else None])

    async def _get(self, request: Request) -> Response:
        return Response(200, self._found(request).as_json())

    async def _patch(self, request: Request) -> Response:
        """Network rules only while it is active (docs: networking); the rest at any time."""
        sandbox, changes = self._found(request), request.json()
        known = {"metadata", "network", "auto_delete_seconds", "timeout_seconds", "preview_access"}
        if not changes or set(changes) - known:
            raise Refused(400, "bad_request", "nothing to change, or an unknown field")
        if "network" in changes and sandbox.status != "active":
            raise Refused(409, "conflict", f"sandbox is {sandbox.status}")
        sandbox.changes.update(changes)
        return Response(204)

    async def _delete(self, request: Request) -> Response:
        await self._service.delete(self._found(request))
        return Response(204)

    async def _pause(self, request: Request) -> Response:
        """With ``Prefer: respond-async`` the answer comes before the pause is done."""
        sandbox = self._found(request)
        if request.headers.get("prefer") == "respond-async":
            if sandbox.status != "active":
                raise Refused(409, "conflict", f"sandbox is {sandbox.status}")
            self._later = asyncio.ensure_future(self._service.pause(sandbox))
            return Response(202, {"id": sandbox.id, "status": "pausing"})
        await self._service.pause(sandbox)
        return Response(204)

    async def _resume(self, request: Request) -> Response:
        sandbox = self._found(request)
        await self._service.resume(sandbox)
        body = {"id": sandbox.id, "status": sandbox.status, "access_token": sandbox.rotate()}
        return Response(200, body)

    async def _activate(self, request: Request) -> Response:
        """Resumes a paused sandbox; rotates the token in any case. A pause that is under way is
        409 ``sandbox_pausing`` (SDK: AsyncSandbox.connect)."""
        sandbox = self._found(request)
        if sandbox.status == "pausing":
            raise Refused(409, "sandbox_pausing", "sandbox is pausing")
        if sandbox.status == "paused":
            await self._service.resume(sandbox)
        if sandbox.status != "active":
            raise Refused(409, "conflict", f"sandbox is {sandbox.status}")
        return Response(200, {**sandbox.as_json(), "access_token": sandbox.rotate()})

    async def _snapshot(self, request: Request) -> Response:
        asked = request.json()
        made = await self._service.snapshot(
            self._found(request), asked.get("name"), asked["idempotency_key"]
        )
        return Response(201, made.as_json())

    async def _snapshots(self, request: Request) -> Response:
        found = [s for s in self._service.snapshots.values() if s.sandbox_id == request.match[1]]
        return Response(200, [snapshot.as_json() for snapshot in found])

    async def _get_snapshot(self, request: Request) -> Response:
        return Response(200, self._service.find_snapshot(request.match[1]).as_json())

    async def _delete_snapshot(self, request: Request) -> Response:
        await self._service.delete_snapshot(self._service.find_snapshot(request.match[1]))
        return Response(204)

    # --- for tests

    async def _settings(self, request: Request) -> Response:
        for key, value in request.json().items():
            setattr(self._service.settings, key, value)
        return Response(204)

    async def _all(self, request: Request) -> Response:
        return Response(
            200,
            [
                {**sandbox.as_json(), "request": dict(sandbox.request), "token": sandbox.token}
                for sandbox in self._service.sandboxes.values()
            ],
        )

    async def _set_status(self, request: Request) -> Response:
        """Anything: also what the SDK does not know."""
        self._service.find(request.match[1]).status = request.json()
        return Response(204)
