"""Local jails, kept by a broker."""

from __future__ import annotations

import socket
import struct

from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes.broker.client import BrokeredClient, BrokeredHandle
from sandbox_kernel.sandboxes.broker.startup import Place
from sandbox_kernel.sandboxes.local import LocalClient

FACTORY = "sandbox_kernel.sandboxes.local:LocalClient"


class JailHandle(BrokeredHandle):
    backend = "local"


class JailClient(BrokeredClient):
    """Local jails, of which the broker is the keeper."""

    backend = "local"
    capabilities = LocalClient.capabilities

    def place(self) -> Place:
        return Place("local", FACTORY)

    def handle(self, record: Record) -> JailHandle:
        return JailHandle(self.place(), record)


def broker_pid() -> int:
    """The process that listens on the broker's socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(JailClient().place().socket))
        return int(
            struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        )
