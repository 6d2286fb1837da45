"""Where the HTTP server listens, and what it is called."""

from __future__ import annotations

import ipaddress
import socket

from sandbox_kernel.agents.mcp.policy import Door
from sandbox_kernel.errors import SpecError

PATH = "/mcp"


def listen(door: Door) -> socket.socket:
    """The socket of a server. SpecError if the address cannot be used, or is one that others reach
    without the operator having said so."""
    try:
        address = ipaddress.ip_address(door.host)
    except ValueError:
        raise SpecError(f"host takes an address such as 127.0.0.1, not {door.host!r}.") from None
    if not address.is_loopback and not door.allowed_hosts:
        raise SpecError(
            f"Other machines may reach {door.host}: name the hosts that clients use for this "
            f"server with allowed_hosts, or listen at 127.0.0.1. There is no TLS; put a proxy "
            f"before it."
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((door.host, door.port), family=family)
    except OSError as error:
        raise SpecError(
            f"Port {door.port} at {door.host} cannot be used: {error.strerror}."
        ) from None


def accepted_hosts(door: Door, port: int) -> tuple[str, ...]:
    """Values of the header Host that name this server."""
    own = () if door.allowed_hosts else (door.host, "localhost", "127.0.0.1", "::1")
    named = [f"[{host}]" if ":" in host else host for host in dict.fromkeys(own)]
    return (*(f"{host}:{port}" for host in named), *door.allowed_hosts)


def url(listening: socket.socket) -> str:
    """The address of a server, for its clients."""
    host, port = listening.getsockname()[:2]
    return address_url(host, port)


def address_url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"
