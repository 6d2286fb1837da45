"""The hosted backends: what the tests that they share must know about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.sandboxes.islo import IsloClient
from sandbox_kernel.sandboxes.superserve import SuperserveClient

from ..emulators.running import Running
from ..islo import sandboxes as islo
from ..superserve import sandboxes as superserve


@dataclass(frozen=True)
class Hosted:
    """One of them."""

    name: str
    """Of the backend, of its extra, of its SDK's module, and of the emulator of its service."""
    client: Callable[[], SandboxClient]
    key: str
    """The variable with the API key, ..."""
    without_key: str
    """... and what is said to somebody who has not set it."""
    addresses: tuple[str, ...]
    """The variables with the addresses of the service."""
    sandboxes: Callable[[Running], list[dict[str, Any]]]
    """All sandboxes that there are, as the service knows them."""
    all: Callable[[Running], list[dict[str, Any]]]
    """These, and whatever else is made for them at the service."""
    settings: Callable[..., None]
    """Changes settings of the emulator, given by name."""
    allowed: tuple[str, ...]
    """Rules that allow data.example at 192.0.2.1, and that the service's own rules hold."""
    tidy: Callable[[Running], None]
    """After a test: the emulator has its usual settings again, and no sandboxes."""


SUPERSERVE = Hosted(
    "superserve",
    SuperserveClient,
    key="SUPERSERVE_API_KEY",
    without_key="export SUPERSERVE_API_KEY=",
    addresses=("SUPERSERVE_BASE_URL",),
    sandboxes=superserve.at_the_service,
    all=superserve.at_the_service,
    settings=superserve.settings,
    allowed=("192.0.2.1",),
    tidy=superserve.tidy,
)
ISLO = Hosted(
    "islo",
    IsloClient,
    key="ISLO_API_KEY",
    without_key="set ISLO_API_KEY",
    addresses=("ISLO_BASE_URL", "ISLO_COMPUTE_URL"),
    sandboxes=lambda emulator: islo.account(emulator)["sandboxes"],
    all=lambda emulator: [
        *islo.account(emulator)["sandboxes"],
        *islo.account(emulator)["profiles"],
    ],
    settings=islo.settings,
    allowed=("data.example",),
    tidy=islo.tidy,
)
