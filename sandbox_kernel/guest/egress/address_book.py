"""Addresses of 127.0.0.0/8 that stand for names: who dials one means the name."""

import socket
import struct
from typing import Dict, Optional

MOST_NAMES = 1024
_FIRST = struct.unpack(">I", socket.inet_aton("127.77.0.1"))[0]


class AddressBook:
    """Each name has one address for as long as the agent lives, up to MOST_NAMES."""

    def __init__(self) -> None:
        self._addresses: Dict[str, str] = {}
        self._names: Dict[str, str] = {}

    def address_of(self, name: str) -> Optional[str]:
        """The address of a name, a new one if it has none; None if there are too many names."""
        if name not in self._addresses:
            if len(self._addresses) >= MOST_NAMES:
                return None
            address = socket.inet_ntoa(struct.pack(">I", _FIRST + len(self._addresses)))
            self._addresses[name] = address
            self._names[address] = name
        return self._addresses[name]

    def name_at(self, address: str) -> Optional[str]:
        return self._names.get(address)
