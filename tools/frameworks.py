"""Run the tests of the doors into agent frameworks: ``make test-frameworks``.

The frameworks have many packages, which need not fit those of the other tests, so they have an
environment of their own, ``.venv-frameworks``, with the newest of each. LangChain's suite for
sandboxes was written for deepagents 0.6, and deepagents 0.7 contradicts some of it; so there is
also ``.venv-deepagents``, in which all of that suite must pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from environments import ROOT, environment

SUITE_IS_FOR = "deepagents==0.6.12"
EXTRAS = "deepagents,pydantic-ai,inspect,smolagents,ag2"
TOOLS = ("langchain-tests", "pytest", "pytest-timeout", "pytest-xdist", "superserve", "trustme")
TESTS = Path("tests", "agents", "frameworks")
ENVIRONMENTS = {
    ".venv-frameworks": (["-e", f".[{EXTRAS}]", *TOOLS], [str(TESTS)]),
    ".venv-deepagents": (
        ["-e", ".[deepagents]", SUITE_IS_FOR, *TOOLS],
        [str(TESTS / "test_langchain_suite.py"), str(TESTS / "test_deepagents.py")],
    ),
}


def main(arguments: list[str]) -> int:
    """Run pytest with ``arguments`` (default: the tests of each) in each environment."""
    variables = {**os.environ, "TEST_FRAMEWORKS": "1"}
    failed = False
    for folder, (wanted, tests) in ENVIRONMENTS.items():
        python = environment(ROOT / folder, wanted)
        options = arguments or ["-n", "2", "--dist", "loadscope", *tests]
        command = [python, "-m", "pytest", "-q", "-p", "no:asyncio", *options]
        failed |= subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
