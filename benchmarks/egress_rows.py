"""What ``python -m benchmarks egress`` measures: requests of curl, and cells meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.egress_columns import BY_NAME, HTTP, OPAQUE, TLS, UPLOAD, Column
from benchmarks.livekernel import LiveKernel
from benchmarks.resources import pss

AT_ONCE = 200
REQUESTS = 60
_IDLE_TRIPS = 40
_CELL_TRANSFERS = 2
CELL_SIZE = 400_000_000
_STARTING = 0.1
"""Seconds until bytes flow."""
SPEED = 100_000_000
"""Bytes a second of a transfer over a fast connection to the Internet (1 Gbit/s)."""


@dataclass(frozen=True)
class Row:
    name: str
    about: str
    unit: str
    measure: Callable[[Bench, Column, str], list[float]]
    """Gives samples in base units."""
    way: str = HTTP
    scale: float = 1.0


@dataclass
class Bench:
    """What the rows need."""

    port: int
    tls_port: int
    size: int
    live: LiveKernel
    memory_before: Mapping[str, int] = field(default_factory=dict)
    """Column -> that of its proxy's process, before it had many connections."""
    idle: list[float] = field(default_factory=list)
    """Round trips of cells between the transfers of the present row."""

    def curl(self, column: Column, way: str, path: str, *options: str, shell: str = "") -> str:
        command = ["curl", "-sS", "--fail", "-o", "/dev/null", *options]
        command += (
            ["--noproxy", "*"] if way == BY_NAME or not column.proxy else ["-x", column.proxy]
        )
        command += ["-p"] if way == OPAQUE and column.proxy else []
        scheme, port = ("https", self.tls_port) if way == TLS else ("http", self.port)
        command += ["-k", f"{scheme}://{column.hosts[way]}:{port}/{path}"]
        return column.run(["sh", "-c", shell, "sh", *command] if shell else command)

    # --- rows

    def download(self, column: Column, way: str) -> list[float]:
        return [float(self.curl(column, way, str(self.size), "-w", "%{speed_download}"))]

    def upload(self, column: Column, way: str) -> list[float]:
        options = ("-X", "POST", "-T", UPLOAD, "-H", "Expect:", "-w", "%{speed_upload}")
        return [float(self.curl(column, way, "0", *options))]

    def small_at_once(self, column: Column, way: str) -> list[float]:
        return self._at_once(column, way, 1000)

    def large_at_once(self, column: Column, way: str) -> list[float]:
        return self._at_once(column, way, self.size // AT_ONCE)

    def _at_once(self, column: Column, way: str, size: int, options: str = "") -> list[float]:
        path = f"[1-{AT_ONCE}]/{size}{options}"
        clock = 'begin=$(date +%s%N); "$@" 2>&- || exit; echo $(($(date +%s%N) - begin))'
        parallel = ("-Z", "--parallel-immediate", "--parallel-max", str(AT_ONCE))
        return [int(self.curl(column, way, path, *parallel, shell=clock)) / 1e9]

    def memory(self, column: Column, way: str) -> list[float]:
        """Growth of the proxy's process while 200 downloads are under way."""
        if column.pid is None:
            return []
        pid, highest, done = column.pid, 0, threading.Event()

        def watch() -> None:
            nonlocal highest
            while not done.wait(0.1):
                highest = max(highest, pss(pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self._at_once(column, way, 150_000, "?100000")
        finally:
            done.set()
            watcher.join()
        return [float(highest - self.memory_before[column.name])]

    def kept(self, column: Column, way: str) -> list[float]:
        """Small requests, one after the other on one connection, without the first."""
        return self._requests(column, way)[5:]

    def new(self, column: Column, way: str) -> list[float]:
        """Small requests, each on a connection of its own."""
        return self._requests(column, way, "-H", "Connection: close")

    def _requests(self, column: Column, way: str, *options: str) -> list[float]:
        path = f"[1-{REQUESTS}]/10"
        text = self.curl(column, way, path, *options, "-w", "%{time_total}\\n")
        return [float(seconds) for seconds in text.split()]

    def cell_download(self, column: Column, way: str) -> list[float]:
        return self._cells(column, lambda: self.curl(column, way, str(CELL_SIZE)))

    def cell_slow(self, column: Column, way: str) -> list[float]:
        return self._cells(column, lambda: self.curl(column, way, f"{SPEED // 2}?{SPEED}"))

    def cell_upload(self, column: Column, way: str) -> list[float]:
        send = ("-X", "POST", "-T", UPLOAD, "-H", "Expect:")
        return self._cells(column, lambda: self.curl(column, way, "0", *send))

    def _cells(self, column: Column, transfer: Callable[[], object]) -> list[float]:
        """Round trips while transfers are under way."""
        during: list[float] = []
        for _ in range(_CELL_TRANSFERS):
            self.idle += [self.live.round_trip() for _ in range(_IDLE_TRIPS)]
            with ThreadPoolExecutor(1) as pool:
                transferred = pool.submit(transfer)
                time.sleep(_STARTING)
                while not transferred.done():
                    during.append(self.live.round_trip())
                transferred.result()
        return during


_MS, _MB = 1e3, 1e-6

ROWS = (
    Row("download", "download by CONNECT", "MB/s", Bench.download, OPAQUE, _MB),
    Row("download_name", "download by name, no proxy set", "MB/s", Bench.download, BY_NAME, _MB),
    Row("download_http", "download of plain HTTP", "MB/s", Bench.download, HTTP, _MB),
    Row("download_tls", "download inside TLS that is read", "MB/s", Bench.download, TLS, _MB),
    Row("upload", "upload by CONNECT", "MB/s", Bench.upload, OPAQUE, _MB),
    Row("upload_http", "upload as plain HTTP", "MB/s", Bench.upload, HTTP, _MB),
    Row("upload_tls", "upload inside TLS that is read", "MB/s", Bench.upload, TLS, _MB),
    Row("small_at_once", "200 small requests at once, CONNECT", "s", Bench.small_at_once, OPAQUE),
    Row("large_at_once", "200 large ones at once, CONNECT", "s", Bench.large_at_once, OPAQUE),
    Row("memory", "memory of the process for 200 open", "MB", Bench.memory, OPAQUE, _MB),
    Row("new", "small request, new connection: CONNECT", "ms", Bench.new, OPAQUE, _MS),
    Row("new_name", "... by name", "ms", Bench.new, BY_NAME, _MS),
    Row("new_http", "... plain HTTP", "ms", Bench.new, HTTP, _MS),
    Row("new_tls", "... inside TLS that is read", "ms", Bench.new, TLS, _MS),
    Row("kept", "... connection kept: CONNECT", "ms", Bench.kept, OPAQUE, _MS),
    Row("kept_http", "... plain HTTP", "ms", Bench.kept, HTTP, _MS),
    Row("kept_tls", "... inside TLS that is read", "ms", Bench.kept, TLS, _MS),
    Row("cell_slow", "cell during a download, 100 MB/s", "ms", Bench.cell_slow, OPAQUE, _MS),
    Row("cell_download", "... as fast as it goes", "ms", Bench.cell_download, OPAQUE, _MS),
    Row("cell_upload", "cell during an upload", "ms", Bench.cell_upload, OPAQUE, _MS),
)
