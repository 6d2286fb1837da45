"""A kernel that is forked from a warm interpreter is the same as one that is started afresh."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_kernel.guest import landlock
from sandbox_kernel.guest.warm_process import can_be_warm
from sandbox_kernel.guest.warm_start import early_variables
from tests.helpers.waiting import wait_until

from .conftest import StartKernel
from .live import PATIENCE, Live
from .portrait import portrait

FORKED = """
import os
_others = []
for _pid in os.listdir("/proc"):
    if _pid.isdigit() and int(_pid) != os.getpid():
        try:
            with open(f"/proc/{_pid}/cmdline") as _f:
                if "ipykernel_launcher" in _f.read(): _others.append(int(_pid))
        except OSError:
            pass  # it has just ended
_others.sort()
print(bool(_others))
"""
"""Prints whether an interpreter waits to become a kernel; a spare may wait beside it."""


def test_a_forked_kernel_cannot_be_told_from_a_fresh_one(start_kernel: StartKernel) -> None:
    """Command line, paths, environment, signals, descriptors, process group: all the same."""
    forked, fresh = start_kernel(), start_kernel(warm_start=False)
    assert forked.ok(FORKED).text() == "True\n"
    assert fresh.ok(FORKED).text() == "False\n"
    assert portrait(forked) == portrait(fresh)


def test_random_numbers_differ_after_each_restart(live: Live) -> None:
    """Two kernels that are forked from the same interpreter are not the same dice."""
    dice = "import random, uuid, tempfile; print(random.random(), uuid.uuid4(), tempfile.mktemp())"
    seen = {live.ok(dice).text()}
    for _ in range(2):
        live.manager.restart_kernel(now=True)
        live.client.wait_for_ready(timeout=PATIENCE)
        seen.add(live.ok(dice).text())
    assert len(seen) == 3


def test_a_kernel_can_be_killed_as_soon_as_it_is_launched(live: Live) -> None:
    """Somebody restarts a kernel again and again, and waits for none of them. Each kernel is killed
    as soon as its pid is known, and ends; one that did not would be in the next one's way."""
    for _ in range(30):
        live.manager.restart_kernel(now=True)
    live.reconnect()
    assert live.ok("6 * 7").value == "42"


def test_changed_packages_are_seen_after_a_restart(live: Live) -> None:
    """A warm interpreter whose packages have changed is replaced, not used."""
    live.ok(
        """
        import sysconfig, pathlib
        site = pathlib.Path(sysconfig.get_path("purelib"))
        (site / "just_installed.pth").write_text("import sys; sys.just_installed = True\\n")
        """.replace("\n        ", "\n")
    )
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("import sys; sys.just_installed").value == "True"
    wait_until(lambda: live.ok(FORKED).text() == "True\n", "another warm interpreter")


def test_the_warm_interpreter_may_die(live: Live) -> None:
    """Without it a kernel starts plainly, and soon there is another one for the next."""
    live.ok(FORKED + "\nos.kill(_others[0], 9)")
    for _ in range(2):
        live.manager.restart_kernel(now=True)
        live.client.wait_for_ready(timeout=PATIENCE)
        wait_until(lambda: live.ok(FORKED).text() == "True\n", "another warm interpreter")


def test_a_kernel_cannot_change_what_the_next_is_made_from(live: Live) -> None:
    """The warm interpreter's memory and descriptors are closed to the kernel."""
    live.ok(
        FORKED
        + """
for _name in ("mem", "environ", "fd/0", "maps"):
    try:
        open(f"/proc/{_others[0]}/{_name}", "rb").read(1)
    except PermissionError:
        continue
    raise AssertionError(_name)
"""
    )


LURKER = """
import os
old = os.listdir("/proc")
while True:
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid not in old:
            try:
                with open(f"/proc/{pid}/mem", "r+b", 0):
                    name = open(f"/proc/{pid}/cmdline").read().replace("\\0", " ")
                    open("/workspace/opened", "a").write(f"{pid} {name}\\n")
            except OSError:
                pass
    open("/workspace/rounds", "a").write("x")
"""


@pytest.mark.skipif(landlock.abi() < landlock.LEAST_ABI, reason="this kernel has no Landlock")
def test_what_a_kernel_left_behind_cannot_get_at_the_next_one(live: Live) -> None:
    """A process that outlives its kernel waits for the interpreter of the next one, and for that
    kernel, and opens their memory before they could close it. A descriptor opened then would work
    for ever. It must not get one, at no time of their lives."""
    live.ok(
        f"""
import subprocess, sys
{FORKED}
subprocess.Popen([sys.executable, "-c", {LURKER!r}], start_new_session=True,
                 stdin=-3, stdout=-3, stderr=-3)
os.kill(_others[0], 9)
"""
    )
    for _ in range(2):
        live.manager.restart_kernel(now=True)
        live.client.wait_for_ready(timeout=PATIENCE)
    seen = "import os; print(os.path.getsize('/workspace/rounds'))"
    before = int(live.ok(seen).text())
    assert before > 10
    wait_until(lambda: live.ok(FORKED).text() == "True\n", "the interpreter of the next kernel")
    wait_until(lambda: int(live.ok(seen).text()) > before, "one more round")
    opened = (
        "print(open('/workspace/opened').read() if os.path.exists('/workspace/opened') else '')"
    )
    assert live.ok(opened).text() == "\n"


def test_environment_that_an_interpreter_reads_at_its_start(
    folder: Path, start_kernel: StartKernel
) -> None:
    """Such a kernel is started plainly, so that the variables have their effect."""
    live = start_kernel(env={"PYTHONHASHSEED": "7", "GREETING": "hello"})
    assert live.ok(
        "import sys, os; sys.flags.hash_randomization, os.environ['GREETING']"
    ).value == ("(1, 'hello')")
    seeded = live.ok("hash('a')").value
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("hash('a')").value == seeded


@pytest.mark.parametrize(
    ("command", "warm"),
    [
        (["python", "-m", "ipykernel_launcher", "-f", "x"], True),
        (["python", "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "x"], True),
        (["python", "-I", "-m", "ipykernel_launcher", "-f", "x"], False),
        (["python", "-m", "bash_kernel", "-f", "x"], False),
        (["ipykernel_launcher", "-f", "x"], False),
        (["python", "ipykernel_launcher"], False),
        ([], False),
    ],
)
def test_which_command_lines_are_kept_warm(command: list[str], warm: bool) -> None:
    """Only ipykernel's, and only with flags under which the warm interpreter can be made."""
    assert can_be_warm(command) is warm


def test_variables_that_matter_before_python_runs() -> None:
    """These cannot be set in a fork; all others can."""
    found = early_variables({"PYTHONPATH": "x", "LD_PRELOAD": "y", "HOME": "z", "A": "b"})
    assert found == {"PYTHONPATH": "x", "LD_PRELOAD": "y"}
