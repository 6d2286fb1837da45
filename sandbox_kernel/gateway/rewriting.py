"""What the gateway changes in requests and responses that it reads: the seam between those that
pass messages on (HTTP/1, HTTP/2) and secrets, which are put in on the way out and taken out of what
comes back. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from sandbox_kernel.gateway.http_head import Headers
from sandbox_kernel.gateway.names import Target

MOST_SIGNED = 2 * 1024 * 1024
"""Bytes of a body that is read before its request is sent, because a signature is over it."""


class Follows(Enum):
    """What comes after the head of a response. Its headers alone do not say that: code in a sandbox
    may be able to have a server send any header."""

    BODY = "a body"
    HTTP_2_BODY = "a body, which may be gRPC"
    WEBSOCKET = "frames of WebSocket"


class Filter(Protocol):
    """Changes a body that passes by in pieces of any size."""

    def feed(self, data: bytes) -> bytes:
        """What can be passed on by now. The rest is kept, within a bound."""

    def end(self) -> bytes:
        """The rest, after the last piece."""


@dataclass(frozen=True)
class RewrittenRequest:
    """A request as it goes to the server, so its repr does not show it. A body with a filter has no
    length that is known."""

    path_and_query: str = field(repr=False)
    headers: Headers = field(repr=False)
    body: Filter | None = None
    secrets: Sequence[str] = ()
    """Names of the secrets that were put in, for the audit; complete when the body has passed."""
    sign: Callable[[bytes], Headers] | None = field(default=None, repr=False)
    """If given, it makes the headers, from the whole body (at most ``MOST_SIGNED`` bytes; a larger
    one is refused). There is no filter then."""


@dataclass(frozen=True)
class RewrittenResponse:
    """A response as it goes to the client. What is changed is as long as before: a length that the
    server has given stays true, and a filter may also be used for what follows a 101."""

    headers: Headers
    body: Filter | None = None
    reason: str = ""


class Rewriting(Protocol):
    """For one sandbox. Headers have names in lower case and no ``host``, framing or hop-by-hop
    headers: those are for who passes the message on."""

    def concerns(self, target: Target) -> bool:
        """Whether messages for this target must be read, and TLS be ended for that."""

    def request(
        self,
        target: Target,
        method: str,
        path_and_query: str,
        headers: Headers,
        *,
        secure: bool = False,
    ) -> RewrittenRequest:
        """A request that the policy has allowed. Refusal if it may not go out like this.
        ``secure``: it goes out encrypted, to a server whose certificate was checked."""

    def response(
        self,
        target: Target,
        headers: Headers,
        reason: str = "",
        *,
        follows: Follows = Follows.BODY,
    ) -> RewrittenResponse:
        """The response to such a request, an interim one, or trailers. Refusal."""


class Unchanged:
    """Rewriting for sandboxes without secrets."""

    def concerns(self, target: Target) -> bool:
        return False

    def request(
        self,
        target: Target,
        method: str,
        path_and_query: str,
        headers: Headers,
        *,
        secure: bool = False,
    ) -> RewrittenRequest:
        return RewrittenRequest(path_and_query, headers)

    def response(
        self,
        target: Target,
        headers: Headers,
        reason: str = "",
        *,
        follows: Follows = Follows.BODY,
    ) -> RewrittenResponse:
        return RewrittenResponse(headers, reason=reason)
