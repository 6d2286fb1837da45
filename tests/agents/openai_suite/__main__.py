"""Runs the SDK's tests of its clients on ours, with a backend of choice.

    python -m tests.agents.openai_suite [--backend NAME] [--settings JSON] [pytest options]

The tests come from the SDK's sdist, of the version that is installed. ``not_applicable.txt`` lists
those that are about that one client, with the reason; all others must pass. A hosted backend is
emulated. BoxLite's microVMs are for the rig: ``tests/microvm``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.emulators.running import started
from tests.helpers.sdists import CACHE, unpacked_sdist
from tests.helpers.waiting import SLOWNESS, wait_until

FILES = (
    "tests/sandbox/test_run_cwd.py",
    "tests/sandbox/test_exposed_ports.py",
    "tests/sandbox/integration_tests/test_runner_pause_resume.py",
    "tests/sandbox/test_unix_local.py",
    "tests/sandbox/test_runtime.py",
)
EMULATED = ("superserve", "islo")
MICROVMS = ("boxlite", "microsandbox")
KEPT = ("SANDBOX_KERNEL_TEST_PATIENCE", "SANDBOX_KERNEL_BOOT_TIMEOUT")
"""How slow the machine is."""
LIMIT = 1700.0
MORE = 1.0 if SLOWNESS == 1 else 4.0
"""Times as long may a test and the whole take on a slow machine; most of them make no sandbox."""


@contextlib.contextmanager
def environment(
    backend: str, settings: str = "{}", *, copied: bool = False
) -> Iterator[dict[str, str]]:
    """The variables of a run, which has folders of its own, and an emulator if it needs one. A
    broker that it has started ends with it."""
    dropped = ("SANDBOX_KERNEL_", "PYTEST", "PYTHONPATH")
    env = {
        key: value
        for key, value in os.environ.items()
        if key in KEPT or not key.startswith(dropped)
    }
    modules = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    # Not in /tmp/pytest-of-*: the paths of sockets must be short.
    with contextlib.ExitStack() as stack:
        if backend in EMULATED:
            env |= stack.enter_context(started(backend)).env
        own = stack.enter_context(tempfile.TemporaryDirectory(prefix="skoa-"))
        stack.callback(end_brokers, own)
        yield {
            **env,
            "SUITE_BACKEND": backend,
            "SUITE_SETTINGS": settings,
            "SUITE_COPIED": "1" if copied or backend in MICROVMS else "",
            "OPENAI_AGENTS_TEST_USE_PROXY": "1",  # an emulated service may be reached by one
            "PYTHONPATH": os.pathsep.join(filter(None, modules)),
            "SANDBOX_KERNEL_DATA_DIR": f"{own}/data",
            "SANDBOX_KERNEL_RUNTIME_DIR": f"{own}/run",
            "SANDBOX_KERNEL_WARM_SPARES": "0",
        }


def end_brokers(folder: str) -> None:
    """Else the next run could not have BoxLite's folder until they are idle."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if b"sandboxes.broker.main" in line and os.fsencode(folder) in line:
                os.kill(int(process.name), signal.SIGTERM)
                wait_until(lambda: not _lives(process))  # noqa: B023  (called at once)


def _lives(process: Path) -> bool:
    try:
        return b") Z " not in (process / "stat").read_bytes()
    except OSError:
        return False


def run(
    backend: str,
    options: Sequence[str] = (),
    output: int | None = None,
    settings: str = "{}",
    *,
    copied: bool = False,
) -> tuple[int, str]:
    """Run the tests; pytest's exit code, and what it has printed if ``output`` is a pipe. With
    ``copied`` as on microVMs: the workspaces' files are copied to the host, and back."""
    folder = unpacked_sdist("openai-agents", version("openai-agents"), CACHE / "openai-agents")
    files = [] if any(".py" in option for option in options) else FILES
    plugins = ["-p", "stand_in", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", "--color=no"]
    command.append(f"--timeout={300 * MORE:g}")
    with environment(backend, settings, copied=copied) as env:
        ended = subprocess.run(
            [*command, *plugins, *options, *files],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            text=True,
            timeout=LIMIT * MORE,
            check=False,
        )
    return ended.returncode, ended.stdout or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--settings", default="{}", help="fields of every sandbox")
    parser.add_argument("--copied", action="store_true", help="see the files as on microVMs")
    arguments, options = parser.parse_known_args()
    return run(arguments.backend, options, settings=arguments.settings, copied=arguments.copied)[0]


if __name__ == "__main__":
    sys.exit(main())
