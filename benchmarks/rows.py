"""Rows: the figures, and how a round's samples become one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Reduce = Callable[[Sequence[float]], float]


def percentile_99(samples: Sequence[float]) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * 0.99))]


@dataclass(frozen=True)
class Row:
    """One figure. ``task`` (a method of ``worker.Tasks``) yields its samples, in base units."""

    name: str
    about: str
    unit: str
    task: str
    sample: str = ""
    """Name of the task's samples; the row's own name by default."""
    scale: float = 1.0
    """Factor from base units (seconds, bytes) to ``unit``."""
    reduce: Reduce = statistics.median
    higher_is_better: bool = False

    @property
    def key(self) -> str:
        return self.sample or self.name


_MS = 1e3
_MB = 1e-6

ROWS = {
    row.name: row
    for row in (
        Row("start", "start to first result, cold", "s", "start"),
        Row("restart", "restart to first result", "s", "restart"),
        Row("stop", "stop", "s", "stop"),
        Row("rtt_p50", "execute round trip, p50", "ms", "round_trips", "rtt", _MS),
        Row("rtt_p99", "execute round trip, p99", "ms", "round_trips", "rtt", _MS, percentile_99),
        Row("link", "round trip of the bare link", "ms", "bare_link", scale=_MS),
        Row(
            "throughput",
            "one large output",
            "MB/s",
            "large_output",
            scale=_MB,
            higher_is_better=True,
        ),
        Row("prints", "many prints", "s", "prints"),
        Row("interrupt", "interrupt", "ms", "interrupt", scale=_MS),
        Row(
            "interrupt_flood",
            "interrupt while output floods",
            "ms",
            "interrupt_flood",
            scale=_MS,
        ),
        Row(
            "tunnel_cpu_rtt",
            "tunnel CPU, each round trip",
            "ms",
            "round_trips",
            scale=_MS,
            reduce=statistics.fmean,
        ),
        Row("tunnel_cpu_mb", "tunnel CPU, each MB", "ms", "large_output", scale=_MS / 1e-6),
        Row(
            "host_cpu_rtt",
            "host process CPU, each round trip",
            "ms",
            "round_trips",
            scale=_MS,
            reduce=statistics.fmean,
        ),
        Row("host_cpu_mb", "host process CPU, each MB", "ms", "large_output", scale=_MS / 1e-6),
        Row("memory_host", "memory a kernel: host process", "MB", "memory", scale=_MB),
        Row("memory_all", "memory a kernel: its processes", "MB", "memory", scale=_MB),
        Row("memory_kernel", "... the kernel itself", "MB", "memory", scale=_MB),
        Row("memory_warm", "... the warm interpreter", "MB", "memory", scale=_MB),
        Row("memory_agent", "... the agent", "MB", "memory", scale=_MB),
        Row("memory_connector", "... the connector", "MB", "memory", scale=_MB),
        Row("memory_init", "... the jail's init and monitor", "MB", "memory", scale=_MB),
    )
}
