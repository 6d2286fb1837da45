"""Re-keying: gives an agent whose memory was copied a token and a name of its own.

After a live fork, or when a memory snapshot is restored, two agents have the same token. The host
runs ``rekey DIR`` in the copy, which passes one request to the agent there. From then on neither
sandbox can be reached with the token of the other.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys

from .connector import EXIT_NO_AGENT, SOCKET, open_agent

MAX_REQUEST = 4096
"""Longest request in bytes; it must arrive in one piece."""
EXIT_REFUSED = 77
_ANSWER_TIMEOUT = 20.0
_RNDRESEEDCRNG = 0x5207
FIELDS = ("token", "new_token", "name", "entropy")


def main(folder: str) -> int:
    """Pass the request on stdin (one JSON line) to the agent of ``folder``; print its answer."""
    request = read_request(sys.stdin.buffer.readline(MAX_REQUEST + 1))
    if request is None:
        print("stdin has no re-key request", file=sys.stderr)
        return 2
    connection = open_agent(os.path.join(folder, SOCKET))
    if connection is None:
        print("no agent answers in %s" % folder, file=sys.stderr)
        return EXIT_NO_AGENT
    with connection:
        connection.settimeout(_ANSWER_TIMEOUT)
        connection.sendall(json.dumps({"rekey": request}).encode())
        try:
            answer = connection.makefile(errors="replace").readline(MAX_REQUEST).strip()
        except OSError as error:
            print("the agent does not answer:", error, file=sys.stderr)
            answer = ""
    print(answer or "the agent gave no answer")
    return 0 if answer == "ok" else EXIT_REFUSED


def read_request(line: bytes) -> dict[str, str] | None:
    """The request, or None if it is invalid."""
    try:
        found = json.loads(line) if len(line) <= MAX_REQUEST else None
    except ValueError:
        return None
    return found if is_request(found) else None


def is_request(found: object) -> bool:
    """Has this exactly the fields of a request, and a new token of 16 characters or more?"""
    if not isinstance(found, dict) or set(found) != set(FIELDS):
        return False
    if not all(isinstance(value, str) and value.isascii() for value in found.values()):
        return False
    try:
        bytes.fromhex(found["entropy"])
    except ValueError:
        return False
    return len(found["new_token"]) >= 16


def reseed(entropy: bytes) -> None:
    """Give the operating system fresh randomness, and make it reseed at once: a copy of a machine
    would otherwise hand out the same random numbers as the original."""
    try:
        fd = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        print("agent: no fresh randomness:", error, flush=True)
        return
    try:
        os.write(fd, entropy)
        fcntl.ioctl(fd, _RNDRESEEDCRNG)
    except OSError as error:
        # Without the right to do so, the numbers differ after the system's own next reseeding.
        print("agent: random numbers are reseeded later:", error, flush=True)
    finally:
        os.close(fd)
