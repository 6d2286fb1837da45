"""Kernels that save their files when they end, and a store that takes none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jupyter_client import KernelManager

from tests.kernels.live import PATIENCE, run_cell


class Manager(KernelManager):
    """Keeps what its kernel's first cell has printed."""

    printed: str


@contextlib.contextmanager
def kernel(code: str = "") -> Iterator[Manager]:
    """A kernel that has run some code; whoever asks for it shuts it down."""
    manager = Manager(kernel_name="sandbox")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        ran = run_cell(client, code)
        assert ran.reply["status"] == "ok", ran
        manager.printed = ran.text()
        yield manager
    finally:
        client.stop_channels()


def run_kernel(code: str) -> str:
    with kernel(code) as manager:
        manager.shutdown_kernel()
        return manager.printed


def break_store(store: Path) -> None:
    """No file can be written any more, whoever tries, as on a disk that is full."""
    (store / "tmp").rename(store / "away")
    (store / "tmp").write_text("")


def mend_store(store: Path) -> None:
    (store / "tmp").unlink()
    (store / "away").rename(store / "tmp")
