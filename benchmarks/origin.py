"""A web server for ``python -m benchmarks egress``, in a process of its own.

    python -m benchmarks.origin [CERTIFICATE KEY]

prints its port, serves plain HTTP (or TLS, with a certificate), and ends with its standard input.
``/N`` answers with N bytes, ``/N?RATE`` with at most RATE of them a second; a request with
a body is answered when all of it has arrived.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Mapping

_PIECE = 2**20
_LARGEST = 512 * 2**20
_SLICE = 0.005
"""Seconds between two pieces of an answer with a rate."""


class Connection:
    """One client's connection, which is kept until the client ends it."""

    def __init__(self, sock: socket.socket, content: int) -> None:
        self._sock = sock
        self._content = content
        self._buffer = bytearray(_PIECE)
        self._left = b""

    def serve(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._sock:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (head := self._head()) is not None:
                target, headers = head
                self._take_body(headers)
                size, _, rate = target.rpartition("/")[2].partition("?")
                last = headers.get("connection", "").lower() == "close"
                self._answer(int(size or 0), float(rate or 0), last=last)
                if last:
                    return

    def _head(self) -> tuple[str, Mapping[str, str]] | None:
        while b"\r\n\r\n" not in self._left:
            data = self._sock.recv(65536)
            if not data:
                return None
            self._left += data
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = (line.partition(":") for line in lines)
        return first.split()[1], {name.lower(): value.strip() for name, _, value in headers}

    def _take_body(self, headers: Mapping[str, str]) -> None:
        if headers.get("expect", "").lower() == "100-continue":
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        missing = int(headers.get("content-length", 0)) - len(self._left)
        self._left = b""
        while missing > 0:
            count = self._sock.recv_into(self._buffer)
            if not count:
                raise ConnectionError
            missing -= count

    def _answer(self, size: int, rate: float, *, last: bool) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % size
        self._sock.sendall(head + (b"Connection: close\r\n\r\n" if last else b"\r\n"))
        begin, sent = time.monotonic(), 0
        while sent < size:
            most = min(size - sent, max(int(rate * _SLICE), 1) if rate else _PIECE)
            if isinstance(self._sock, ssl.SSLSocket):
                sent += self._sock.send(memoryview(self._buffer)[:most])
            else:
                sent += os.sendfile(self._sock.fileno(), self._content, 0, most)
            if rate:
                time.sleep(max(0.0, begin + sent / rate - time.monotonic()))


def main(arguments: list[str]) -> None:
    content = os.memfd_create("content")
    os.ftruncate(content, _PIECE)
    context: ssl.SSLContext | None = None
    if arguments:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*arguments)
    server = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(server.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(server, context, content), daemon=True).start()
    sys.stdin.read()


def _accept(server: socket.socket, context: ssl.SSLContext | None, content: int) -> None:
    while True:
        sock, _ = server.accept()
        threading.Thread(target=_serve, args=(sock, context, content), daemon=True).start()


def _serve(sock: socket.socket, context: ssl.SSLContext | None, content: int) -> None:
    with contextlib.suppress(OSError):
        if context is not None:
            sock = context.wrap_socket(sock, server_side=True)
        Connection(sock, content).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
