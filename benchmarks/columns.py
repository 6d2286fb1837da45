"""Columns: the ways to run a kernel that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LINK_ROUND_TRIP = 0.050
"""Seconds that the delayed links add to a round trip: half of it each way."""
NARROW_BANDWIDTH = 10e6
"""Bytes a second that the narrow link carries each way."""

LIFE = ("start", "restart", "stop")
WORK = (
    *("bare_link", "round_trips", "large_output", "prints"),
    *("interrupt", "interrupt_flood"),
)
MEMORY = ("memory",)
HOSTED = (*LIFE, "round_trips", "large_output", "prints", "interrupt")


@dataclass(frozen=True)
class Link:
    """What the link between host and sandbox is made to look like."""

    round_trip: float = 0.0
    """Seconds, both ways together."""
    bandwidth: float | None = None
    """Bytes a second each way; None: as fast as it goes."""
    byte_exact: bool = True
    """False: a stream for text only, so that the tunnel must use its base64 codec."""


@dataclass(frozen=True)
class Service:
    """A hosted service, emulated on this machine for as long as the column is measured."""

    backend: str
    """Name of the backend, and of its emulator in tests/emulators."""
    round_trip: float = 0.0
    """Seconds that the way to it adds to a round trip."""


@dataclass(frozen=True)
class Column:
    """One way to run a kernel."""

    name: str
    about: str
    kernel: str
    """Name of the kernelspec."""
    link: Link | None = None
    """None: whatever the kernel uses by itself."""
    service: Service | None = None
    """Where the sandboxes are, if not here."""
    transport: str = "tcp"
    """The KernelManager's transport. (The sandbox's provisioner makes IPC out of ``tcp``.)"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Settings for the process that starts the kernels."""
    tasks: tuple[str, ...] = (*LIFE, *WORK, *MEMORY)
    """What is worth measuring here."""


COLUMNS = {
    column.name: column
    for column in (
        Column("local", "plain ipykernel on this machine", "python3"),
        Column("local-ipc", "the same over Unix sockets", "python3", transport="ipc"),
        Column("sandbox", "local jail, bytes as they are", "sandbox"),
        Column(
            "pool",
            "local jail, taken from a pool",
            "sandbox",
            environment={"SANDBOX_KERNEL_POOL_SIZE": "1"},
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


def kernelspec_column(name: str) -> Column:
    """A column for a kernelspec that the user has named."""
    return Column(name, f"kernelspec {name}", name)
