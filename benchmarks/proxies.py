"""Proxies of other makers, next to which the gateway is measured.

mitmproxy is of the same kind: a forward proxy on asyncio that reads HTTP and, where it is asked to,
TLS. tinyproxy is a small one in C, which reads only what it must. Both run on the host, without a
sandbox. ``make bench`` installs them.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MITMPROXY = Path(__file__).resolve().parent.parent / ".venv-mitmproxy/bin/mitmdump"
OPAQUE_HOST, READ_HOST = "127.0.0.1", "localhost"
"""What mitmproxy passes on without reading it, and what it reads."""
_START_LIMIT = 60.0


class NotInstalled(Exception):
    """A proxy is not on this machine."""


@dataclass(frozen=True)
class Proxy:
    """One that runs."""

    url: str
    pid: int


@contextlib.contextmanager
def mitmproxy(folder: Path) -> Iterator[Proxy]:
    """It passes bodies on while they arrive, as the gateway does."""
    if not MITMPROXY.exists():
        raise NotInstalled("mitmproxy is not installed; `make bench` does that")
    port = _free_port()
    options = {
        "stream_large_bodies": "64k",
        "confdir": str(folder / "mitmproxy"),
        "ssl_insecure": "true",
        "connection_strategy": "lazy",
    }
    command = [str(MITMPROXY), "-q", "--listen-host", "127.0.0.1", "-p", str(port)]
    command += ["--ignore-hosts", OPAQUE_HOST.replace(".", r"\.")]
    for name, value in options.items():
        command += ["--set", f"{name}={value}"]
    with _running(command, port) as proxy:
        yield proxy


@contextlib.contextmanager
def tinyproxy(folder: Path) -> Iterator[Proxy]:
    program = shutil.which("tinyproxy")
    if program is None:
        raise NotInstalled("tinyproxy is not installed; `make bench` does that as root on Debian")
    port = _free_port()
    file = folder / "tinyproxy.conf"
    file.write_text(
        f"Port {port}\nListen 127.0.0.1\nAllow 127.0.0.1\nTimeout 600\nMaxClients 400\n"
        "LogLevel Critical\n"
    )
    with _running([program, "-d", "-c", str(file)], port) as proxy:
        yield proxy


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[Proxy]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_until_it_listens(process, port)
        yield Proxy(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _START_LIMIT
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if process.poll() is not None or time.monotonic() > end:
                raise NotInstalled(f"{process.args!r} does not listen") from None
        time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
