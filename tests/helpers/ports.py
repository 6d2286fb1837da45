"""Ports for servers that must be told theirs before they listen."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, and which no connection of another process takes
    for its own end until a server listens there: the system gives those ports of a range of its
    own."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(max(1024, first - 8192), first) if first > 1100 else range(61000, 65536)
    for port in random.sample(ports, len(ports)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
