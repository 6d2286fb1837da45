"""What a way out of a sandbox costs: ``python -m benchmarks egress``.

A real jail with rules for egress, and a web server on this machine that stands for a named host.
curl does the same requests in the jail, through the gateway, and on the host, through other
proxies (``proxies``) and through none. All columns take turns; a cell's round trips during a
transfer are compared with those of the same kernel right before and after it.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import egress_columns, proxies
from benchmarks.compare import Results
from benchmarks.egress_columns import (
    HOST,
    OPAQUE,
    READ_HOST,
    UPLOAD,
    Column,
    kernel_with_egress,
    origin,
    standing_for_names,
)
from benchmarks.egress_rows import ROWS, Bench, Row
from benchmarks.report import NOTHING, Check, figure, ratio
from benchmarks.resources import pss
from benchmarks.worker import Sizes
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.sandboxes.local.client import LocalClient
from sandbox_kernel.spec import SandboxSpec

LEAST_SPEED, MOST_ROUND_TRIP, MOST_UNUSED = 0.7, 1.3, 1.05

UNUSED_COLUMNS = ("sandbox", "egress", "egress-pip", "pool", "egress-pool")
UNUSED_ROWS = ("start", "stop", "rtt_p50", "rtt_p99")
UNUSED_SIZES = Sizes(round_trips=200, batches=4)

Progress = Callable[[str], object]


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
        tls_port = stack.enter_context(origin(*egress_columns.certificate(folder)))
        stack.enter_context(standing_for_names())
        progress("a sandbox with rules for egress")
        rules: list[dict[str, object]] = [{"host": HOST, "ports": [port]}]
        read: dict[str, object] = {"host": READ_HOST, "ports": [tls_port]}
        read["methods"] = ["GET", "POST"]
        try:
            LocalClient().check(SandboxSpec(egress=EgressPolicy.of(read)))
            rules.append(read)
        except SpecRefused as error:
            figures.problems.append(f"TLS is not read here: {error}")
        live = stack.enter_context(kernel_with_egress(rules))
        bench = Bench(port, tls_port, size, live)
        columns = [egress_columns.sandbox_column(live, size, reads_tls=len(rules) > 1)]
        for name, start in (("mitmproxy", proxies.mitmproxy), ("tinyproxy", proxies.tinyproxy)):
            try:
                proxy = stack.enter_context(start(folder))
            except proxies.NotInstalled as error:
                figures.problems.append(str(error))
                progress(str(error))
                continue
            columns.append(egress_columns.host_column(name, folder, proxy))
        columns.append(egress_columns.host_column("no proxy", folder, None))
        with (folder / UPLOAD).open("wb") as file:
            file.truncate(size)
        figures.columns = [column.name for column in columns]
        for column in columns:  # caches are warm, and what does not work fails now
            bench.download(column, OPAQUE)
        bench.memory_before = {c.name: pss(c.pid) for c in columns if c.pid is not None}
        for number in range(rounds):
            for row in ROWS:
                if row.name == "memory" and number:
                    continue  # what a process has once taken, it keeps
                progress(f"round {number + 1} of {rounds}: {row.about}")
                for column in random.sample(columns, len(columns)):
                    _take(figures, bench, row, column)


def _take(figures: Figures, bench: Bench, row: Row, column: Column) -> None:
    if row.way not in column.hosts or (row.name.startswith("cell") and column.name == "tinyproxy"):
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
    first, *others = figures.columns
    for row in ROWS:
        if row.name in ("download", "download_http", "download_tls", "upload", "upload_http"):
            for name in others[:-1]:  # the last is none
                found = figures.speed_ratio(row, name)
                if found is not None:
                    rule = f"{row.about}: at least {LEAST_SPEED} of {name}"
                    ok = found >= LEAST_SPEED if name == "mitmproxy" else None
                    yield Check(rule, f"{found:.2f}", ok)
        share = figures.cell_ratio(row.name, first)
        if share is not None:
            rule = f"{row.name}: round trip of a cell <= {MOST_ROUND_TRIP} x idle"
            ok = share <= MOST_ROUND_TRIP if row.name != "cell_upload" else None
            yield Check(rule, f"{share:.2f} x", ok)


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
