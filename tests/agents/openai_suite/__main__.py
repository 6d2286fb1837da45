"""Runs the SDK's tests of its clients on ours, with a backend of choice.

    python -m tests.agents.openai_suite [--backend NAME] [pytest options]

The tests come from the SDK's sdist, of the version that is installed. ``not_applicable.txt`` lists
those that are about that one client, with the reason; all others must pass. A hosted backend is
emulated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.emulators.running import started
from tests.helpers.sdists import CACHE, unpacked_sdist

FILES = (
    "tests/sandbox/test_run_cwd.py",
    "tests/sandbox/test_exposed_ports.py",
    "tests/sandbox/integration_tests/test_runner_pause_resume.py",
    "tests/sandbox/test_unix_local.py",
    "tests/sandbox/test_runtime.py",
)
EMULATED = ("superserve", "islo")
LIMIT = 1700.0


@contextlib.contextmanager
def environment(backend: str) -> Iterator[dict[str, str]]:
    """The variables of a run, which has folders of its own, and an emulator if it needs one."""
    dropped = ("SANDBOX_KERNEL_", "PYTEST", "PYTHONPATH")
    env = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    # Not in /tmp/pytest-of-*: the paths of sockets must be short.
    with contextlib.ExitStack() as stack:
        if backend in EMULATED:
            env |= stack.enter_context(started(backend)).env
        own = stack.enter_context(tempfile.TemporaryDirectory(prefix="skoa-"))
        yield {
            **env,
            "SUITE_BACKEND": backend,
            "OPENAI_AGENTS_TEST_USE_PROXY": "1",  # an emulated service may be reached by one
            "PYTHONPATH": str(Path(__file__).parent),
            "SANDBOX_KERNEL_DATA_DIR": f"{own}/data",
            "SANDBOX_KERNEL_WARM_SPARES": "0",
        }


def run(backend: str, options: Sequence[str] = (), output: int | None = None) -> tuple[int, str]:
    """Run the tests; pytest's exit code, and what it has printed if ``output`` is a pipe."""
    folder = unpacked_sdist("openai-agents", version("openai-agents"), CACHE / "openai-agents")
    files = [] if any(".py" in option for option in options) else FILES
    plugins = ["-p", "stand_in", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "--timeout=300"]
    with environment(backend) as env:
        ended = subprocess.run(
            [*command, *plugins, *options, *files],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    return ended.returncode, ended.stdout or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="local")
    arguments, options = parser.parse_known_args()
    return run(arguments.backend, options)[0]


if __name__ == "__main__":
    sys.exit(main())
