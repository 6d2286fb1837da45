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
    scale: float = 1.0
    """Factor from base units (seconds, bytes) to ``unit``."""
    reduce: Reduce = statistics.median
    sample: str = ""
    """Name of the task's samples; the row's own name by default."""

    @property
    def key(self) -> str:
        return self.sample or self.name


_MS = 1e3
_MB = 1e-6
_MEAN = statistics.fmean

ROWS = {
    row.name: row
    for row in (
        Row("start", "start to first result, cold", "s", "start"),
        Row("restart", "restart to first result, after 3 s idle", "s", "restart"),
        Row("restart_again", "restart to first result, at once", "s", "restart"),
        Row("stop", "stop", "s", "stop"),
        Row("rtt_p50", "execute round trip, p50", "ms", "round_trips", _MS, sample="rtt"),
        Row("rtt_p99", "execute round trip, p99", "ms", "round_trips", _MS, percentile_99, "rtt"),
        Row("rtt_busy", "... while the host process computes", "ms", "busy_round_trips", _MS),
        Row("nbclient", "cell of a notebook, through nbclient", "ms", "notebook", _MS),
        Row("nbclient_all", "... a notebook of 100 cells, kernel included", "s", "notebook"),
        Row("link", "round trip of the bare link", "ms", "bare_link", _MS),
        Row("throughput", "one large output", "MB/s", "large_output", _MB),
        Row("prints", "many prints", "s", "prints"),
        Row("interrupt", "interrupt", "ms", "interrupt", _MS),
        Row("interrupt_flood", "interrupt while output floods", "ms", "interrupt_flood", _MS),
        Row("tunnel_cpu_rtt", "tunnel CPU, each round trip", "ms", "round_trips", _MS, _MEAN),
        Row("tunnel_cpu_mb", "tunnel CPU, each MB", "ms", "large_output", _MS / _MB),
        Row("host_cpu_rtt", "host process CPU, each round trip", "ms", "round_trips", _MS, _MEAN),
        Row("host_cpu_mb", "host process CPU, each MB", "ms", "large_output", _MS / _MB),
        Row("memory_host", "memory a kernel: host process", "MB", "memory", _MB),
        Row("memory_all", "memory a kernel: its processes", "MB", "memory", _MB),
        Row("memory_kernel", "... the kernel itself", "MB", "memory", _MB),
        Row("memory_warm", "... the warm interpreter", "MB", "memory", _MB),
        Row("memory_spare", "... the spare", "MB", "memory", _MB),
        Row("memory_agent", "... the agent", "MB", "memory", _MB),
        Row("memory_connector", "... the connector", "MB", "memory", _MB),
        Row("memory_init", "... the jail's init and monitor", "MB", "memory", _MB),
        Row("rested_all", "idle for a minute: its processes", "MB", "memory", _MB),
        Row("rested_kernel", "... the kernel itself", "MB", "memory", _MB),
        Row("rested_spare", "... the spare", "MB", "memory", _MB),
    )
}
