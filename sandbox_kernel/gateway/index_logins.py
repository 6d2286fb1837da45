"""Logins of package indexes: the sandbox asks without, and the gateway adds them. No I/O.

They are added to requests that fetch (GET and HEAD), to exactly the host and port that this
machine's package manager sends them to, and over plain http only if that does, too.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandbox_kernel.gateway.http_head import Headers
from sandbox_kernel.gateway.names import Target
from sandbox_kernel.gateway.rewriting import (
    Follows,
    Rewriting,
    RewrittenRequest,
    RewrittenResponse,
    Unchanged,
)

_FETCHES = ("GET", "HEAD")


@dataclass(frozen=True)
class Login:
    """User and password of an index."""

    user: str
    password: str = field(repr=False)
    over_tls: bool = True

    def header(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class IndexLogins:
    """A Rewriting that adds ``logins``, before what another one does."""

    def __init__(
        self, then: Rewriting | None = None, logins: Mapping[Target, Login] | None = None
    ) -> None:
        self.logins = logins or {}
        self._then = then or Unchanged()

    def concerns(self, target: Target) -> bool:
        return target in self.logins or self._then.concerns(target)

    def request(
        self,
        target: Target,
        method: str,
        path_and_query: str,
        headers: Headers,
        *,
        secure: bool = False,
    ) -> RewrittenRequest:
        login = self.logins.get(target)
        if login is not None and method in _FETCHES and secure == login.over_tls:
            others = tuple(pair for pair in headers if pair[0] != "authorization")
            headers = (*others, ("authorization", login.header()))
        return self._then.request(target, method, path_and_query, headers, secure=secure)

    def response(
        self,
        target: Target,
        headers: Headers,
        reason: str = "",
        *,
        follows: Follows = Follows.BODY,
    ) -> RewrittenResponse:
        return self._then.response(target, headers, reason, follows=follows)
