"""Options of the conformance suite, which the tests of microVMs have, too; signals as they are."""

from __future__ import annotations

import json
import signal

import pytest


def pytest_configure() -> None:
    """Tests send signals to what they start, which would ignore them for ever if the suite was
    started by nohup or as a background job of a script. Runs in each worker, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--backend", action="append", help="test this backend; may be repeated")
    group.addoption("--backend-spec", type=json.loads, help="spec fields for it, as JSON")
