"""``python -m tests.microvm``: runs the tests of the microVM backends on real microVMs, in a rig.

Builds the rig if need be (``build.py``), boots one machine a backend (``machine.py``), and runs
the conformance suite and ``tests/microvm`` inside, against the packages from PyPI, unpatched.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .build import CACHE, HOMES, PROJECT, CannotBuild, build
from .machine import Machine

BACKENDS = ("boxlite", "microsandbox")
SPEC = {"memory_mib": 512}
PATIENCE = "10"
"""How many times slower than a real machine everything may be in the rig."""
START_TIMEOUT = 900
QUICK_SECONDS = 600
"""After these no test is begun in the quick run."""
REST = " ".join(
    f"tests/conformance/test_{name}.py"
    for name in ("surface", "streams", "lifecycle", "kernels", "bare_image")
)
"""What takes longer than a quarter hour, after what the quick run has, too."""
FILES = " ".join(
    f"tests/conformance/test_kernels.py::test_{name}"
    for name in ("files_beside_the_notebook", "a_notebook_that_needs_the_files_beside_it")
)
"""Of what takes longer, for the quick run."""
ALSO = {"boxlite": ("tests/microvm/test_jail.py", "tests/microvm/test_openai_suite.py")}
"""In one of the two: what is no microVM, but needs a machine like the rig's, and what another
project's tests say about ours."""
_printing = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """How the tests of one backend ended."""

    backend: str
    exit_code: int
    seconds: float
    last_line: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.microvm", description=__doc__)
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--quick", action="store_true", help="only what fits in a quarter hour")
    parser.add_argument("--build", action="store_true", help="build the rig and stop")
    parser.add_argument("--command", help="run this shell command in the rig instead of the tests")
    parser.add_argument("--select", default="", help="pytest's -k inside the rig")
    arguments = parser.parse_args()
    try:
        rig = build()
    except CannotBuild as reason:
        _shout(f"THE MICROVM TESTS DID NOT RUN: {reason}.")
        return 0
    if arguments.build:
        return 0
    project = _project()
    with ThreadPoolExecutor() as pool:
        outcomes = list(
            pool.map(
                lambda backend: _run(rig, backend, project, arguments),
                arguments.backends or BACKENDS,
            )
        )
    for outcome in outcomes:
        print(f"{outcome.backend}: {outcome.last_line} ({outcome.seconds:.0f} s with boot)")
    return max(outcome.exit_code for outcome in outcomes)


def _run(rig: Path, backend: str, project: Path, arguments: argparse.Namespace) -> Outcome:
    started = time.monotonic()
    lines = _Lines(backend)
    with Machine(rig, backend) as machine:
        lines.add(b"the rig is up after %.0f s\n" % (time.monotonic() - started))
        shutil.copytree(project, machine.share / "project")
        command = arguments.command or _tests(backend, arguments)
        # Not from the share itself, which is slow. Compiled modules are known by their times.
        copied = f"cp -a /share/project /root/project && cd /root/project && {command}"
        code = machine.run(copied, _environment(rig, arguments.quick), lines.add)
    return Outcome(backend, code, time.monotonic() - started, lines.last)


def _tests(backend: str, arguments: argparse.Namespace) -> str:
    spec = json.dumps({**SPEC, "image": f"{CACHE}/images/py", "start_timeout": START_TIMEOUT})
    select = f"-k '{arguments.select}'" if arguments.select else ""
    markers = "not live and not faults" + (" and not slow" if arguments.quick else "")
    return (
        f"uname -r && python3 -m pytest -p no:cacheprovider -p tests.microvm.budget -v -rPfE "
        f"--durations=15 -m '{markers}' --timeout=1200 {select} "
        f"--backend {backend} --backend-spec '{spec}' "
        f"{' '.join(ALSO.get(backend, ()))} "
        f"tests/microvm/test_{backend}.py tests/conformance/test_ways_out.py "
        f"{FILES if arguments.quick else REST}"
    )


def _environment(rig: Path, quick: bool) -> dict[str, str]:
    return {
        "PYTHONPATH": "/root/project/packages:/opt/py",
        "JUPYTER_PATH": "/root/project/packages/share/jupyter:/opt/py/share/jupyter",
        "SANDBOX_KERNEL_RIG": str(rig),
        "SANDBOX_KERNEL_RIG_SECONDS": str(QUICK_SECONDS) if quick else "",
        "SANDBOX_KERNEL_TEST_PATIENCE": PATIENCE,
        "SANDBOX_KERNEL_TEST_OUTPUT_MB": "2" if quick else "20",
        "SANDBOX_KERNEL_BOOT_TIMEOUT": str(START_TIMEOUT),
        **{variable: str(rig / folder) for variable, folder in HOMES.items()},
    }


def _project() -> Path:
    """The project as users get it, and its tests, in a folder of their own."""
    folder = CACHE / "project"
    shutil.rmtree(folder, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", f"--target={folder / 'packages'}", PROJECT],
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
    )
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "tests", folder / "tests", ignore=ignored)
    shutil.copy(PROJECT / "pyproject.toml", folder)
    return folder


class _Lines:
    """Prints what comes from one rig, a line at a time and with its name in front."""

    def __init__(self, name: str) -> None:
        self.last = ""
        self._name = name
        self._rest = b""
        self._log = CACHE / f"{name}.log"
        self._log.write_bytes(b"")

    def add(self, data: bytes) -> None:
        with self._log.open("ab") as log:
            log.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.last = line.decode(errors="replace").strip("= \r") or self.last
            with _printing:
                print(f"{self._name} | {line.decode(errors='replace')}", flush=True)


def _shout(words: str) -> None:
    line = "!" * min(100, len(words) + 4)
    print(f"\n{line}\n  {words}\n{line}\n", flush=True)


if __name__ == "__main__":
    os.chdir(PROJECT)
    sys.exit(main())
