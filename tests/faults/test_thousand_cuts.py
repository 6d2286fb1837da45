"""A thousand cuts: real traffic of four kernels at once while their links are cut all the time.

``SANDBOX_KERNEL_TEST_CUTS=10000 pytest -m faults tests/faults/test_thousand_cuts.py`` cuts more.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass

import pytest

from sandbox_kernel.tunnel.background import submit
from tests.helpers.waiting import wait_until
from tests.kernels.conftest import KernelStarter
from tests.kernels.live import Live, restart_from_spare

from .jail import agent_of, open_files, processes_of
from .shaped import Faults, Shape, install
from .traffic import Traffic, at_once

CUTS = int(os.environ.get("SANDBOX_KERNEL_TEST_CUTS", "1000"))
ROWS = {
    "socket": None,  # the local jail's own link
    "socket, too": None,
    "raw stream": Shape(),
    "base64 stream": Shape(byte_exact=False),
}
SPARES = ("socket, too", "base64 stream")
"""Rows whose kernels are spares; the others' are forks of the warm interpreter."""


@dataclass
class Row:
    """One kernel, its traffic, and who cuts its link."""

    name: str
    live: Live
    traffic: Traffic
    faults: Faults | None
    processes: int
    cuts: int = 0
    done: bool = False

    async def cut_all_the_time(self, wanted: int, seed: int) -> None:
        """Cut as soon as the link is up again, or a moment later. Runs on the background loop."""
        rng = random.Random(seed)
        tunnel = self.live.kernel.tunnel
        while self.cuts < wanted and not self.done:
            await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.08))))
            if not tunnel.connected:
                continue
            if self.faults is not None and rng.random() < 0.5:
                self.faults.cut()  # the provider's stream breaks
                await asyncio.sleep(0)
            else:
                tunnel.cut()
            self.cuts += 1
            while tunnel.connected:
                await asyncio.sleep(0.001)

    def check_nothing_piled_up(self) -> None:
        """Old connectors have ended, and the agent has closed what it had of them."""
        most = self.processes + 1  # by now a spare waits beside the kernel
        wait_until(lambda: len(processes_of(self.live)) <= most, "connectors have ended")
        streams = len(self.live.kernel.tunnel._peer.mux.streams)
        assert open_files(agent_of(self.live)) < 20 + streams
        assert len(self.live.kernel.tunnel._peer.session._replay) < 200

    def talk(self, wanted: int, seed: int) -> None:
        """Exchange messages of all kinds until the link has been cut so often."""
        cutting = submit(self.cut_all_the_time(wanted, seed))
        try:
            while not cutting.done():
                self.traffic.round()
            cutting.result()
            self.traffic.round()  # and all is well afterwards
        finally:
            self.done = True


@pytest.mark.slow
@pytest.mark.timeout(max(300, CUTS // 2))
def test_a_thousand_cuts(start_kernel: KernelStarter, summary: list[str]) -> None:
    """Not one message is lost, doubled or reordered, and no kernel or client notices."""
    rows = [_start(name, shape, start_kernel) for name, shape in ROWS.items()]
    each = -(-CUTS // len(rows))
    begun = time.monotonic()
    at_once(lambda number: rows[number].talk(each, number), len(rows))
    cuts, messages = sum(r.cuts for r in rows), sum(r.traffic.messages for r in rows)
    summary.append(
        f"{cuts} cuts under {messages} messages in {time.monotonic() - begun:.0f} s: "
        f"none lost, doubled or reordered ("
        + ", ".join(f"{r.name}: {r.cuts}/{r.traffic.messages}" for r in rows)
        + ")"
    )
    assert cuts >= CUTS
    for row in rows:
        assert row.live.kernel.tunnel.reconnects >= each
        row.check_nothing_piled_up()


def _start(name: str, shape: Shape | None, start_kernel: KernelStarter) -> Row:
    if shape is None:
        live, faults = start_kernel(), None
    else:
        with install(shape) as faults:
            live = start_kernel()
    if name in SPARES:
        restart_from_spare(live.manager, live.client)
    traffic = Traffic(live, seed=len(name))
    return Row(name, live, traffic, faults, len(processes_of(live)))
