"""A restarted kernel is one that had already started, and nobody can tell."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from sandbox_kernel.jupyter import pool
from sandbox_kernel.tunnel.background import submit
from tests.faults.jail import agent_of, open_files
from tests.helpers.waiting import wait_until

from .conftest import StartKernel
from .live import PATIENCE, Live, descriptors, spare_of
from .portrait import portrait

COUNT = """
import glob, os
len(glob.glob('/proc/[0-9]*')), sum(len(f) for _, _, f in os.walk('/tmp'))
"""


def restart(live: Live) -> None:
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


def pid_of(live: Live) -> int:
    return int(live.ok("import os; os.getpid()").value)


def test_a_spare_cannot_be_told_from_a_fresh_kernel(start_kernel: StartKernel) -> None:
    """Nor from one that was started plainly: 50 properties of the process and of IPython."""
    live, fresh = start_kernel(), start_kernel(warm_start=False)
    spare = spare_of(live.kernel)
    restart(live)
    restart(fresh)
    found, expected = portrait(live), portrait(fresh)
    assert pid_of(live) == spare
    assert found == expected


def test_a_spare_makes_a_start(start_kernel: StartKernel) -> None:
    """A sandbox of the pool has one, which becomes its first kernel."""
    try:
        start_kernel(pool_size=1)
        wait_until(lambda: [k for one in pool._pools.values() for k in one._ready], "a full pool")
        ((waiting,),) = (one._ready for one in pool._pools.values())
        spare = spare_of(waiting.kernel)
        assert pid_of(start_kernel(pool_size=1)) == spare
    finally:
        submit(pool.drain_all()).result(PATIENCE)


def test_history_goes_on_by_one(live: Live) -> None:
    """A spare takes no number of a session before it is a kernel, nor one that another has."""
    number = "get_ipython().history_manager.session_number"
    live.ok("remembered = 1")
    first = int(live.ok(number).value)
    for step in (1, 2):
        spare = spare_of(live.kernel)
        restart(live)
        assert pid_of(live) == spare
        assert int(live.ok(number).value) == first + step
    last = live.ok("[line for _, _, line in get_ipython().history_manager.get_range(-2)]").value
    assert "remembered = 1" in last


def test_dice_differ(live: Live) -> None:
    """Two spares that are forked from the same interpreter are not the same dice."""
    dice = "import random, uuid, tempfile; print(random.random(), uuid.uuid4(), tempfile.mktemp())"
    seen = {live.ok(dice).text()}
    for _ in range(2):
        spare = spare_of(live.kernel)
        restart(live)
        assert pid_of(live) == spare
        seen.add(live.ok(dice).text())
    assert len(seen) == 3


def test_startup_files_run_when_the_kernel_starts(live: Live) -> None:
    """Not when the spare does: they see the kernel's environment, its files and its time."""
    live.ok(
        "import os\n"
        "folder = os.path.join(get_ipython().profile_dir.location, 'startup')\n"
        "os.makedirs(folder, exist_ok=True)\n"
        "with open(os.path.join(folder, '00-now.py'), 'w') as file:\n"
        "    file.write('import time; started_at = time.time(); word = open(\"word\").read()')\n"
        "open('word', 'w').write('old')"
    )
    spare = spare_of(live.kernel)
    before = float(live.ok("open('word', 'w').write('new'); import time; time.time()").value)
    restart(live)
    assert pid_of(live) == spare
    assert live.ok("word").value == "'new'"
    assert float(live.ok("started_at").value) > before


def test_libraries_read_their_settings_when_the_kernel_starts(live: Live) -> None:
    """Matplotlib, for one, reads its file and the environment when it is imported. And a session
    in the history begins when the kernel does."""
    live.ok(
        "open('matplotlib.py', 'w').write('rc = open(\"matplotlibrc\").read()')\n"
        "open('matplotlibrc', 'w').write('old')"
    )
    spare = spare_of(live.kernel)
    before = live.ok(
        "open('matplotlibrc', 'w').write('new'); import datetime; print(datetime.datetime.now())"
    ).text()
    restart(live)
    assert pid_of(live) == spare
    assert live.ok("import matplotlib; matplotlib.rc").value == "'new'"
    begun = "history = get_ipython().history_manager; print(history.get_session_info()[1])"
    assert live.ok(begun).text() > before


@pytest.mark.parametrize(
    "change",
    [
        "open(os.path.join(get_ipython().profile_dir.location, 'ipython_config.py'), 'w').write("
        "'c.InteractiveShell.ast_node_interactivity = \"all\"')",
        "import sysconfig; open(os.path.join(sysconfig.get_path('purelib'), 'x.pth'), 'w')"
        ".write('import sys; sys.x = 1')",
        "os.unlink(get_ipython().history_manager.hist_file)",
    ],
    ids=["configuration", "package", "history"],
)
def test_a_spare_that_is_out_of_date_is_not_used(live: Live, change: str) -> None:
    """A kernel that started before its configuration, packages or history changed would not be
    what a fresh one is."""
    spare = spare_of(live.kernel)
    live.ok("import os; " + change)
    restart(live)
    assert pid_of(live) != spare
    assert live.ok("6 * 7").value == "42"


def test_a_spare_does_not_keep_a_package_that_was_removed(live: Live) -> None:
    """It was there when the spare started."""
    live.ok(
        "import os, sysconfig; path = os.path.join(sysconfig.get_path('purelib'), 'gone.py')\n"
        "open(path, 'w').close()"
    )
    restart(live)
    spare = spare_of(live.kernel)
    live.ok("import gone, os; os.unlink(gone.__file__)")
    restart(live)
    assert pid_of(live) != spare
    assert live.run("import gone").reply["ename"] == "ModuleNotFoundError"


def test_clients_stay_connected(live: Live) -> None:
    """A restart that takes less time than a client needs to connect again would be wasted."""
    spare_of(live.kernel)
    monitors = [
        channel.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for channel in (live.client.shell_channel, live.client.iopub_channel)
    ]
    for _ in range(3):
        restart(live)
        assert live.ok("print('heard')").text() == "heard\n"
    seen = [recv_monitor_message(m) for m in monitors if m.poll(0)]
    for channel in (live.client.shell_channel, live.client.iopub_channel):
        channel.socket.disable_monitor()
    assert seen == []


def test_a_client_whose_message_was_cut_off_connects_again(live: Live) -> None:
    """The kernel was killed while it sent output: nobody can go on in the middle of a message."""
    live.begin("print('begun')\nwhile True: print('x' * 100_000)")
    restart(live)
    assert live.ok("print('heard')").text() == "heard\n"


def test_a_spare_is_one_kernel(live: Live) -> None:
    """The second of two restarts in quick succession gets another process."""
    seen = [pid_of(live)]
    for _ in range(3):
        seen.append(spare_of(live.kernel))
        live.manager.restart_kernel(now=True)
        restart(live)
        seen.append(pid_of(live))
    assert len(set(seen)) == len(seen)


def test_the_kernel_cannot_reach_its_spare(live: Live) -> None:
    """Its memory and descriptors are closed to the kernel that runs beside it."""
    live.ok(
        f"""
for name in ("mem", "environ", "fd/0", "maps"):
    try:
        open("/proc/{spare_of(live.kernel)}/" + name, "rb").read(1)
    except PermissionError:
        continue
    raise AssertionError(name)
"""
    )


def test_the_spare_may_die(live: Live) -> None:
    """Another kernel is started instead, and gets a spare of its own."""
    live.ok(f"import os; os.kill({spare_of(live.kernel)}, 9)")
    restart(live)
    assert live.ok("6 * 7").value == "42"
    spare = spare_of(live.kernel)
    restart(live)
    assert pid_of(live) == spare


def test_a_cell_that_computes_has_the_machine_for_itself(live: Live) -> None:
    """No spare is made meanwhile, however quiet the cell is."""
    restart(live)
    live.ok("import time; end = time.monotonic() + 4\nwhile time.monotonic() < end: pass")
    assert submit(live.kernel.tunnel.control.call("status")).result(PATIENCE)["spare"] is None
    assert spare_of(live.kernel)


@pytest.mark.slow
def test_many_restarts_from_spares_leave_nothing(live: Live) -> None:
    """Processes and files in the sandbox, and descriptors of its agent, are as many as before."""
    spare_of(live.kernel)
    restart(live)
    spare_of(live.kernel)
    before = live.ok(COUNT).value
    for _ in range(10):
        spare = spare_of(live.kernel)
        restart(live)
        assert pid_of(live) == spare
    spare_of(live.kernel)
    assert live.ok(COUNT).value == before


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_hundred_restarts_in_a_row(live: Live) -> None:
    """Each as soon as the last one is over, from a spare now and then. Nothing is left, and neither
    the agent nor this process grows."""

    def counted() -> tuple[list[int], list[int]]:
        """Processes and files in the sandbox, and descriptors; bytes that agent and host use."""
        agent = agent_of(live)
        found = [int(n) for n in live.ok(COUNT).value.strip("()").split(",")]
        found += [open_files(agent), len(descriptors())]
        return found, [resident(agent), resident(os.getpid())]

    def rested() -> tuple[list[int], list[int]]:
        spare_of(live.kernel)
        restart(live)
        spare_of(live.kernel)
        gc.collect()
        return counted()

    for number in range(200):
        if number == 40:
            before, memory = rested()
        if number % 20 == 0:
            spare_of(live.kernel)
        restart(live)
    wait_until(lambda: rested()[0] == before, "as many of all as before")
    grown = [now - then for now, then in zip(counted()[1], memory, strict=True)]
    assert max(grown) < 4 * 2**20, grown
