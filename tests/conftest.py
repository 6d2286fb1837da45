"""For all tests: coroutine tests, signals, and the options of the conformance suite."""

from __future__ import annotations

import contextlib
import inspect
import json
from typing import Any

import pytest

from sandbox_kernel.sandboxes.local.handle import LocalHandle
from tests.helpers.coroutines import RunCoroutine, on_own_loop
from tests.helpers.own_folders import keep_no_spares
from tests.helpers.signals import heed_signals

MARGIN = 10.0
"""Seconds by which a coroutine test fails before pytest-timeout ends the whole process."""


def pytest_configure() -> None:
    """Also runs in each worker of pytest-xdist."""
    heed_signals()
    keep_no_spares()
    _never_hurry_hypothesis()


def _never_hurry_hypothesis() -> None:
    """A busy machine is no failure. (Some environments do without hypothesis.)"""
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        unhurried = [HealthCheck.too_slow]
        settings.register_profile(
            "unhurried", settings(), deadline=None, suppress_health_check=unhurried
        )
        settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--backend", action="append", help="test this backend; may be repeated")
    group.addoption("--backend-spec", type=json.loads, help="spec fields for it, as JSON")


@pytest.fixture
def over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire carries the clients of a local jail, too, as it does elsewhere."""
    monkeypatch.setattr(LocalHandle, "takes_connections", False)


# --- tests that are coroutines


@pytest.fixture(scope="session")
def run_coroutine() -> RunCoroutine:
    """How coroutine tests run. A folder can have another way: see tests/helpers/coroutines.py."""
    return on_own_loop


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.fixturenames.append("run_coroutine")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures: dict[str, Any] = pyfuncitem.funcargs
    run: RunCoroutine = fixtures["run_coroutine"]
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: fixtures[name] for name in names}), limit(pyfuncitem))
    return True


def limit(item: pytest.Item) -> float:
    """Seconds that a test may take: its own ``timeout`` marker, or the suite's."""
    marker = item.get_closest_marker("timeout")
    suite = item.config.getoption("timeout") or item.config.getini("timeout")
    seconds = marker.args[0] if marker else suite
    return max(1.0, float(seconds) - MARGIN)
