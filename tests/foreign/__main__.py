"""Runs the suites of jupyter_client and jupyter_server on kernels in sandboxes, and looks what is
left 10 s after each has ended: no process, cgroup, mount or folder of ours may be.

    python -m tests.foreign [--folder FOLDER] [pytest options]

The suites come from the projects' sdists, and run in an environment of their own, which is kept in
the folder for the next time. Some of their tests ask for what only a local process has
(``INHERENT``); other failures are printed, and may be those of a slow machine. The exit code says
whether something was left.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.sdists import unpacked_sdist

PROJECT = Path(__file__).resolve().parents[2]
SUITES = {
    "jupyter_client": ["tests"],
    "jupyter_server": ["tests/services/kernels", "tests/services/sessions"],
}
INHERENT = {
    r"test_tcp_cinfo|test_iopub_plaintext_visibility": "Unix sockets, unless ports are named",
    r"TestRuntime::test_(local_provisioner_|existing\[no_prov)": "asks for the local provisioner",
    r"test_resolve_path_(kernel|server_and_kernel)": "files of the host are not in the sandbox",
    r"test_connection.py::": "a DeprecationWarning of tornado, with local kernels, too",
}
"""Tests that fail, and why."""
SECONDS = 10.0
LIMIT = 3600.0


def prepare(folder: Path) -> Path:
    """An environment with this project, and the unpacked sdists; its interpreter."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]
    tested = [f"{name}[test]" for name in SUITES]
    subprocess.run([*pip, "install", str(PROJECT), "pytest-timeout", *tested], check=True)
    listed = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    for name in SUITES:
        version = re.search(rf"(?im)^{name.replace('_', '[-_]')}==(\S+)", listed)
        assert version, f"{name} is not installed"
        unpacked_sdist(name, version[1], folder, python=python)
    # Some of its kernels are modules of its tests: sandboxes see them in the environment only.
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    shutil.copytree(folder / "jupyter_client" / "tests", packages / "tests", dirs_exist_ok=True)
    return python


def environment(own: Path) -> dict[str, str]:
    """All that is made lies in one folder, so what is left is in it, too, or names it."""
    dropped = ("SANDBOX_KERNEL_", "JUPYTER", "PYTEST", "PYTHONPATH", "JPY_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    for name in ("home", "run", "tmp"):
        (own / name).mkdir(mode=0o700)
    return {
        **env,
        "HOME": str(own / "home"),
        "TMPDIR": str(own / "tmp"),
        "XDG_RUNTIME_DIR": str(own / "run"),
        "JUPYTER_DEFAULT_PROVISIONER_NAME": "sandbox",
        "SANDBOX_KERNEL_WARM_SPARES": "0",  # they would count as left behind
    }


def left_in(own: Path, cgroups_before: set[str]) -> list[str]:
    """What there is of ours."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if int(process.name) == os.getpid():
                continue
            if str(own) in command or f"{own}/" in (process / "mountinfo").read_text():
                found.append(f"process {process.name}: {command[:150]}")
        except OSError:
            continue  # it ended meanwhile, or is not ours
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line.split()[4]}" for line in mounts if str(own) in line]
    found += [f"cgroup {name}" for name in cgroups() - cgroups_before if abandoned(name)]
    for pattern in ("records/*/*.json", "sandboxes/*", "servers/*"):
        found += [f"file {path}" for path in own.rglob(f"sandbox-kernel/{pattern}")]
    found += [f"file {path}" for path in (own / "run").glob("sandbox-kernel/*")]
    return found


def cgroups() -> set[str]:
    folders = Path("/sys/fs/cgroup").rglob("*sandbox-kernel*")
    return {str(path) for path in folders if path.is_dir()}


def abandoned(cgroup: str) -> bool:
    """Whether nothing runs in it. What runs is found as a process, or is somebody else's."""
    try:
        return not Path(cgroup, "cgroup.procs").read_text()
    except OSError:
        return False  # gone by now


def run_suite(name: str, python: Path, folder: Path, options: list[str]) -> list[str]:
    """What it has left behind. Not in /tmp/pytest-of-*: the paths of sockets must be short."""
    own = Path(os.path.realpath(tempfile.mkdtemp(prefix="skf-")))
    before = cgroups()
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "--color=no",
        "--timeout",
        "120",
        *options,
        *SUITES[name],
    ]
    begun = time.monotonic()
    report = folder / f"{name}.txt"
    with report.open("w") as output:
        subprocess.run(
            [*command, f"--basetemp={own / 'tmp' / 'pytest'}"],
            cwd=folder / name,
            env=environment(own),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            check=False,
        )
    lines = report.read_text(errors="replace").strip().splitlines()
    print(f"{name}: {lines[-1] if lines else '?'} ({time.monotonic() - begun:.0f} s; {report})")
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR tests"))]
    ours = [line for line in failed if not any(re.search(known, line) for known in INHERENT)]
    print(f"{name}: {len(failed) - len(ours)} ask for a local process; others", *ours, sep="\n  ")
    time.sleep(SECONDS)
    left = left_in(own, before)
    print(f"{name}: {len(left)} left after {SECONDS:g} s", *left, sep="\n  ", flush=True)
    if not left:
        shutil.rmtree(own, ignore_errors=True)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=str(PROJECT / ".venv" / "foreign"))
    parser.add_argument("--suite", choices=sorted(SUITES), action="append")
    arguments, options = parser.parse_known_args()
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    python = prepare(folder)
    left = [
        one
        for name in arguments.suite or SUITES
        for one in run_suite(name, python, folder, options)
    ]
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
