"""Every limit is really hit, with cgroups and without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.sandboxes.local import LocalClient, cgroup, disk_image
from sandbox_kernel.sandboxes.local.cgroup import Cgroup
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.sandboxes.local.limits import MIB, Limits
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.waiting import until

from .sandboxes import cgroups, client_that_leaves_nothing, running, sandbox


@pytest.fixture(params=["cgroup", "watch"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By what the limits are held."""
    if request.param == "watch":
        monkeypatch.setenv(cgroup.NO_CGROUP, "1")
        return "watch"
    made = Cgroup.create("trial", Limits.of(SandboxSpec()))
    if made is None or not {"memory", "pids"} <= made.folders.keys():
        pytest.skip("this process may not make cgroups")
    made.remove()
    return "cgroup"


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    with client_that_leaves_nothing(own_dirs) as client:
        yield client


HOG = """
import sys, time
held = []
while True:
    held.append(b"x" * (4 << 20))
    time.sleep(0.005)
"""


async def test_memory(client: LocalClient, means: str) -> None:
    """A process that takes too much is killed, and only it; the sandbox says so."""
    async with sandbox(client, memory_mib=128) as handle:
        await handle.spawn(["sleep", "1000"])
        result = await handle.exec("python3", ["-c", HOG], timeout=50)
        assert result.exit_code == -9 or "MemoryError" in result.stderr
        info = await handle.info()
        assert info.oom_kills == 1
        assert info.last_kill.startswith("out of memory: 'python3' used 1")
        assert info.last_kill.endswith("of 128 MiB")
        assert ("cgroup" in info.limits["memory_mib"]) == (means == "cgroup")
        assert info.detail["processes"] == 1
        await handle.stop()
        assert (await handle.info()).oom_kills == 1


async def test_memory_of_many_processes_together(client: LocalClient, means: str) -> None:
    """The limit is the whole sandbox's: many small processes are held to it, too."""
    async with sandbox(client, memory_mib=200) as handle:
        code = (
            "import os, time\nfor _ in range(9): os.fork()\nx = b'x' * (60 << 20); time.sleep(60)"
        )
        code = code.replace("range(9)", "range(3)")
        await handle.spawn(["python3", "-c", code])
        await until(lambda: killed(handle))
        assert (await handle.exec("true")).ok


MAPPED_HOGS = """
import mmap, os, sys, time
for _ in range(19):
    if os.fork() == 0:
        break
held = mmap.mmap(-1, 256 << 20)
block = b"x" * (1 << 20)
while True:
    for at in range(0, 256 << 20, 1 << 20):
        held[at : at + (1 << 20)] = block
"""


async def test_mapped_memory_of_many_processes(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cgroup: twenty processes touch 5 GiB of shared mappings, which no rlimit counts,
    as fast as they can. The watch kills as many at once as it takes, and the sandbox lives."""
    monkeypatch.setenv(cgroup.NO_CGROUP, "1")
    marker = f"marker-{uuid.uuid4()}"
    async with sandbox(client, memory_mib=300) as handle:
        await handle.spawn(["python3", "-c", MAPPED_HOGS, marker])
        most = 0

        async def over() -> bool:
            nonlocal most
            most = max(most, await asyncio.to_thread(resident, marker))
            return await killed(handle) >= 15

        await until(over)
        assert most < 900
        assert (await handle.exec("true")).ok


HIDDEN_FORKS = """
import ctypes, os, sys, time
held = b"x" * (60 << 20)
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
for _ in range(2):
    if os.fork() == 0:
        time.sleep(float(sys.argv[1]))
        os._exit(0)
time.sleep(1.5)
print("whole")
"""


async def test_a_fork_of_a_process_that_hides_its_memory(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cgroup: a process whose memory process 1 cannot see forks, as a warm interpreter
    does for each kernel. What it shares with its forks counts for each of them, so for a moment it
    seems to be too much. Nobody is killed for that, only if it stays too much."""
    monkeypatch.setenv(cgroup.NO_CGROUP, "1")
    async with sandbox(client, memory_mib=128) as handle:
        result = await handle.exec("python3", ["-c", HIDDEN_FORKS, "1"])
        assert result.stdout == "whole\n", result
        assert await killed(handle) == 0
        await handle.spawn(["python3", "-c", HIDDEN_FORKS, "600"])
        await until(lambda: killed(handle))


def resident(marker: str) -> int:
    """MiB that the processes with ``marker`` in their command line have."""
    total = 0
    for pid in running(marker):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                total += int(line.split()[1]) // 1024 if line.startswith("Pss:") else 0
    return total


async def killed(handle: object) -> int:
    return (await handle.info()).oom_kills  # type: ignore[attr-defined, no-any-return]


async def test_files_in_memory_count(client: LocalClient, means: str) -> None:
    """What is written to /tmp and /dev/shm is memory, and bounded."""
    async with sandbox(client, memory_mib=128) as handle:
        result = await handle.shell("head -c 100000000 /dev/zero > /tmp/x; wc -c < /tmp/x")
        assert int(result.stdout or 0) <= 64 * MIB
        assert (await handle.exec("true")).ok


BOMB = """
import os, sys, time
made = 0
try:
    for _ in range(400):
        if os.fork() == 0:
            time.sleep(100); os._exit(0)
        made += 1
    time.sleep(5)
except OSError:
    print("refused after", made, flush=True)
os.killpg(0, 9)
"""


async def test_processes(client: LocalClient, means: str) -> None:
    """There are never many more processes than allowed, and the sandbox survives a fork bomb."""
    async with sandbox(client, processes=40) as handle:
        await handle.spawn(["sleep", "1000"])
        stream = await handle.open_stream(["python3", "-c", BOMB])
        if means == "cgroup":
            assert int((await stream.read()).split()[-1]) < 40
        else:
            await until(lambda: too_many(handle))
        await stream.close()
        assert await until(lambda: only_one_left(handle))
        assert (await handle.exec("true")).ok


async def too_many(handle: LocalHandle) -> bool:
    info = await handle.info()
    refused = "rlimit" in info.limits["processes"]
    return refused or info.last_kill.startswith("too many processes")


async def only_one_left(handle: LocalHandle) -> bool:
    return bool((await handle.info()).detail["processes"] == 1)


async def test_endless_fork_bomb(client: LocalClient, means: str) -> None:
    """Even one that forks without end does not get out of hand: it can be removed."""
    async with sandbox(client, processes=100, memory_mib=512) as handle:
        await handle.spawn(["sh", "-c", "b() { b & b & }; b"])
        await handle.info()


async def test_open_files(client: LocalClient) -> None:
    """A process gets no more descriptors than allowed."""
    async with sandbox(client, open_files=64) as handle:
        code = (
            "import os\ntry:\n  while True: last = os.dup(0)\nexcept OSError as e: print(last, e)"
        )
        result = await handle.exec("python3", ["-c", code])
        assert result.stdout.startswith("63 [Errno 24]")
        assert (await handle.info()).limits["open_files"] == "64 a process (rlimit)"


FILLER = """
import os, time
for number in range(1000):
    with open(f"/workspace/{number}", "wb") as file:
        file.write(bytes(1 << 20)); file.flush(); os.fsync(file.fileno())
    time.sleep(0.02)
"""


@pytest.fixture
def no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are watched, also where a file system of their own could be had."""
    monkeypatch.setenv(disk_image.NO_DISK_IMAGE, "1")


@pytest.fixture
def image(tmp_path: Path) -> None:
    """Sandboxes with a disk_mib have a file system of their own."""
    problem = disk_image.why_not(tmp_path, 32 * MIB)
    if problem:
        pytest.skip(f"no file system of its own: {problem}")


def loop_devices(folder: Path) -> list[str]:
    """Files below a folder that a loop device shows."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().strip())
    return [path for path in found if path.startswith(str(folder))]


FULL = """
import errno, os, shutil
made = 0
try:
    while True:
        with open(f"/workspace/{made}", "wb") as file:
            file.write(bytes(1 << 20))
        made += 1
except OSError as error:
    print(errno.errorcode[error.errno], made, shutil.disk_usage("/home/sandbox").total >> 20)
for number in range(made):
    os.unlink(f"/workspace/{number}")
open("/workspace/kept", "w").write("kept")
"""


@pytest.mark.usefixtures("image")
async def test_a_full_disk_is_an_error(client: LocalClient, own_dirs: Path) -> None:
    """With a file system of its own, who fills the disk gets ENOSPC and nobody is killed; what is
    deleted is free again; df shows its size. Nothing of it is left when the sandbox ends."""
    async with sandbox(client, disk_mib=32) as handle:
        await handle.spawn(["sleep", "1000"])
        result = await handle.exec("python3", ["-c", FULL], timeout=50)
        assert result.ok, result
        name, made, size = result.stdout.split()
        assert name == "ENOSPC"
        assert 30 <= int(made) <= int(size) <= 42
        info = await handle.info()
        assert info.limits["disk_mib"] == "32 MiB (own file system)"
        assert (info.last_kill, info.detail["processes"]) == ("", 1)
        assert (Path(info.detail["workspace"]) / "kept").read_text() == "kept"
        assert len(loop_devices(own_dirs)) == 1
        await handle.stop()
        image_file, _, _ = (await handle.info()).detail["workspace"].partition(" ")
        await until(lambda: not loop_devices(own_dirs))
        shown = subprocess.run(
            ["/usr/sbin/debugfs", "-R", "cat /workspace/kept", image_file],
            capture_output=True,
            text=True,
        )
        assert shown.stdout == "kept"
    assert str(own_dirs) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.usefixtures("image")
async def test_plain_folders_if_no_file_system_can_be_made(
    client: LocalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox starts all the same, and its limits say by what they are held."""
    for name in ("unshare", "sh", "fallocate", "mount", "rm"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    (tmp_path / "mke2fs").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "mke2fs").chmod(0o755)
    monkeypatch.setattr(disk_image, "_TOOL_PATH", str(tmp_path))
    async with sandbox(client, disk_mib=32) as handle:
        assert (await handle.info()).limits["disk_mib"] == "32 MiB (rlimit a file, and watch)"
        assert (await handle.shell("echo fine > file; cat file")).stdout == "fine\n"
        assert not handle._folders.image.exists()


async def test_only_a_disk_that_was_asked_for_is_set_aside(client: LocalClient) -> None:
    """The default is large, and a named workspace outlives its sandbox: those are plain folders."""
    for fields in ({}, {"disk_mib": 32, "volume": "kept"}):
        async with sandbox(client, **fields) as handle:
            assert (await handle.info()).limits["disk_mib"].endswith("(rlimit a file, and watch)")


@pytest.mark.usefixtures("no_image")
async def test_disk(client: LocalClient) -> None:
    """Whoever fills the workspace is killed; the others, and the files, stay."""
    async with sandbox(client, disk_mib=20) as handle:
        await handle.spawn(["sleep", "1000"])
        result = await handle.exec("python3", ["-c", FILLER], timeout=50)
        assert result.exit_code == -9
        info = await handle.info()
        assert info.last_kill.startswith("disk full: workspace and home hold ")
        assert info.last_kill.endswith("of 20 MiB; 'python3' was writing")
        assert info.detail["processes"] == 1
        assert info.oom_kills == 0
        held = sum(f.stat().st_size for f in Path(info.detail["workspace"]).iterdir())
        assert 15 * MIB < held < 200 * MIB
        assert (await handle.shell("rm /workspace/*; echo ok > new; cat new")).stdout == "ok\n"


@pytest.mark.usefixtures("no_image")
async def test_disk_hidden_from_the_walk(client: LocalClient) -> None:
    """A folder that is closed to everybody counts all the same."""
    async with sandbox(client, disk_mib=20) as handle:
        code = FILLER.replace("/workspace/{number}", "{number}")
        code = f"import os; os.mkdir('d'); os.chdir('d'); os.chmod('.', 0o300)\n{code}"
        result = await handle.exec("python3", ["-c", code], timeout=50)
        assert result.exit_code == -9


@pytest.mark.usefixtures("no_image")
async def test_size_of_one_file(client: LocalClient) -> None:
    """No file gets bigger than the disk limit, at no moment."""
    async with sandbox(client, disk_mib=10) as handle:
        code = "f = open('big', 'wb', 0)\nwhile True: f.write(bytes(1 << 20))"
        result = await handle.exec("python3", ["-c", code], timeout=50)
        assert result.exit_code == -9 or "File too large" in result.stderr
        size = (await handle.shell("stat -c %s big")).stdout
        assert int(size) <= 10 * MIB


async def test_cpus(client: LocalClient, means: str) -> None:
    """The limit on CPUs is in force, by quota or by affinity, and the words tell which."""
    async with sandbox(client, cpus=1) as handle:
        words = (await handle.info()).limits["cpus"]
        cgroup = client._records.load("local", handle.name).data.get("cgroup")
        made = Cgroup.from_json(cgroup) if means == "cgroup" else None
        if made is not None and "cpu" in made.folders:
            assert words.startswith("1 (cgroup")
            folder = Path(made.folders["cpu"])
            quota = folder / ("cpu.max" if made.version == 2 else "cpu.cfs_quota_us")
            assert quota.read_text().split()[0] == "100000"
        else:
            assert "affinity" in words
            code = "import os; print(len(os.sched_getaffinity(0)))"
            assert (await handle.exec("python3", ["-c", code])).stdout == "1\n"


OWN_SIZE = """
import json, os, subprocess
memory = dict(line.split(":") for line in open("/proc/meminfo"))
print(json.dumps([
    int(memory["MemTotal"].split()[0]) // 1024,
    int(memory["MemAvailable"].split()[0]) // 1024,
    open("/proc/cpuinfo").read().count("processor\\t:"),
    len(os.sched_getaffinity(0)),
    os.cpu_count(),
    int(subprocess.run(["nproc"], capture_output=True).stdout),
]))
"""


async def test_a_sandbox_sees_its_own_size(client: LocalClient, means: str) -> None:
    """Memory and CPUs are those of the limits, wherever a program looks, and memory that is in use
    is not shown as free."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this host has one CPU")

    async def seen() -> list[int]:
        return json.loads((await handle.exec("python3", ["-c", OWN_SIZE])).stdout)  # type: ignore[no-any-return]

    async with sandbox(client, memory_mib=400, cpus=1) as handle:
        total, free, *cpus = await seen()
        assert (total, cpus) == (400, [1, 1, 1, 1])
        assert 300 < free <= 400
        await handle.spawn(["python3", "-c", "x = b'x' * (200 << 20); import time; time.sleep(60)"])

        async def less() -> bool:
            return (await seen())[1] < 200

        await until(less)
        undo = "import os; os.sched_setaffinity(0, range(os.sysconf('SC_NPROCESSORS_CONF')))"
        assert "PermissionError" in (await handle.exec("python3", ["-c", undo])).stderr
        assert (await seen())[2:] == [1, 1, 1, 1]
        refused = "open('/proc/meminfo', 'w')"
        assert "Read-only" in (await handle.exec("python3", ["-c", refused])).stderr
    async with sandbox(client) as handle:
        assert (await seen())[2:] == [os.cpu_count(), *[len(os.sched_getaffinity(0))] * 3]


async def test_part_of_a_cpu(client: LocalClient, means: str) -> None:
    """Half a CPU is enforced by a cgroup, or refused: affinity knows whole ones only."""
    if means == "watch":
        with pytest.raises(SpecRefused, match=r"cpus=0\.5 needs a cgroup"):
            await client.create(SandboxSpec(cpus=0.5))
        assert await client.list() == []
        return
    async with sandbox(client, cpus=0.5) as handle:
        assert (await handle.info()).limits["cpus"].startswith("0.5 (cgroup")


async def test_no_core_dumps(client: LocalClient) -> None:
    """A crash leaves no image of its memory."""
    async with sandbox(client) as handle:
        assert (await handle.shell("ulimit -c")).stdout == "0\n"


async def test_defaults_are_said(client: LocalClient, means: str) -> None:
    """Each limit is in the sandbox's info, also if the spec leaves it open."""
    async with sandbox(client) as handle:
        found = (await handle.info()).limits
        assert set(found) == {"memory_mib", "cpus", "processes", "open_files", "disk_mib"}
        host = cgroup.memory_here()
        share = max(host / 4, min(2048 * MIB, host * 0.75))
        assert int(found["memory_mib"].split()[0]) == pytest.approx(share / MIB, rel=0.01)
        assert ("watch" in found["memory_mib"]) == (means == "watch")
        said = " ".join(handle.weaknesses)
        assert ("so a watch enforces memory_mib" in said) == (means == "watch")


def test_guest_is_told_what_no_cgroup_holds() -> None:
    """The part of the limits that is left to jailinit."""
    asked = Limits.of(SandboxSpec(memory_mib=200, processes=10, cpus=1, disk_mib=64))
    alone = asked.for_guest(None, ["/workspace"])
    assert alone["rlimits"]["RLIMIT_DATA"] == 250 * MIB
    assert alone["watch"]["memory"] == 200 * MIB
    held = asked.for_guest(Cgroup(2, dict.fromkeys(("memory", "pids", "cpu"), "/x")), [])
    assert held["rlimits"].keys() == {"RLIMIT_NOFILE", "RLIMIT_FSIZE"}
    assert held["watch"]["memory"] is None
    assert held["watch"]["processes"] is None


def test_open_files_never_above_the_hosts_own_limit() -> None:
    """The default gives way to the host's hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard == resource.RLIM_INFINITY or Limits.of(SandboxSpec()).open_files <= hard


def test_leftover_cgroups_are_swept(means: str) -> None:
    """Cgroups whose sandbox is unknown are deleted, unless they are young or in use."""
    if means == "watch":
        assert Cgroup.create("0123456789ab", Limits.of(SandboxSpec())) is None
        return
    made = Cgroup.create("0123456789ab", Limits.of(SandboxSpec()))
    assert made is not None
    cgroup.sweep_cgroups(set())
    assert [path for path in cgroups() if "0123456789ab" in path]
    for folder in made.folders.values():
        os.utime(folder, (time.time() - 1000, time.time() - 1000))
    cgroup.sweep_cgroups({"0123456789ab"})
    assert [path for path in cgroups() if "0123456789ab" in path]
    cgroup.sweep_cgroups(set())
    assert not [path for path in cgroups() if "0123456789ab" in path]
    made.remove()
    assert made.oom_kills() == 0
    assert not made.add(os.getpid())
