"""Who may talk to the HTTP server: requests to it by name, from no web page, with the token.

An ASGI application before the server's own. A page in a browser on this machine could send requests
to a port of it; Host tells those that came through a name of the attacker's (DNS rebinding), Origin
those of pages.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Refuses requests, on any path, before anything else reads them."""

    def __init__(
        self, app: Application, *, token: str, hosts: Collection[str], origins: Collection[str]
    ) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = {host.lower() for host in hosts}
        self._origins = set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            raise ValueError(f"There is no {scope['type']} here.")
        code, words = self.refusal(scope["headers"])
        if not code:
            return await self._app(scope, receive, send)
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(words))]
        if code == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": words})

    def refusal(self, headers: Collection[tuple[bytes, bytes]]) -> tuple[int, bytes]:
        """Status and words for what is refused; 0 if nothing is."""
        hosts, origins, given = (
            [value for key, value in headers if key == name]
            for name in (b"host", b"origin", b"authorization")
        )
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self._hosts:
            return 421, b"This server is not called that. The operator can allow it: allowed_hosts."
        if any(origin.decode("latin-1") not in self._origins for origin in origins):
            return 403, b"Web pages are not allowed here. The operator can: allowed_origins."
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            return 401, b"The token is missing or wrong."
        return 0, b""
