"""Hostile code tries to use up the host: processes, memory, files, disk, log."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sandbox_kernel.guest.commands.start import LOG_LIMIT
from tests.helpers.waiting import wait_until

from .hosts import Failed, Host, Jail, NoAnswer

MIB = 2**20
KILLED = "exit code -9"


def in_cgroup(jail: Jail, name: str) -> bool:
    return "cgroup" in jail.call("info")["limits"][name]


def test_a_fork_bomb_is_contained(victim: Host) -> None:
    """No more processes than allowed; the sandbox still answers, and can be removed."""
    with victim.jail(processes=50) as jail:
        bomb = "while True:\n try: os.fork()\n except OSError: pass"
        jail.call("spawn", argv=["python3", "-c", f"import os\n{bomb}"])
        wait_until(lambda: jail.call("info")["detail"]["processes"] > 1, "the bomb goes off")
        seen = []
        for _ in range(20):
            info = jail.call("info")
            assert info["status"] == "running"
            seen.append(info["detail"]["processes"])
        # A watch, which is used where nothing better is allowed, sees an excess after the fact.
        watched = "watch" in jail.call("info")["limits"]["processes"]
        assert max(seen) <= (2000 if watched else 50)
    with victim.jail() as other:
        assert other.run("echo", "fine")["stdout"] == "fine\n"


def test_threads_count_as_processes(victim: Host) -> None:
    """A thread bomb meets the same limit."""
    with victim.jail(processes=40) as jail:
        found = jail.answer(
            """
            import threading, time
            made = 0
            try:
                for made in range(400):
                    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            except RuntimeError:
                pass
            print("ANSWER", made, flush=True)
            os._exit(0)
            """
        )
        assert found < 60


_HOG = """
blocks = []
for _ in range(4096):
    blocks.append(bytearray(os.urandom(4096)) * 256)
answer("got it all")
"""
_MEMFD_HOG = """
fds = []
for _ in range(4096):
    fds.append(os.memfd_create("hog"))
    os.write(fds[-1], b"x" * 2**20)
answer("got it all")
"""
_SHARED_HOG = """
import mmap
maps = []
for _ in range(4096):
    maps.append(mmap.mmap(-1, 2**20))
    maps[-1].write(b"x" * 2**20)
answer("got it all")
"""
_TMP_HOG = """
for place in ("/tmp", "/dev/shm", "/run"):
    try:
        with open(place + "/hog", "wb") as file:
            for _ in range(2048):
                file.write(b"x" * 2**20)
    except OSError:
        pass
answer(sum(os.path.getsize(p + "/hog") for p in ("/tmp", "/dev/shm", "/run")) > 600 * 2**20)
"""


@pytest.mark.parametrize("how", [_HOG, _SHARED_HOG], ids=["private", "shared"])
def test_memory_is_limited(victim: Host, how: str) -> None:
    """Who takes too much is refused or killed; the sandbox and the host go on."""
    with victim.jail(memory_mib=200) as jail:
        with pytest.raises(NoAnswer, match=rf"^{KILLED}|MemoryError"):
            jail.answer(how)
        assert jail.run("echo", "fine")["stdout"] == "fine\n"


def test_memory_that_no_process_has_mapped_is_limited(victim: Host) -> None:
    """Memory files count, too, where the host's kernel does the counting."""
    with victim.jail(memory_mib=200) as jail:
        if not in_cgroup(jail, "memory_mib"):
            pytest.skip("without a cgroup nobody can count this; docs/security.md says so")
        with pytest.raises(NoAnswer, match=f"^{KILLED}"):
            jail.answer(_MEMFD_HOG)
        assert jail.call("info")["oom_kills"] >= 1


def test_files_in_memory_are_limited(victim: Host) -> None:
    """/tmp, /dev/shm and /run have sizes, and count as memory."""
    with victim.jail(memory_mib=200) as jail:
        try:
            too_much = jail.answer(_TMP_HOG)
        except NoAnswer as killed:
            too_much = not str(killed).startswith(KILLED)
        assert not too_much


def test_open_files_are_limited(victim: Host) -> None:
    """A process has so many and no more, and cannot raise the limit."""
    with victim.jail(open_files=100) as jail:
        found = jail.answer(
            """
            import resource
            kept = []
            def hoard():
                while True:
                    kept.append(os.dup(0))
            def gain():
                try:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
                except ValueError as error:
                    raise OSError(errno.EPERM, "refused")
            error = attempt(hoard)
            taken = len(kept)
            for fd in kept: os.close(fd)
            answer([error, taken <= 100, attempt(gain)])
            """
        )
        assert found == ["EMFILE", True, "EPERM"]


_WRITE = """
import time
unlink = sys.argv[1] == "unlinked"
kept = []
for number in range(64):
    file = open(f"/workspace/hog-{number}", "wb")
    if unlink:
        os.unlink(file.name)
    for _ in range(16):
        file.write(b"x" * 2**20)
        file.flush()
    kept.append(file)
time.sleep(30)
answer("got it all")
"""


@pytest.mark.parametrize("how", ["named", "unlinked"])
def test_disk_is_limited(victim: Host, how: str) -> None:
    """Who fills the workspace is stopped, also if the files have no names any more."""
    with victim.jail(disk_mib=64) as jail:
        own = "own file system" in jail.call("info")["limits"]["disk_mib"]
        with pytest.raises(NoAnswer, match="Errno 28" if own else f"^{KILLED}"):
            jail.answer(_WRITE, how)
        assert ("disk full" in jail.call("info")["last_kill"]) is not own
        assert jail.run("/bin/sh", "-c", "rm -f /workspace/hog-*; echo fine")["stdout"] == "fine\n"


def test_the_hosts_own_use_of_the_disk_is_never_charged(victim: Host) -> None:
    """An idle sandbox, a process in it that cannot be looked into (as our own are), and a host
    that fills the disk around it, over and over: nothing in the sandbox is killed."""
    with victim.jail(disk_mib=16) as jail:
        hide = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); time.sleep(600)"
        jail.call("spawn", argv=["python3", "-c", hide])
        jail.call("spawn", argv=["sleep", "600"])
        wait_until(lambda: jail.call("info")["detail"]["processes"] == 2)
        big = victim.home / "big"
        for _ in range(2):
            for step in range(1, 5):
                with big.open("ab") as file:
                    os.posix_fallocate(file.fileno(), 0, step * 24 * MIB)
                time.sleep(0.3)  # the watch looks far more often
            big.unlink()
        info = jail.call("info")
        assert (info["last_kill"], info["detail"]["processes"]) == ("", 2)


@pytest.mark.parametrize("how", ["closed", "deep", "mapped"])
def test_disk_that_is_hidden_is_counted(victim: Host, how: str) -> None:
    """In a folder that nobody may enter, in one too deep for a path, in deleted files that are
    only mapped."""
    with victim.jail(disk_mib=32) as jail:
        with pytest.raises(NoAnswer, match=rf"^{KILLED}|Errno 28|^exit code -7"):
            jail.answer(_HIDE, how)
        assert jail.run("echo", "fine")["stdout"] == "fine\n"


_HIDE = """
import mmap, time
how = sys.argv[1]
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
if how == "closed":
    os.mkdir("/workspace/d"); os.chdir("/workspace/d"); os.chmod(".", 0o300)
elif how == "deep":
    for _ in range(50):
        os.mkdir("d" * 200); os.chdir("d" * 200)
for number in range(128):
    fd = os.open(str(number), os.O_RDWR | os.O_CREAT)
    if how == "mapped":
        os.truncate(fd, 2**20)
        place = libc.mmap(None, 2**20, mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        os.unlink(str(number))
        ctypes.memset(place, 120, 2**20)
        libc.msync(ctypes.c_void_p(place), 2**20, 4)
    else:
        os.write(fd, b"x" * 2**20)
    os.close(fd)
    time.sleep(0.02)
time.sleep(20)
answer("got it all")
"""


def test_a_flood_of_empty_files_is_limited(victim: Host) -> None:
    """Files without content take no space that free space would show, and yet count: 2048 of
    them are all that 2 MiB allow. A watch comes a little late."""
    with victim.jail(disk_mib=2) as jail:
        with pytest.raises(NoAnswer, match=rf"^{KILLED}|Errno 28"):
            jail.answer(_FLOOD)
        assert jail.run("echo", "fine")["stdout"] == "fine\n"


_FLOOD = """
import time
for number in range(200000):
    if number % 1000 == 0:
        os.mkdir(f"/workspace/{number}")
    os.close(os.open(f"/workspace/{number // 1000 * 1000}/{number}", os.O_CREAT))
time.sleep(20)
answer("got it all")
"""


def test_no_file_is_larger_than_the_limit(victim: Host) -> None:
    """The host's kernel itself refuses to let one file grow beyond it."""
    with victim.jail(disk_mib=16) as jail:
        code = """
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        answer(attempt(os.truncate, os.open("/workspace/f", os.O_CREAT | os.O_RDWR), 2**30))
        """
        assert jail.answer(code) == "EFBIG"


def test_a_flood_of_log_does_not_grow(victim: Host) -> None:
    """Output of spawned commands is kept to a few megabytes, and what drives a terminal is not
    passed on."""
    with victim.jail() as jail:
        jail.call("spawn", argv=["/bin/sh", "-c", r"printf '\033[2J\007'; yes 0123456789abcdef"])
        log = Path(jail.call("folder")) / "log"
        wait_until(lambda: "cut here" in log.read_bytes()[:100].decode(errors="replace"))
        largest = max(log.stat().st_size for _ in range(2000))
        assert largest <= LOG_LIMIT + MIB
        shown = jail.call("logs")
        assert len(shown) <= MIB
        assert "\033" not in shown
        assert jail.call("info")["status"] == "running"


def test_terminal_sequences_in_the_log_are_harmless(victim: Host) -> None:
    """Nobody's screen is cleared by reading a log."""
    with victim.jail() as jail:
        jail.call("spawn", argv=["printf", r"\033]0;title\007\033[2Jshown\n"])
        wait_until(lambda: "shown" in jail.call("logs"))
        assert not {"\033", "\007"} & set(jail.call("logs"))


def test_a_request_that_is_too_long(jail: Jail) -> None:
    """Is refused by the host itself, with the limit, and harms nothing."""
    with pytest.raises(Failed, match="too long"):
        jail.run("echo", "x" * (2 * MIB))
    assert jail.run("echo", "fine")["stdout"] == "fine\n"
