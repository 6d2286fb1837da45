"""The relay: the command through which the host reaches a box's supervisor.

BoxLite runs it in the box (``python3 -c <this file>``). It hands its stdin and stdout to the
supervisor and waits; no byte passes through it. Standard library only; never imported in the box.
"""

import os
import socket
import sys
import time

ADDRESS = "\0sandbox-kernel-supervisor"
TIMEOUT = 120.0
"""Seconds for a supervisor that has just been started to listen."""
EXIT_NO_SUPERVISOR = 69


def main() -> int:
    deadline = time.monotonic() + TIMEOUT
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(ADDRESS)
            break
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                print(f"no supervisor answers: {error}", file=sys.stderr)
                return EXIT_NO_SUPERVISOR
            time.sleep(0.02)
    socket.send_fds(connection, [b"relay"], [0, 1])
    # This process must not keep the streams open when the supervisor closes its copies.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    connection.recv(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
