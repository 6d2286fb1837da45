"""The door on HTTP: for clients of this machine that cannot start a process, or that share one.

Whoever has the token can use every sandbox of this policy. Streamable HTTP without sessions: each
request stands for itself, so the server can be restarted between two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from mcp.server.transport_security import TransportSecuritySettings

from sandbox_kernel.agents.mcp.http_address import PATH, accepted_hosts
from sandbox_kernel.agents.mcp.http_guard import Guard
from sandbox_kernel.agents.mcp.policy import Policy
from sandbox_kernel.agents.mcp.sandboxes import Sandboxes
from sandbox_kernel.agents.mcp.server import SandboxServer

_MARGIN = 2**20
_FAREWELL = 5
"""Seconds that answers under way have when the server ends."""


async def serve_http(policy: Policy, listening: socket.socket, token: str) -> None:
    """Serve on a socket of ``listen`` until we are cancelled."""
    hosts = accepted_hosts(policy.door, listening.getsockname()[1])
    async with Sandboxes(policy) as sandboxes:
        server = SandboxServer(sandboxes)
        app = server.streamable_http_app(
            streamable_http_path=PATH,
            stateless_http=True,
            max_request_body_size=2 * policy.limits.file_bytes + _MARGIN,
            transport_security=TransportSecuritySettings(
                allowed_hosts=list(hosts), allowed_origins=list(policy.door.allowed_origins)
            ),
        )
        guard = Guard(app, token=token, hosts=hosts, origins=policy.door.allowed_origins)
        config = uvicorn.Config(
            guard,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_FAREWELL,
        )
        running = uvicorn.Server(config)
        serving = asyncio.ensure_future(running.serve(sockets=[listening]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            running.should_exit = True
            await asyncio.wait({serving}, timeout=2 * _FAREWELL)
            raise
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
