"""The OpenAI Agents SDK's own tests, on our client. ``openai_suite`` says which, and how."""

from __future__ import annotations

import subprocess

import pytest

from .openai_suite.__main__ import EMULATED, LIMIT, run


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_the_sdks_tests_pass_in_local_jails() -> None:
    """All that apply; a listed exception that no longer exists fails them, too."""
    code, output = run("local", output=subprocess.PIPE)
    assert code == 0, output[-20_000:]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("service", EMULATED)
def test_the_sdks_tests_pass_at_a_hosted_service(service: str) -> None:
    """The same, at its emulator."""
    code, output = run(service, output=subprocess.PIPE)
    assert code == 0, output[-20_000:]


@pytest.mark.slow
def test_the_sdks_tests_pass_with_copies_of_the_workspaces() -> None:
    """A part of them, as they run on microVMs (``tests/microvm``): the host's copy of a workspace
    is brought up to date, in both directions."""
    files = ["tests/sandbox/test_run_cwd.py", "tests/sandbox/test_unix_local.py"]
    code, output = run("local", [*files, "-k", "snapshot or shared"], subprocess.PIPE, copied=True)
    assert code == 0, output[-20_000:]
