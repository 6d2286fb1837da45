"""An HTTP proxy in front of a server, which breaks some of the calls: it answers 500 without asking
the server, stalls, or asks the server and loses the answer."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS: tuple[str, ...] = ("error", "stall", "lost")


class FaultyProxy:
    """``rate`` of the calls break, in one of the ways of ``kinds``, as ``faults`` counts. Writes
    take ``delay`` seconds. ``url`` is where clients go."""

    def __init__(self, port: int, *, seed: int, stall: float) -> None:
        self.rate = self.delay = 0.0
        self.kinds = FAULTS
        self.faults: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_call(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy._choose()
                if fault == "error":
                    return self._answer(500, [], b"broken on purpose")
                if fault == "stall":
                    time.sleep(stall)
                    self.close_connection = True
                    return None
                if self.command == "PUT":
                    time.sleep(proxy.delay)
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
                    server.request(self.command, self.path, body, headers)
                    answer = server.getresponse()
                    content = answer.read()
                finally:
                    server.close()
                if fault == "lost":
                    self.close_connection = True
                    return None
                return self._answer(answer.status, answer.getheaders(), content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_call  # noqa: N815

            def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                self.send_response(status)
                length = str(len(content))
                for name, value in headers:
                    if name.lower() == "content-length":
                        length = value  # of a HEAD: that of the thing itself
                    elif name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                """Tests have enough to print."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _choose(self) -> str:
        with self._lock:
            if self._dice.random() >= self.rate:
                return ""
            fault = self._dice.choice(self.kinds)
            self.faults[fault] += 1
            return fault

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
