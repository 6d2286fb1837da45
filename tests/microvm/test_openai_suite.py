"""The OpenAI Agents SDK's own tests, with our client and a microVM for each session."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.agents.openai_suite.__main__ import LIMIT, MORE, run


@pytest.mark.slow
@pytest.mark.timeout(LIMIT * MORE + 60)
def test_the_sdks_tests_pass_in_boxes(pytestconfig: pytest.Config) -> None:
    """All that apply. Their limits of time are those of a slow machine."""
    settings = json.dumps(pytestconfig.getoption("--backend-spec", None) or {})
    code, output = run("boxlite", ["--durations=10"], output=subprocess.PIPE, settings=settings)
    print(output[-3000:])
    assert code == 0, output[-20_000:]
