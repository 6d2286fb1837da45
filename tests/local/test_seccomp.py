"""The jail's seccomp filter: what it refuses, and that ordinary programs do not notice it."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.sandboxes.local import seccomp

from .jails import Jails

_SYSCALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
    return ctypes.get_errno() if result == -1 else 0
"""


def _numbers() -> dict[str, int]:
    return dict(seccomp._MACHINES[platform.machine()].numbers)


def _simulate(
    program: bytes, nr: int, arguments: tuple[int, ...] = (), arch: int = 0xC000003E
) -> int:
    """Run a filter as the kernel would; for the machine that this one is not."""
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<IIQ6Q", nr, arch, 0, *padded)
    code = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == seccomp._LOAD:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == seccomp._RETURN:
            return int(k)
        else:
            hit = accumulator == k if op == seccomp._EQUAL else accumulator & k
            at += yes if hit else no


def test_every_jailed_process_runs_under_the_filter(jails: Jails) -> None:
    """The kernel itself says that a filter is in force, for children too."""
    status = jails.run(["sh", "-c", "grep Seccomp: /proc/self/status"]).stdout
    assert status.split() == ["Seccomp:", "2"]


def test_the_escape_surface_is_refused(jails: Jails) -> None:
    """Each call on the list fails with EPERM before the kernel looks at its arguments."""
    refused = {k: v for k, v in _numbers().items() if k not in seccomp._SPECIAL}
    found = jails.answer(
        f"{_SYSCALL}\nanswer({{name: call(nr, 0, 0, 0, 0, 0) for name, nr in {refused!r}.items()}})"
    )
    assert found == dict.fromkeys(refused, errno.EPERM)


def test_clone_makes_processes_but_no_namespaces(jails: Jails) -> None:
    """Every CLONE_NEW* flag is refused; clone3 is hidden so that libc uses clone."""
    flags = [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]
    numbers = _numbers()
    found = jails.answer(
        f"""{_SYSCALL}
sigchld = 17
answer([[call({numbers["clone"]}, flag | sigchld, 0, 0, 0, 0) for flag in {flags}],
        call({numbers["clone3"]}, 0, 0)])
"""
    )
    assert found == [[errno.EPERM] * 7, errno.ENOSYS]


def test_socket_families(jails: Jails) -> None:
    """Unix, internet and netlink sockets work; the rest of the kernel's protocols is hidden."""
    found = jails.answer(
        """
import socket
def opens(family):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM).close()
    except OSError as error:
        return error.errno
    return 0
answer([[opens(f) for f in (1, 2, 10, 16)], [opens(f) for f in (17, 29, 31, 38, 40, 44)]])
"""
    )
    assert found == [[0] * 4, [errno.EAFNOSUPPORT] * 6]


def test_no_typing_into_a_terminal(jails: Jails) -> None:
    """TIOCSTI and TIOCLINUX are refused, also with rubbish in the upper half of the request."""
    ioctl = _numbers()["ioctl"]
    found = jails.answer(
        f"""{_SYSCALL}
import pty, termios
master, slave = pty.openpty()
requests = [termios.TIOCSTI, 0x541C, termios.TIOCSTI | 1 << 32, 0x541C | 1 << 63]
buffer = ctypes.create_string_buffer(64)
size = call({ioctl}, slave, termios.TIOCGWINSZ, ctypes.addressof(buffer))
answer([size, [call({ioctl}, slave, r, ctypes.addressof(buffer)) for r in requests]])
"""
    )
    assert found == [0, [errno.EPERM] * 4]


def test_personality_may_be_asked_but_not_changed(jails: Jails) -> None:
    """Turning off address randomisation and its like is refused."""
    personality = _numbers()["personality"]
    found = jails.answer(
        f"{_SYSCALL}\nanswer([call({personality}, p) for p in (0, 0xffffffff, 0x0040000, 8)])"
    )
    assert found == [0, 0, errno.EPERM, errno.EPERM]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is an ABI of x86_64")
def test_the_x32_abi_does_not_exist(jails: Jails) -> None:
    """The same calls under their x32 numbers are no way around the list."""
    found = jails.answer(f"{_SYSCALL}\nanswer([call(n | 0x40000000) for n in (39, 101, 250)])")
    assert found == [errno.ENOSYS] * 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86 machine code")
def test_a_foreign_architecture_is_killed(jails: Jails) -> None:
    """A 32-bit call (int 0x80), whose numbers mean something else, ends the process."""
    found = jails.answer(
        """
import ctypes, mmap, subprocess
code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20 (getpid); int 0x80; ret
child = os.fork()
if child == 0:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    os._exit(0)
answer(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    )
    assert found == 31  # SIGSYS


def test_ordinary_python_does_not_notice(jails: Jails) -> None:
    """Threads, processes, pools, memory maps, shared memory, pipes and timers all work."""
    found = jails.answer(
        """
import asyncio, concurrent.futures, mmap, multiprocessing, signal, subprocess, tempfile, threading
from multiprocessing import shared_memory

def square(n):
    return n * n

results = {}
thread = threading.Thread(target=lambda: results.update(thread=True))
thread.start(); thread.join()
results["subprocess"] = subprocess.run(["echo", "hi"], capture_output=True).stdout.decode()
with multiprocessing.get_context("fork").Pool(2) as pool:
    results["pool"] = pool.map(square, [2, 3])
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results["threads"] = list(pool.map(square, range(4)))
area = mmap.mmap(-1, 64 * 2**20)
area[-1:] = b"x"
area.madvise(mmap.MADV_DONTNEED)
block = shared_memory.SharedMemory(create=True, size=4096)
block.buf[0] = 7
results["shared"] = block.buf[0]
block.close(); block.unlink()
async def later():
    process = await asyncio.create_subprocess_exec("true")
    return await process.wait()
results["asyncio"] = asyncio.run(later())
results["affinity"] = len(os.sched_getaffinity(0)) > 0
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
signal.setitimer(signal.ITIMER_REAL, 0.01)
results["signal"] = signal.sigtimedwait([signal.SIGALRM], 30).si_signo
with tempfile.TemporaryFile() as file:
    results["written"] = file.write(b"data")
answer(results)
"""
    )
    assert found == {
        "thread": True,
        "subprocess": "hi\n",
        "pool": [4, 9],
        "threads": [0, 1, 4, 9],
        "shared": 7,
        "asyncio": 0,
        "affinity": True,
        "signal": 14,
        "written": 4,
    }


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_both_machines_have_the_same_filter(machine: str) -> None:
    """The filter of the machine that this one is not decides alike (simulated)."""
    known = seccomp._MACHINES[machine]
    program = seccomp.program(machine)
    numbers = known.numbers
    refuse, allow = 0x50000 | errno.EPERM, 0x7FFF0000

    def decide(name: str, *arguments: int) -> int:
        return _simulate(program, numbers[name], arguments, known.audit)

    assert {decide(n) for n in numbers if n not in seccomp._SPECIAL} == {refuse}
    assert decide("clone", 17) == allow
    assert decide("clone", 0x10000000 | 17) == refuse
    assert decide("clone3") == 0x50000 | errno.ENOSYS
    assert decide("ioctl", 0, 0x5412) == refuse
    assert decide("ioctl", 0, 0x5401) == allow
    assert decide("socket", 2) == allow
    assert decide("socket", 40) == 0x50000 | errno.EAFNOSUPPORT
    assert decide("personality", 0xFFFFFFFF) == allow
    assert decide("personality", 0x40000) == refuse
    assert _simulate(program, 63, arch=known.audit) == allow
    assert _simulate(program, numbers["clone"], arch=0x40000003) == 0x80000000
    names = set(seccomp._MACHINES["x86_64"].numbers)
    x86_only = {"iopl", "ioperm", "modify_ldt", "uselib", "_sysctl"}
    assert names - set(seccomp._MACHINES["aarch64"].numbers) == x86_only


def test_an_unknown_machine_is_refused() -> None:
    """No filter, no jail."""
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        seccomp.program("riscv64")
