"""The connector: the command that the host runs in the sandbox for each link.

It hands its stdin and stdout to the agent and then only waits: no byte of the session passes
through it, and it holds nothing that matters when it is killed. Waiting is left to ``cat``, where
there is one, because an interpreter would need megabytes for it.
"""

import json
import os
import socket
import sys
import time

from ..wire.codec import CODECS, PREAMBLE
from ..wire.descriptors import send_with_descriptors

SOCKET = "agent.sock"
"""Name of the agent's socket in its folder."""

CLIENTS = "clients"
"""In place of a codec: the host will hand its clients' connections over its stdin."""
ACCEPTED = b"+"
"""The agent's answer to such a host that it knows."""
AGENT_TIMEOUT = 20.0
"""Seconds for an agent that has just been started to listen."""
EXIT_NO_AGENT = 69
CAT = ("/bin/cat", "/usr/bin/cat")
"""Where the program may be that waits. It ends with its input, and with exit code 0."""


def main(folder: str, codec: str) -> int:
    if codec not in (*CODECS, CLIENTS):
        print("unknown codec %r; known: %s" % (codec, ", ".join(CODECS)), file=sys.stderr)
        return 2
    return hand_over(os.path.join(folder, SOCKET), codec)


def hand_over(address: str, codec: str, timeout: float = AGENT_TIMEOUT) -> int:
    """Hand stdin and stdout to whoever listens at ``address``, and wait for the end."""
    connection = open_agent(address, timeout)
    if connection is None:
        print("no agent answers at %s" % address.lstrip("\0"), file=sys.stderr)
        return EXIT_NO_AGENT
    with connection:
        if codec != CLIENTS:
            os.write(1, PREAMBLE)
        send_with_descriptors(connection, json.dumps({"codec": codec}).encode(), [0, 1])
        if codec == CLIENTS:
            return 0
        wait_for_end(connection)
    return 0


def wait_for_end(connection: socket.socket) -> None:
    """Wait until the agent closes the connection. Returns only if no other program can do that."""
    # This process must not keep the stream open when the agent closes its copies.
    os.dup2(connection.fileno(), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for path in CAT:
        try:
            os.execve(path, ["cat"], {})
        except OSError:  # an image without it
            continue
    connection.recv(1)


def open_agent(path: str, timeout: float = AGENT_TIMEOUT) -> "socket.socket | None":
    """A connection to the agent's socket, waiting for one that is starting; None if none comes."""
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)
