"""Options of the conformance suite, which the tests of microVMs have, too."""

from __future__ import annotations

import json

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--backend", action="append", help="test this backend; may be repeated")
    group.addoption("--backend-spec", type=json.loads, help="spec fields for it, as JSON")
