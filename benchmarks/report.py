"""Results as aligned tables, and as JSON for programs."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.columns import Column
from benchmarks.compare import Results
from benchmarks.scale import Point, bend
from benchmarks.worker import Sizes

ROUND_TRIP_FACTOR = 1.10
NOTHING = "-"
PACKAGES = ("sandbox-kernel", "ipykernel", "jupyter_client", "pyzmq", "tornado")


@dataclass(frozen=True)
class Check:
    """A rule and its figures. ``ok`` is None if the rule has no limit."""

    rule: str
    figures: str
    ok: bool | None

    def __str__(self) -> str:
        verdict = {True: "holds", False: "FAILS", None: "figure"}[self.ok]
        return f"{verdict:<7} {self.rule}: {self.figures}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def figure(value: float | None) -> str:
    """Three significant digits, never in scientific notation."""
    if value is None:
        return NOTHING
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def machine_facts() -> dict[str, object]:
    """The machine, as plain JSON types. Call it before measuring: it includes the load average."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**6,
        "cpu": _cpu_model(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
        "packages": {name: version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine_line(facts: Mapping[str, Any]) -> str:
    load = ", ".join(f"{value:.2f}" for value in facts["load_average"])
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return (
        f"{facts['date']}: {facts['cores']} cores ({facts['cpu']}), {facts['memory_mb']} MB, "
        f"{facts['kernel']}, Python {facts['python']}\n"
        f"{packages}\nload average at the start: {load}"
    )


# --- the comparison


def comparison_table(results: Results) -> str:
    """Figures with their ratios to the first column."""
    base, *others = [column.name for column in results.columns]
    lines = [["", "unit", base, *(cell for name in others for cell in (name, ""))]]
    for row in results.rows:
        cells = [row.about, row.unit, figure(results.value(base, row.name))]
        for name in others:
            cells += [
                figure(results.value(name, row.name)),
                ratio(results.ratio(name, row.name)),
            ]
        if any(cell not in (NOTHING, "") for cell in cells[2:]):
            lines.append(cells)
    return table(lines)


def checks(results: Results) -> Iterator[Check]:
    """The checks for slow links."""
    local = results.value(results.columns[0].name, "rtt_p50")
    for column in results.columns:
        link = column.link
        trip = results.value(column.name, "rtt_p50")
        if link and link.round_trip and trip is not None and local is not None:
            delay = link.round_trip * 1e3
            limit = delay + ROUND_TRIP_FACTOR * local
            bare = results.value(column.name, "link")
            yield Check(
                f"{column.name}: round trip <= link + {ROUND_TRIP_FACTOR:g} x local",
                f"{trip:.1f} ms, limit {delay:g} + {ROUND_TRIP_FACTOR:g} x {local:.1f} "
                f"= {limit:.1f} ms" + (f" (the bare link took {bare:.1f} ms)" if bare else ""),
                trip <= limit,
            )
        rate = results.value(column.name, "throughput")
        if link and rate is not None:
            yield _throughput_check(results, column, rate)


def _throughput_check(results: Results, column: Column, rate: float) -> Check:
    assert column.link is not None
    if column.link.bandwidth:
        limit = column.link.bandwidth / 1e6
        return Check(
            f"{column.name}: large output against the link's bandwidth",
            f"{rate:.1f} of {limit:g} MB/s, {rate / limit:.0%}",
            None,
        )
    unshaped = results.value("sandbox", "throughput")
    share = f", {rate / unshaped:.0%} of what the sandbox does without it" if unshaped else ""
    return Check(
        f"{column.name}: large output, no bandwidth limit", f"{rate:.1f} MB/s{share}", None
    )


def comparison_json(
    results: Results, facts: Mapping[str, object], sizes: Sizes, rounds: int
) -> dict[str, Any]:
    return {
        "benchmark": "compare",
        "machine": dict(facts),
        "sizes": asdict(sizes),
        "rounds_asked": rounds,
        "base": results.columns[0].name,
        "columns": {
            column.name: {
                "about": column.about,
                "kernel": column.kernel,
                "link": asdict(column.link) if column.link else None,
                "rows": {
                    row.name: {
                        "unit": row.unit,
                        "median": results.value(column.name, row.name),
                        "ratio": results.ratio(column.name, row.name),
                        "rounds": results.rounds.get(column.name, {}).get(row.name, []),
                    }
                    for row in results.rows
                },
            }
            for column in results.columns
        },
        "checks": [asdict(check) for check in checks(results)],
        "problems": results.problems,
    }


# --- the curve

Curves = Mapping[str, Sequence[Point]]
"""Column -> its points, fewest kernels first. The first column is the base."""


def curve_table(curves: Curves) -> str:
    base, *others = curves
    lines = [["kernels", f"{base}/s", "p50 ms", "p99 ms"]]
    for name in others:
        lines[0] += [f"{name}/s", "", "p50 ms", "p99 ms", "tunnel"]
    for index, point in enumerate(curves[base]):
        cells = [str(point.kernels), *_point_cells(point)]
        for name in others:
            other = curves[name][index] if index < len(curves[name]) else None
            if other is None:
                cells += [NOTHING, "", NOTHING, NOTHING, NOTHING]
                continue
            rate, p50, p99 = _point_cells(other)
            share = NOTHING if other.tunnel_share is None else f"{other.tunnel_share:.0%}"
            cells += [rate, ratio(other.per_second / point.per_second), p50, p99, share]
        lines.append(cells)
    return table(lines)


def _point_cells(point: Point) -> list[str]:
    return [figure(point.per_second), figure(point.p50 * 1e3), figure(point.p99 * 1e3)]


def bends(curves: Curves) -> Iterator[str]:
    """One line for each curve, which says where it bends."""
    for name, points in curves.items():
        if len(points) > 1:
            at = bend(points)
            yield (
                f"{name}: bends at {at}; more kernels bring hardly more round trips a second"
                if at
                else f"{name}: no bend up to {points[-1].kernels} kernels"
            )


def curve_json(
    curves: Curves, facts: Mapping[str, object], problems: Sequence[str]
) -> dict[str, Any]:
    return {
        "benchmark": "scale",
        "machine": dict(facts),
        "columns": {name: [asdict(p) for p in points] for name, points in curves.items()},
        "bends": list(bends(curves)),
        "problems": list(problems),
    }
