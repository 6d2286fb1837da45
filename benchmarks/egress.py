"""What a way out of a sandbox costs: ``python -m benchmarks egress``.

A real jail with rules for egress, and a web server on this machine that stands for a named host.
curl does the same requests in the jail, through the gateway, and on the host, through other
proxies (``proxies``) and through none. All columns take turns; a cell's round trips during a
transfer are compared with those of the same kernel right before and after it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import proxies
from benchmarks.columns import COLUMNS
from benchmarks.compare import Results
from benchmarks.livekernel import LiveKernel
from benchmarks.report import NOTHING, Check, figure, ratio
from benchmarks.resources import pss
from benchmarks.worker import Sizes
from sandbox_kernel.gateway import addresses
from sandbox_kernel.gateway.names import Address
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.sandboxes.egress_environment import PROXY_PORT
from sandbox_kernel.tunnel import background

HOST = "bench.test"
LIMIT = 300.0
AT_ONCE = 200
REQUESTS = 60
_IDLE_TRIPS = 40
_CELL_TRANSFERS = 2
CELL_SIZE = 400_000_000
_STARTING = 0.1
"""Seconds until bytes flow."""
UPLOAD = "upload.bin"
"""A file in each column's folder."""
SPEED = 100_000_000
"""Bytes a second of a transfer over a fast connection to the Internet (1 Gbit/s)."""

LEAST_SPEED, MOST_ROUND_TRIP, MOST_UNUSED = 0.7, 1.3, 1.05

UNUSED_COLUMNS = ("sandbox", "egress", "egress-pip", "pool", "egress-pool")
UNUSED_ROWS = ("start", "stop", "rtt_p50", "rtt_p99")
UNUSED_SIZES = Sizes(round_trips=200, batches=4)

Progress = Callable[[str], object]
Run = Callable[[Sequence[str]], str]
"""Runs a command to its end, and gives its output."""


@dataclass(frozen=True)
class Column:
    """A way to the server."""

    name: str
    run: Run
    proxy: str
    """The proxy's URL; empty: none."""
    opaque_host: str
    host: str
    """The server's names, in connections that nobody reads and in those that may be read."""
    pid: int | str | None
    """The proxy's process, if its memory is measured."""
    transparent: bool = False
    """Programs reach hosts by name, too."""


# What connects curl to a column's proxy, and which name it asks for.
OPAQUE, READ, BY_NAME = "opaque", "read", "by name"


@dataclass(frozen=True)
class Row:
    name: str
    about: str
    unit: str
    measure: Callable[[Bench, Column, str], list[float]]
    """Gives samples in base units."""
    way: str = READ
    scale: float = 1.0


@dataclass
class Bench:
    """What the rows need."""

    port: int
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
        host = column.opaque_host if way == OPAQUE else column.host
        command.append(f"http://{host}:{self.port}/{path}")
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
    Row("download", "200 MB, CONNECT", "MB/s", Bench.download, OPAQUE, _MB),
    Row("download_name", "... by name, without a proxy", "MB/s", Bench.download, BY_NAME, _MB),
    Row("download_http", "... plain HTTP", "MB/s", Bench.download, READ, _MB),
    Row("upload", "200 MB sent, CONNECT", "MB/s", Bench.upload, OPAQUE, _MB),
    Row("upload_http", "... plain HTTP", "MB/s", Bench.upload, READ, _MB),
    Row("small_at_once", "200 small requests at once, CONNECT", "s", Bench.small_at_once, OPAQUE),
    Row("large_at_once", "200 times 1 MB at once, CONNECT", "s", Bench.large_at_once, OPAQUE),
    Row("memory", "... growth of the host process, at 200 open", "MB", Bench.memory, OPAQUE, _MB),
    Row("new", "small request, new connection, CONNECT", "ms", Bench.new, OPAQUE, _MS),
    Row("new_name", "... by name", "ms", Bench.new, BY_NAME, _MS),
    Row("new_http", "... plain HTTP", "ms", Bench.new, READ, _MS),
    Row("kept_http", "... plain HTTP, connection kept", "ms", Bench.kept, READ, _MS),
    Row(
        "cell_slow",
        "cell during a download at 100 MB/s",
        "ms",
        Bench.cell_slow,
        OPAQUE,
        _MS,
    ),
    Row(
        "cell_download", "cell during a download, no limit", "ms", Bench.cell_download, OPAQUE, _MS
    ),
    Row("cell_upload", "cell during an upload, no limit", "ms", Bench.cell_upload, OPAQUE, _MS),
)


@dataclass
class Figures:
    """What was measured, in units of the rows."""

    columns: list[str] = field(default_factory=list)
    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Row -> column -> a median for each round."""
    cells: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Row -> column -> for each round, a cell's round trip as a share of that without transfer."""
    problems: list[str] = field(default_factory=list)

    def value(self, row: str, column: str) -> float | None:
        return _median(self.rounds, row, column)

    def cell_ratio(self, row: str, column: str) -> float | None:
        return _median(self.cells, row, column)

    def speed_ratio(self, row: Row, column: str) -> float | None:
        """How fast the first column is as a share of this one: more is better."""
        first, other = self.value(row.name, self.columns[0]), self.value(row.name, column)
        if not first or not other:
            return None
        return first / other if row.unit == "MB/s" else other / first


def _median(found: Mapping[str, Mapping[str, list[float]]], row: str, column: str) -> float | None:
    values = found.get(row, {}).get(column)
    return statistics.median(values) if values else None


def measure(figures: Figures, folder: Path, size: int, rounds: int, progress: Progress) -> None:
    """Measure all rows in rounds, in which the columns take turns. An interrupt keeps what was
    measured so far."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(origin())
        stack.enter_context(standing_for_names())
        progress("a sandbox with rules for egress")
        live = stack.enter_context(kernel_with_egress(f"{HOST}:{port}"))
        bench = Bench(port, size, live)
        columns = [_sandbox_column(live, size)]
        for name, start in (("mitmproxy", proxies.mitmproxy), ("tinyproxy", proxies.tinyproxy)):
            try:
                proxy = stack.enter_context(start(folder))
            except proxies.NotInstalled as error:
                figures.problems.append(str(error))
                progress(str(error))
                continue
            columns.append(_host_column(name, folder, proxy))
        columns.append(_host_column("no proxy", folder, None))
        with (folder / UPLOAD).open("wb") as file:
            file.truncate(size)
        figures.columns = [column.name for column in columns]
        for column in columns:  # caches are warm, and what does not work fails now
            bench.download(column, OPAQUE)
        bench.memory_before = {c.name: pss(c.pid) for c in columns if c.pid is not None}
        for number in range(rounds):
            for row in ROWS:
                progress(f"round {number + 1} of {rounds}: {row.about}")
                for column in random.sample(columns, len(columns)):
                    _take(figures, bench, row, column)


def _take(figures: Figures, bench: Bench, row: Row, column: Column) -> None:
    if row.way == BY_NAME and not column.transparent:
        return
    bench.idle.clear()
    try:
        samples = row.measure(bench, column, row.way)
    except Exception as error:  # noqa: BLE001  (the other figures are worth having)
        figures.problems.append(f"{column.name}, {row.about}: {error}")
        return
    if samples:
        value = statistics.median(samples)
        of_row = figures.rounds.setdefault(row.name, {})
        of_row.setdefault(column.name, []).append(value * row.scale)
        if bench.idle:
            of_cells = figures.cells.setdefault(row.name, {})
            of_cells.setdefault(column.name, []).append(value / statistics.median(bench.idle))


# --- what is measured


@contextlib.contextmanager
def origin() -> Iterator[int]:
    """The web server; its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.origin"],
        cwd=Path(__file__).resolve().parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


@contextlib.contextmanager
def standing_for_names() -> Iterator[None]:
    """Names that end with .test are this machine's, for gateways of this process."""
    may_dial = addresses.may_dial

    async def resolve(name: str, port: int) -> Sequence[Address]:
        return [ipaddress.ip_address("127.0.0.1")]

    def may(
        address: Address, target: Any, rule: Any, names: Collection[str], is_own: Any
    ) -> str | None:
        if target.host.endswith(".test"):
            return None
        return may_dial(address, target, rule, names, is_own)

    with (
        mock.patch.object(addresses, "resolve_with_system", resolve),
        mock.patch.object(addresses, "may_dial", may),
    ):
        yield


@contextlib.contextmanager
def kernel_with_egress(rules: str) -> Iterator[LiveKernel]:
    with mock.patch.dict(os.environ, SANDBOX_KERNEL_EGRESS=rules):
        live, _ = LiveKernel.start(COLUMNS["sandbox"])
    try:
        yield live
    finally:
        live.discard()


def _sandbox_column(live: LiveKernel, size: int) -> Column:
    found = live.manager.provisioner.kernel  # type: ignore[union-attr]
    assert isinstance(found, SandboxedKernel)
    handle = found.handle

    def run(command: Sequence[str]) -> str:
        name, *arguments = command
        result = background.submit(handle.exec(name, arguments, timeout=LIMIT)).result(LIMIT + 5)
        if not result.ok:
            raise RuntimeError(result.output.strip())
        return result.output

    run(["truncate", "-s", str(size), UPLOAD])
    proxy = f"http://127.0.0.1:{PROXY_PORT}"
    return Column("sandbox", run, proxy, HOST, HOST, "self", transparent=True)


def _host_column(name: str, folder: Path, proxy: proxies.Proxy | None) -> Column:
    def run(command: Sequence[str]) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return done.stdout

    url, pid = (proxy.url, proxy.pid) if proxy else ("", None)
    return Column(name, run, url, proxies.OPAQUE_HOST, proxies.READ_HOST, pid)


# --- what is shown


def lines(figures: Figures) -> list[list[str]]:
    """The table, its heading first. Behind a figure of another column is the sandbox's speed as a
    share of it; behind a cell's round trip, its ratio to one without a transfer."""
    first, *others = figures.columns
    found = [["", "unit", first, "", *(cell for name in others for cell in (name, ""))]]
    for row in ROWS:
        cells = [row.about, row.unit]
        for name in figures.columns:
            cells.append(figure(figures.value(row.name, name)))
            if row.name in figures.cells:
                cells.append(ratio(figures.cell_ratio(row.name, name)))
            elif name == first or row.name == "memory":
                cells.append("")
            else:
                cells.append(ratio(figures.speed_ratio(row, name)))
        if any(cell not in (NOTHING, "") for cell in cells[2:]):
            found.append(cells)
    return found


def checks(figures: Figures) -> Iterator[Check]:
    if not figures.columns:
        return
    first = figures.columns[0]
    by_name = {row.name: row for row in ROWS}
    for name in ("download", "download_http"):
        row = by_name[name]
        shown = [
            (other, found)
            for other in figures.columns[1:-1]
            if (found := figures.speed_ratio(row, other)) is not None
        ]
        for other, found in shown:
            rule = f"{row.about}: >= {LEAST_SPEED} of {other}"
            yield Check(rule, f"{found:.2f}", found >= LEAST_SPEED)
    for row in ROWS:
        found = figures.cell_ratio(row.name, first)
        if found is not None:
            rule = f"{row.about} <= {MOST_ROUND_TRIP} x idle"
            yield Check(rule, f"{found:.2f} x", found <= MOST_ROUND_TRIP)


def unused_checks(results: Results) -> Iterator[Check]:
    """A kernel with rules that makes no request is as fast as one without."""
    for column, base in (("egress", "sandbox"), ("egress-pool", "pool")):
        for row in results.rows:
            value, other = results.value(column, row.name), results.value(base, row.name)
            if value is not None and other and row.name != "stop":
                found = value / other
                ok = found <= MOST_UNUSED if row.name != "rtt_p99" else None
                rule = f"{row.about}, {column} <= {MOST_UNUSED} x {base}"
                yield Check(rule, f"{found:.2f} x", ok)
