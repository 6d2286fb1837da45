"""Real servers for programs in a sandbox: web over HTTP/1.1 and HTTP/2, git, gRPC, WebSocket,
PostgreSQL, and a banner as ssh has one."""

from __future__ import annotations

import contextlib
import http.server
import os
import pwd
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import trustme
import websockets.sync.server

from tests.helpers.named_hosts import listening, port_of, serve_with_threads
from tests.helpers.waiting import wait_until


class Web(http.server.BaseHTTPRequestHandler):
    """Says which request it has got. ``/git/`` is git's own server; ``/away`` leads elsewhere."""

    protocol_version = "HTTP/1.1"
    repositories: Path

    def do_GET(self) -> None:
        if self.path.startswith("/git/"):
            return self._git()
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.send_header("Content-Length", "0")
            return self.end_headers()
        size = int(self.headers.get("content-length") or 0)
        self.rfile.read(size)
        text = f"{self.command} {self.headers['host']} {self.path} {size}\n"
        self._answer(200, text.encode())

    def do_POST(self) -> None:
        self.do_GET()

    def _git(self) -> None:
        path, _, query = self.path.removeprefix("/git").partition("?")
        size = int(self.headers.get("content-length") or 0)
        ran = subprocess.run(
            ["git", "http-backend"],
            input=self.rfile.read(size),
            capture_output=True,
            timeout=60,
            check=True,
            env={
                **{"PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(self.repositories)},
                **{"GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path, "QUERY_STRING": query},
                **{"REQUEST_METHOD": self.command, "CONTENT_LENGTH": str(size)},
                "CONTENT_TYPE": self.headers.get("content-type", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""),
                "GIT_PROTOCOL": self.headers.get("git-protocol", ""),
                **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory"},
                "GIT_CONFIG_VALUE_0": "*",
            },
        )
        head, _, body = ran.stdout.partition(b"\r\n\r\n")
        fields = [line.split(": ", 1) for line in head.decode().split("\r\n")]
        status = next((value for name, value in fields if name == "Status"), "200")
        rest = {name: value for name, value in fields if name != "Status"}
        self._answer(int(status.split()[0]), body, rest)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nobody reads it."""


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away; the tests look at what they say."""


@contextlib.contextmanager
def web(repositories: Path, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """HTTP/1.1, with TLS if there is a context; the port."""
    handler = type("Handler", (Web,), {"repositories": repositories})
    with _Server(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def web_h2(authority: trustme.CA, *names: str) -> Iterator[int]:
    """HTTP/2 over TLS, which answers each request with its method and path; the port."""
    tls = server_context(authority, *names)
    tls.set_alpn_protocols(["h2"])

    def handle(raw: socket.socket) -> None:
        with tls.wrap_socket(raw, server_side=True) as connection:
            http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
            http.initiate_connection()
            connection.sendall(http.data_to_send())
            while data := connection.recv(65536):
                for event in http.receive_data(data):
                    if isinstance(event, h2.events.RequestReceived):
                        found = dict(event.headers or ())
                        text = b"h2 %s %s\n" % (found[b":method"], found[b":path"])
                        http.send_headers(event.stream_id, [(":status", "200")])
                        http.send_data(event.stream_id, text, end_stream=True)
                    elif isinstance(event, h2.events.DataReceived):
                        http.acknowledge_received_data(
                            event.flow_controlled_length, event.stream_id
                        )
                connection.sendall(http.data_to_send())

    with listening() as sock:
        serve_with_threads(handle, sock)
        yield port_of(sock)


@contextlib.contextmanager
def grpc_echo(authority: trustme.CA, name: str) -> Iterator[int]:
    """``/test.Echo/Say`` gives back what it gets, ``/test.Echo/Each`` each message of a stream."""
    leaf = authority.issue_cert(name)
    methods = {
        "Say": grpc.unary_unary_rpc_method_handler(lambda message, _: message),
        "Each": grpc.stream_stream_rpc_method_handler(lambda messages, _: iter(messages)),
    }
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Echo", methods)]
        )
        chain = b"".join(one.bytes() for one in leaf.cert_chain_pems)
        credentials = grpc.ssl_server_credentials([(leaf.private_key_pem.bytes(), chain)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


@contextlib.contextmanager
def websocket_echo(authority: trustme.CA, name: str) -> Iterator[int]:
    """Sends back each message."""

    def echo(connection: websockets.sync.server.ServerConnection) -> None:
        for message in connection:
            connection.send(message)

    context = server_context(authority, name)
    with websockets.sync.server.serve(echo, "127.0.0.1", 0, ssl=context) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def banner(text: bytes) -> Iterator[int]:
    """A server that speaks first, as ssh's does, and then gives back what it gets."""

    def handle(connection: socket.socket) -> None:
        connection.sendall(text)
        while data := connection.recv(65536):
            connection.sendall(data)

    with listening() as sock:
        serve_with_threads(handle, sock)
        yield port_of(sock)


@contextlib.contextmanager
def postgresql() -> Iterator[int]:
    """Debian's server with a new database folder, as an ordinary user; the port."""
    folder = Path(tempfile.mkdtemp())
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))
    user: dict[str, Any] = {}
    if os.getuid() == 0:  # whom it refuses to serve
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    data = str(folder / "data")
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", "tester", "-A", "trust", "-N", "--no-locale"],
        **{**user, "check": True, "capture_output": True, "timeout": 120, "cwd": folder},
    )
    with listening() as sock:
        port = port_of(sock)
    command = [str(programs / "postgres"), "-D", data, "-p", str(port), "-k", str(folder), "-F"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, **user, stdout=log, stderr=log, cwd=folder)
    try:
        ready = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
        wait_until(
            lambda: subprocess.run(ready, check=False, timeout=30).returncode == 0,
            "PostgreSQL accepts connections",
        )
        yield port
    finally:
        server.terminate()
        server.wait(60)
        shutil.rmtree(folder)


def repository(folder: Path) -> None:
    """A bare repository ``thing.git`` with one file, in this folder."""
    work = folder / "work"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    for arguments in (
        ["init", "-q", "-b", "main", str(work)],
        ["-C", str(work), "commit", "-q", "--allow-empty", "-m", "the first commit"],
        ["clone", "-q", "--bare", str(work), str(folder / "thing.git")],
    ):
        subprocess.run([*git, *arguments], env=environment, check=True, timeout=60)


def server_context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context
