"""A real Jupyter Server in a process of its own, and a client of its REST API and websockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import websocket
from jupyter_server.services.kernels.connection.base import (
    deserialize_msg_from_ws_v1,
    serialize_msg_to_ws_v1,
)

from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until
from tests.kernels.live import PATIENCE

V1 = "v1.kernel.websocket.jupyter.org"
TOKEN = "test-token"


class JupyterServer:
    """``start`` may be called again after the process has ended: same port, same folder."""

    def __init__(
        self,
        folder: Path,
        root: Path,
        *options: str,
        python: str = sys.executable,
        module: str = "jupyter_server",
    ) -> None:
        self.root = root
        self._log = folder / "server.log"
        self._options = options
        self._command = [python, "-m", module]
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.stdin: int = subprocess.DEVNULL
        self.connections: list[websocket.WebSocket] = []
        """Those of its tabs."""

    def options(self, *options: str) -> None:
        """Add some, for the next start."""
        self._options += options

    def start(self, *options: str, wait: bool = True) -> None:
        command = [*self._command, "--no-browser", "--allow-root"]
        command += [f"--port={self.port}", "--ServerApp.port_retries=0", "--ip=127.0.0.1"]
        command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={self.root}"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._options, *options],
                stdin=self.stdin,
                stdout=log,
                stderr=log,
                cwd=self.root,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        if wait:
            wait_until(self._answers, "the server answers")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        try:
            self.get("/api/status")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def end(self, signum: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(signum)
            self.process.wait(PATIENCE)
            self.process = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        try:
            text = self._answer(method, path, body)
        except urllib.error.HTTPError as error:
            raise AssertionError(
                f"{method} {path}: {error} {error.read()!r}\n{self.log}"
            ) from error
        return json.loads(text) if text else None

    def refused(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """A request that must fail; its status, and the message for the person."""
        try:
            self._answer(method, path, body)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, str(json.loads(error.read())["message"])
        raise AssertionError(f"{method} {path} was answered")

    def _answer(self, method: str, path: str, body: Any) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text: bytes = answer.read()
        return text

    def notebook(self, path: str, cells: tuple[str, ...] = ()) -> dict[str, Any]:
        """Write a notebook through the contents API: this is a save."""
        model = {
            "type": "notebook",
            "format": "json",
            "content": {
                "cells": [
                    {
                        "cell_type": "code",
                        "id": f"cell-{i}",
                        "source": cell,
                        "metadata": {},
                        "outputs": [],
                        "execution_count": None,
                    }
                    for i, cell in enumerate(cells)
                ],
                "metadata": {},
                "nbformat": 4,
                "nbformat_minor": 5,
            },
        }
        saved: dict[str, Any] = self.request("PUT", f"/api/contents/{path}", model)
        return saved

    def session(self, path: str, kernel: str = "sandbox") -> dict[str, Any]:
        """Open a notebook: a session with a new kernel."""
        body = {
            "path": path,
            "name": path.rpartition("/")[2],
            "type": "notebook",
            "kernel": {"name": kernel},
        }
        opened: dict[str, Any] = self.request("POST", "/api/sessions", body)
        return opened


class Events:
    """The server's events, as a client is sent them."""

    def __init__(self, server: JupyterServer) -> None:
        self._socket = websocket.create_connection(
            f"ws://127.0.0.1:{server.port}/api/events/subscribe",
            header=[f"Authorization: token {TOKEN}"],
            timeout=PATIENCE,
        )

    def next(self, schema: str) -> dict[str, Any]:
        while True:
            event: dict[str, Any] = json.loads(self._socket.recv())
            if event["schema_id"] == schema:
                return event

    def close(self) -> None:
        self._socket.close()


class NotDone(AssertionError):
    """A cell does not come to its end."""


class Tab:
    """A browser's tab: one websocket to one kernel, which can be reopened."""

    def __init__(self, server: JupyterServer, kernel_id: str) -> None:
        self._server = server
        self.kernel_id = kernel_id
        self.session = uuid.uuid4().hex
        self.messages: list[dict[str, Any]] = []
        """All that came, in order, with what came twice."""
        self.connect()

    def connect(self) -> None:
        self._socket = websocket.create_connection(
            f"ws://127.0.0.1:{self._server.port}/api/kernels/{self.kernel_id}/channels"
            f"?session_id={self.session}",
            header=[f"Authorization: token {TOKEN}"],
            subprotocols=[V1],
            timeout=PATIENCE,
        )
        self._server.connections.append(self._socket)

    def close(self) -> None:
        self._socket.close()

    def send(
        self,
        kind: str,
        content: dict[str, Any],
        channel: str = "shell",
        metadata: dict[str, Any] | None = None,
    ) -> str:
        message_id = uuid.uuid4().hex
        header = {
            "msg_id": message_id,
            "msg_type": kind,
            "session": self.session,
            "username": "",
            "date": "2026-01-01T00:00:00Z",
            "version": "5.3",
        }
        parts = {"parent_header": {}, "metadata": metadata or {}, "content": content}
        message = {"header": header, **parts}
        packed = serialize_msg_to_ws_v1(message, channel, lambda part: json.dumps(part).encode())
        self._socket.send_binary(packed)
        return message_id

    def begin(self, code: str, cell_id: str = "") -> str:
        """Send a cell, with its id as JupyterLab does; the id of the request."""
        # Without stop_on_error: what is sent right after an interrupt would be aborted, too.
        options = {"silent": False, "store_history": True, "stop_on_error": False}
        metadata = {"cellId": cell_id} if cell_id else {}
        return self.send("execute_request", {"code": code, **options}, metadata=metadata)

    def read(self, within: float = PATIENCE) -> dict[str, Any]:
        """The next message. The server's pings do not count: they come for ever."""
        deadline = time.monotonic() + within
        opcode = 0
        while opcode != websocket.ABNF.OPCODE_BINARY:
            left = deadline - time.monotonic()
            assert left > 0, f"nothing came for {within:.0f} s\n{self._server.log}"
            self._socket.settimeout(left)
            opcode, data = self._socket.recv_data(control_frame=True)
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                raise websocket.WebSocketConnectionClosedException("the server has closed it")
        channel, parts = deserialize_msg_from_ws_v1(data)
        header, parent, _, content = (json.loads(part) for part in parts[:4])
        message = {
            "channel": channel,
            "kind": header["msg_type"],
            "id": header["msg_id"],
            "parent": parent.get("msg_id"),
            "content": content,
        }
        self.messages.append(message)
        return message

    def drain(self) -> None:
        """Read what is on its way, up to the end of the connection."""
        try:
            while True:
                self.read()
        except (websocket.WebSocketException, OSError):
            self._socket.close()

    def until_done(self, request: str, within: float = 2 * PATIENCE) -> dict[str, Any]:
        """Read until a cell has ended, with its reply; the reply's content. NotDone if it goes on,
        and prints, for longer."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            mine = [m for m in self.messages if m["parent"] == request]
            replies = [m for m in mine if m["kind"] == "execute_reply"]
            idle = [m for m in mine if m["content"].get("execution_state") == "idle"]
            if replies and idle:
                content: dict[str, Any] = replies[0]["content"]
                return content
            self.read()
        raise NotDone(f"the cell goes on after {within:.0f} s")

    def until_heard(self) -> None:
        """Ask until the kernel is heard, too. The server's sockets lose a kernel that changes hands
        or sandboxes, and connect again one by one; what is published before that, nobody hears."""

        def idle() -> bool:
            request = self.send("kernel_info_request", {})
            with contextlib.suppress(websocket.WebSocketTimeoutException, AssertionError):
                while True:
                    message = self.read(within=1.0)
                    if message["parent"] == request and "idle" in message["content"].values():
                        return True
            return False

        wait_until(idle, "the kernel is heard", PATIENCE)

    def text(self, request: str) -> str:
        """What a cell printed, as a client shows it that knows each message once."""
        seen: set[str] = set()
        text = ""
        for message in self.messages:
            if message["kind"] == "stream" and message["parent"] == request:
                if message["id"] not in seen:
                    text += message["content"]["text"]
                seen.add(message["id"])
        return text

    def doubles(self) -> list[str]:
        """Messages of the output that came twice."""
        first: dict[str, int] = {}
        found = []
        for number, message in enumerate(self.messages):
            if message["channel"] == "iopub":
                if message["id"] in first:
                    content = message["content"]
                    found.append(f"{first[message['id']]} {number} {message['kind']} {content}")
                first.setdefault(message["id"], number)
        return found

    def run(self, code: str) -> str:
        """Run a cell that must not fail; what it printed."""
        request = self.begin(code)
        reply = self.until_done(request)
        assert reply["status"] == "ok", reply
        return self.text(request)


def open_notebook(server: JupyterServer, path: str) -> tuple[str, Tab]:
    session = server.session(path)
    return session["id"], Tab(server, session["kernel"]["id"])


def the_sandbox() -> str:
    """Its name; there is one only."""
    [record] = Records().list("local")
    return record.name


def in_the_sandbox(script: str) -> None:
    """Run something in it past its kernel and its server."""

    async def run() -> None:
        handle = await LocalClient().get(the_sandbox())
        result = await handle.shell(script, timeout=60)
        assert result.ok, result

    asyncio.run(run())


def kill_the_sandbox() -> None:
    for record in Records().list("local"):
        asyncio.run(LocalClient().remove(record.name))
