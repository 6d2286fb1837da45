"""What goes wrong in an emulator, as a test asks for it.

A fault is for the next ``times`` requests whose ``"METHOD path"`` the pattern is found in:

    status        answer with this code (and ``headers``, ``body``), and do nothing
    drop          cut the connection, and do nothing
    lose          do it, then cut the connection instead of answering
    slow          do it, then wait ``seconds`` before answering
    twice         the request arrives twice: it is done twice, and answered once
    cut           for streams: cut it after ``bytes`` were sent to the client

Tests reach this by ``POST /_emulator/faults`` and see what was asked for with
``GET /_emulator/requests``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .http import Dropped, Handler, Request, Response, Server

KINDS = ("status", "drop", "lose", "slow", "twice", "cut")


@dataclass
class Fault:
    """One thing to go wrong."""

    match: str
    kind: str
    times: int = 1
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    seconds: float = 0.0
    bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no such fault: {self.kind!r}")


class Faults:
    """The faults that wait for their request, and a log of all requests."""

    def __init__(self) -> None:
        self.pending: list[Fault] = []
        self.requests: list[str] = []

    def add_routes(self, server: Server) -> None:
        server.route("POST", "/_emulator/faults", self._add)
        server.route("DELETE", "/_emulator/faults", self._clear)
        server.route("GET", "/_emulator/requests", self._log)

    async def _add(self, request: Request) -> Response:
        self.pending.append(Fault(**request.json()))
        return Response(204)

    async def _clear(self, request: Request) -> Response:
        self.pending.clear()
        self.requests.clear()
        return Response(204)

    async def _log(self, request: Request) -> Response:
        return Response(200, self.requests)

    def take(self, request: Request, *kinds: str) -> Fault | None:
        """The fault for this request, if there is one of these kinds."""
        line = f"{request.method} {request.path}"
        for fault in self.pending:
            if fault.kind in kinds and re.search(fault.match, line):
                fault.times -= 1
                if fault.times <= 0:
                    self.pending.remove(fault)
                return fault
        return None

    async def around(self, request: Request, handler: Handler) -> Response | None:
        """Every request of the service goes through here."""
        if request.path.startswith("/_emulator/"):
            return await handler(request)
        self.requests.append(f"{request.method} {request.path}")
        fault = self.take(request, "status", "drop", "lose", "slow", "twice")
        if fault is None:
            return await handler(request)
        if fault.kind == "status":
            body = fault.body or {"error": {"code": "injected", "message": "an injected fault"}}
            return Response(fault.status, body, headers=fault.headers)
        if fault.kind == "drop":
            raise Dropped
        response = await handler(request)
        if fault.kind == "lose":
            raise Dropped
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        if fault.kind == "twice":
            self.requests.append(f"{request.method} {request.path}")
            await handler(request)
        return response
