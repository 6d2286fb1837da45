"""Coroutines on the background loop, under a main thread that gets signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from sandbox_kernel.cli import foreground

SCRIPT = """
import asyncio
from sandbox_kernel.cli import foreground

foreground.CLEAN_UP = {limit}

async def work():
    print("ready", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        print("cleaning", flush=True)
        await asyncio.sleep({clean_up})
        print("clean", flush=True)

try:
    foreground.run(work())
except foreground.Interrupted as interrupted:
    print(interrupted.exit_code, interrupted.at_once)
"""


def started(*, clean_up: float, limit: float = 60) -> subprocess.Popen[str]:
    script = SCRIPT.format(clean_up=clean_up, limit=limit)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_the_clean_up(signum: signal.Signals) -> None:
    """A signal cancels the coroutine; the command ends when that has cleaned up."""
    process = started(clean_up=0.2)
    process.send_signal(signum)
    assert process.communicate(timeout=30)[0] == f"cleaning\nclean\n{128 + signum} False\n"


def test_a_second_signal_does_not_wait() -> None:
    """Whoever asks twice is not kept waiting."""
    process = started(clean_up=600)
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "130 True\n"


def test_clean_up_has_a_limit() -> None:
    """A clean-up that does not end is left to itself."""
    process = started(clean_up=600, limit=0.2)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "cleaning\n143 True\n"


def test_results_and_errors_come_back() -> None:
    """Without signals it is a plain call."""

    async def work(value: int) -> float:
        await asyncio.sleep(0)
        return 1 / value

    assert foreground.run(work(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        foreground.run(work(0))


def test_a_signal_may_be_taken_care_of() -> None:
    """on_signal gets the signal on the loop, and the coroutine goes on if it says so."""
    got = asyncio.Queue[int]()

    def on_signal(signum: int) -> bool:
        got.put_nowait(signum)
        return True

    async def work() -> int:
        os.kill(os.getpid(), signal.SIGWINCH)
        return await got.get()

    result = foreground.run(work(), on_signal=on_signal, also=(signal.SIGWINCH,))
    assert result == signal.SIGWINCH
    assert signal.getsignal(signal.SIGWINCH) in (signal.SIG_DFL, None)


def test_what_blocks_for_ever_does_not_keep_the_process() -> None:
    """A read that never returns is no reason not to exit."""
    script = """
import asyncio, os, threading
from sandbox_kernel.cli import foreground
from sandbox_kernel.tunnel.background import aside

begun = threading.Event()

def read():
    begun.set()
    os.read(os.pipe()[0], 1)

async def work():
    reading = asyncio.ensure_future(aside(read))
    await asyncio.to_thread(begun.wait)
    reading.cancel()

foreground.run(work())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 0
