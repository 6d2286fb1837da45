"""The addresses of a kernel's sockets inside the sandbox."""

import os
import socket
from typing import Any, Dict, List, NamedTuple, Union

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")

Address = Union[str, "tuple[str, int]"]


class Endpoints(NamedTuple):
    """Where a kernel listens. ``fields`` are those of its connection file."""

    addresses: Dict[str, Address]
    fields: Dict[str, Any]


def ipc_endpoints(folder: str) -> Endpoints:
    """Unix sockets in ``folder``."""
    prefix = os.path.join(folder, "c")
    ports = range(1, len(CHANNELS) + 1)
    addresses: Dict[str, Address] = {c: "%s-%d" % (prefix, p) for c, p in zip(CHANNELS, ports)}
    return Endpoints(addresses, {**_fields(list(ports)), "transport": "ipc", "ip": prefix})


def tcp_endpoints() -> Endpoints:
    """Ports that are free now."""
    ports = _free_ports(len(CHANNELS))
    addresses: Dict[str, Address] = {c: ("127.0.0.1", p) for c, p in zip(CHANNELS, ports)}
    return Endpoints(addresses, {**_fields(ports), "transport": "tcp", "ip": "127.0.0.1"})


def _fields(ports: List[int]) -> Dict[str, Any]:
    return {"%s_port" % channel: port for channel, port in zip(CHANNELS, ports)}


def _free_ports(count: int) -> List[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
