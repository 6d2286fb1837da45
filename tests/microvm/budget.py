"""A pytest plugin for the rig: begins no test after a time, and says how many were left out.

``make test`` must end in time on any machine; ``make test-microvm`` runs everything. Failures are
shown at once, because the rest may take an hour.
"""

from __future__ import annotations

import os
import time

import pytest

SECONDS = float(os.environ.get("SANDBOX_KERNEL_RIG_SECONDS") or "inf")
_started = time.monotonic()
_left_out: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _started > SECONDS:
        _left_out.append(item.nodeid)
        pytest.skip(f"the {SECONDS:g} s of the quick run are over; make test-microvm runs it")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.longreprtext}\n{report.capstdout}{report.capstderr}{report.caplog}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.section("LEFT OUT FOR WANT OF TIME", "!")
        terminalreporter.line(f"{len(_left_out)} tests, from {_left_out[0]} on")
