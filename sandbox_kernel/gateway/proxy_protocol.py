"""The start of a client's connection to the proxy port: HTTP or SOCKS, and where it wants to go.
Parsers for ByteSource; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sandbox_kernel.gateway.http_head import BadHead, RequestHead, body_of_request
from sandbox_kernel.gateway.names import Target, read_authority, read_url
from sandbox_kernel.gateway.refusals import Refusal

DEFAULT_PORTS = {"http": 80, "https": 443}


class Speaks(Enum):
    HTTP = "HTTP"
    SOCKS4 = "SOCKS4"
    SOCKS5 = "SOCKS5"
    UNKNOWN = "unknown"


def look_at_first(buffer: bytearray) -> Speaks | None:
    """What a client speaks, by its first byte, which stays in the buffer."""
    if not buffer:
        return None
    first = buffer[0]
    if first in (4, 5):
        return Speaks.SOCKS5 if first == 5 else Speaks.SOCKS4
    return Speaks.HTTP if ord("A") <= first <= ord("Z") else Speaks.UNKNOWN


@dataclass(frozen=True)
class Request:
    """A request for a checked target. ``path`` is what rules look at, without the query."""

    head: RequestHead
    target: Target
    path_and_query: str
    scheme: str = "http"

    @property
    def host(self) -> str:
        """For the Host header."""
        return self.target.host_header(DEFAULT_PORTS[self.scheme])

    @property
    def path(self) -> str:
        return self.path_and_query.partition("?")[0]


def connect_target(head: RequestHead) -> Target:
    """Where a CONNECT request wants to go. BadHead; NameRefused; Refusal 421."""
    target = read_authority(head.target, None)
    if not body_of_request(head).is_empty:
        raise BadHead("a CONNECT with a body")
    hosts = head.all("host")
    if len(hosts) > 1:
        raise BadHead("more than one Host")
    # Some clients leave out the port, some the header.
    if hosts and read_authority(hosts[0], target.port) != target:
        raise _disagree(hosts[0], str(target))
    return target


def proxied_request(head: RequestHead) -> Request:
    """A request to a proxy, with a whole URL in its first line. BadHead; NameRefused; 421."""
    if head.target.startswith("/") or head.target == "*":
        raise BadHead("this is a proxy; it takes whole URLs and CONNECT")
    scheme, target, rest = read_url(head.target)
    if scheme != "http":
        raise BadHead(f"{scheme} URLs are for CONNECT, not for the proxy to read")
    _check_host(head, target, scheme)
    return Request(head, target, rest)


def direct_request(head: RequestHead, target: Target, scheme: str = "http") -> Request:
    """A request on a connection whose target is known. BadHead; NameRefused; Refusal 421."""
    if head.method == "CONNECT":
        raise BadHead("CONNECT is for proxies")
    rest = head.target
    if not rest.startswith("/") and not (rest == "*" and head.method == "OPTIONS"):
        named_scheme, named, rest = read_url(rest)
        if named_scheme != scheme or named != target:
            raise _disagree(str(named), str(target))
    _check_host(head, target, scheme)
    return Request(head, target, rest, scheme)


def _check_host(head: RequestHead, target: Target, scheme: str) -> None:
    hosts = head.all("host")
    if len(hosts) > 1 or (not hosts and not head.is_old):
        raise BadHead("not exactly one Host")
    if hosts and read_authority(hosts[0], DEFAULT_PORTS[scheme]) != target:
        raise _disagree(hosts[0], str(target))


def _disagree(host: str, target: str) -> Refusal:
    return Refusal(421, f"egress denied: Host {host[:80]!a} on a connection for {target}")
