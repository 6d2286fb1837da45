"""Columns: the ways to run a kernel that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

LINK_ROUND_TRIP = 0.050
"""Seconds that the delayed links add to a round trip: half of it each way."""
NARROW_BANDWIDTH = 10e6
"""Bytes a second that the narrow link carries each way."""

LIFE = ("start", "restart", "stop")
WORK = (
    *("bare_link", "round_trips", "busy_round_trips", "large_output", "prints"),
    *("interrupt", "interrupt_flood"),
)
LAST = ("notebook", "memory")
"""Tasks with kernels of their own."""
HOSTED = (*LIFE, "round_trips", "large_output", "prints", "interrupt")


@dataclass(frozen=True)
class Link:
    """The emulated link between host and sandbox."""

    round_trip: float = 0.0
    """Seconds, both ways together."""
    bandwidth: float | None = None
    """Bytes a second each way; None: unlimited."""
    byte_exact: bool = True
    """False: a text stream, for which the tunnel uses its base64 codec."""


@dataclass(frozen=True)
class Service:
    """A hosted service, emulated on this machine while the column is measured."""

    backend: str
    """Name of the backend, and of its emulator in tests/emulators."""
    round_trip: float = 0.0
    """Seconds that the connection to it adds to a round trip."""


@dataclass(frozen=True)
class Column:
    """One way to run a kernel."""

    name: str
    about: str
    kernel: str
    """Name of the kernelspec."""
    link: Link | None = None
    """None: the kernel's own link."""
    service: Service | None = None
    """The service that runs the sandboxes; None: this machine."""
    transport: str = "tcp"
    """The KernelManager's transport. (The sandbox's provisioner turns ``tcp`` into IPC.)"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Settings for the process that starts the kernels."""
    tasks: tuple[str, ...] = (*LIFE, *WORK, *LAST)
    """The tasks that are measured."""
    checkout: Path | None = None
    """Another checkout of the project, whose package is measured instead of the installed one."""


COLUMNS = {
    column.name: column
    for column in (
        Column("local", "plain ipykernel on this machine", "python3"),
        Column("local-ipc", "the same over Unix sockets", "python3", transport="ipc"),
        Column("sandbox", "local jail, a byte-exact stream", "sandbox"),
        Column(
            "pool",
            "local jail, taken from a pool",
            "sandbox",
            environment={"SANDBOX_KERNEL_POOL_SIZE": "1"},
            tasks=("start", "stop"),
        ),
        Column(
            "egress",
            "local jail, with a rule for one host",
            "sandbox",
            environment={"SANDBOX_KERNEL_EGRESS": "bench.test"},
        ),
        Column(
            "egress-pip",
            "local jail, with the package index of this machine's pip",
            "sandbox",
            environment={"SANDBOX_KERNEL_EGRESS": "@pip"},
        ),
        Column(
            "egress-pool",
            "local jail with a rule for one host, taken from a pool",
            "sandbox",
            environment={"SANDBOX_KERNEL_POOL_SIZE": "1", "SANDBOX_KERNEL_EGRESS": "bench.test"},
            tasks=("start", "stop"),
        ),
        Column("base64", "local jail, a text stream", "sandbox", Link(byte_exact=False)),
        Column(
            "delayed",
            f"local jail, {LINK_ROUND_TRIP * 1e3:g} ms round trip",
            "sandbox",
            Link(LINK_ROUND_TRIP),
            tasks=(*LIFE, *WORK),
        ),
        Column(
            "narrow",
            f"the same, at most {NARROW_BANDWIDTH / 1e6:g} MB/s",
            "sandbox",
            Link(LINK_ROUND_TRIP, NARROW_BANDWIDTH),
            tasks=(*LIFE, *WORK),
        ),
        *(
            Column(
                f"{backend}{suffix}",
                f"{backend}, emulated on this machine{about}",
                "sandbox",
                service=Service(backend, delay),
                tasks=HOSTED,
            )
            for backend in ("superserve", "islo")
            for suffix, about, delay in (
                ("", "", 0.0),
                ("-30ms", ", 30 ms round trip", 0.030),
            )
        ),
    )
}
DEFAULT_COLUMNS = (
    *("local", "sandbox", "pool", "base64", "delayed", "narrow"),
    *("superserve", "superserve-30ms", "islo", "islo-30ms"),
)


def before_columns(columns: Sequence[Column], checkout: Path) -> list[Column]:
    """Add a second column after each sandbox column, with the package of another checkout."""
    found = []
    for column in columns:
        found.append(column)
        if not column.name.startswith("local"):
            name, about = f"{column.name}-before", f"the same from {checkout}"
            found.append(replace(column, name=name, about=about, checkout=checkout))
    return found
