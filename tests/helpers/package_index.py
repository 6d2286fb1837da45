"""A package index on this machine that asks for a login, with packages made here."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

USER, PASSWORD = "reader", "a pass/word of 40%"


def wheel(name: str, needs: Sequence[str] = ()) -> bytes:
    """A package with one module, which is called like it and knows its name."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": f"NAME = {name!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        + "".join(f"Requires-Dist: {one}\n" for one in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return made.getvalue()


@dataclass
class Index:
    """``refused`` counts requests without the login."""

    port: int = 0
    refused: int = 0
    asked: list[str] = field(default_factory=list)


@contextlib.contextmanager
def index_with_login(packages: Mapping[str, bytes]) -> Iterator[Index]:
    """Serves these wheels at ``/simple``, to whoever has the login."""
    found = Index()
    login = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.headers["authorization"] != login:
                found.refused += 1
                return self._answer(401, b"who are you?")
            found.asked.append(self.path)
            kind, _, name = self.path.strip("/").partition("/")
            name = name.partition("-")[0]
            if name not in packages:
                return self._answer(404, b"")
            if kind == "files":
                return self._answer(200, packages[name])
            digest = hashlib.sha256(packages[name]).hexdigest()
            file = f"{name}-1.0-py3-none-any.whl"
            link = f'<a href="/files/{file}#sha256={digest}">{file}</a>'
            self._answer(200, f"<!DOCTYPE html><html><body>{link}</body></html>".encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nobody reads it."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
