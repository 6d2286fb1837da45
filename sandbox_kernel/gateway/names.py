"""What a hostile client names, turned into a checked target.

Everything that names a host comes through here: SOCKS names, the authority of a CONNECT, Host
headers, absolute URIs, names of a sandbox's DNS. What a resolver, a browser or another parser could
read in a second way is refused, not repaired.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from sandbox_kernel.gateway.refusals import Refusal

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_NAME = 253
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,31}")
_PORT = re.compile(r"[0-9]{1,5}")
_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\[\]:@/?#%]+))(?::(?P<port>.*))?"
)
_SCHEME_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


class NameRefused(Refusal):
    """The name is none that can be checked."""

    def __init__(self, what: str, why: str) -> None:
        shown = what if len(what) <= 80 else what[:77] + "..."
        super().__init__(400, f"bad host name {shown!a}: {why}")


@dataclass(frozen=True)
class Target:
    """Where a client wants to go. ``host`` is a lower-case ASCII name without a trailing dot, or
    the usual text of ``address``."""

    host: str
    port: int
    address: Address | None = None

    def __str__(self) -> str:
        return f"{self.shown_host}:{self.port}"

    @property
    def shown_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def host_header(self, default_port: int = 80) -> str:
        return self.shown_host if self.port == default_port else str(self)


def read_target(host: str | bytes, port: int) -> Target:
    """A target from a bare host, without brackets, and a port. NameRefused."""
    text = _ascii(host)
    if type(port) is not int or not 0 < port < 65536:
        raise NameRefused(text, f"{port} is not a port")
    address = _address(text)
    if address is not None:
        return Target(str(address), port, address)
    return Target(_name(text), port)


def read_authority(text: str | bytes, default_port: int | None) -> Target:
    """A target from ``host:port``, ``host`` or ``[address]:port``. Without a default, the port must
    be given. NameRefused."""
    plain = _ascii(text)
    _, login, host = plain.rpartition("@")
    if login:  # which must not be in an error
        raise NameRefused(host, "a login stands before it")
    found = _AUTHORITY.fullmatch(plain)
    if found is None:
        raise NameRefused(plain, "it is not HOST:PORT")
    written = found["port"]
    if written is None and default_port is not None:
        port = default_port
    elif written is not None and _PORT.fullmatch(written):
        port = int(written)
    else:
        raise NameRefused(plain, "it needs a port from 1 to 65535")
    if found["v6"] is not None:
        target = read_target(found["v6"], port)
        if ":" not in found["v6"]:
            raise NameRefused(plain, "only IPv6 addresses stand in brackets")
        return target
    return read_target(found["host"], port)


def read_url(url: str) -> tuple[str, Target, str]:
    """The scheme, the target and the path with query of an absolute URI. NameRefused."""
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or not _SCHEME.fullmatch(scheme):
        raise NameRefused("", "what stands there is not a URL")
    end = min((at for at in map(rest.find, "/?") if at >= 0), default=len(rest))
    target = read_authority(rest[:end], _SCHEME_PORTS.get(scheme))
    path = rest[end:]
    if "#" in path:
        raise NameRefused(str(target), "the URL has a fragment")
    return scheme, target, path if path.startswith("/") else f"/{path}"


def _ascii(text: str | bytes) -> str:
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    for character in text:
        if not "!" <= character <= "~":
            raise NameRefused(text, f"it has the character {character!a}")
    return text


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise NameRefused(text, "it has a zone")
        # The same host: rules for it must match however it is written.
        return address.ipv4_mapped or address
    return address


def _name(text: str) -> str:
    name = text.lower().removesuffix(".")
    if len(name) > MAX_NAME:
        raise NameRefused(text, f"it is longer than {MAX_NAME} characters")
    if not _NAME.fullmatch(name):
        raise NameRefused(text, "it is not a host name")
    if _NUMBER.fullmatch(name.rsplit(".", 1)[-1]):
        # 2130706433, 0177.0.0.1, 0x7f.1 and 127.1 are addresses to some resolvers.
        raise NameRefused(text, "it is neither a name nor an address in the usual form")
    return name
