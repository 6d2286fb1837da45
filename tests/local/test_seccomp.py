"""The jail's seccomp filter: what it refuses, and that ordinary programs do not notice it."""

from __future__ import annotations

import errno
import os
import platform
import struct

import pytest

from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.sandboxes.local import bubblewrap, seccomp, syscalls

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


def _numbers(machine: str = platform.machine()) -> dict[str, int]:
    return syscalls.numbers(syscalls.ALLOWED + syscalls.BY_ARGUMENTS + syscalls.REFUSED, machine)


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
        elif op == seccomp._GO:
            at += k
        else:
            tests = {
                seccomp._EQUAL: accumulator == k,
                seccomp._AT_LEAST: accumulator >= k,
                seccomp._ANY_BIT: bool(accumulator & k),
            }
            at += yes if tests[op] else no


def test_every_jailed_process_runs_under_the_filter(jails: Jails) -> None:
    """The kernel itself says that a filter is in force, for children too."""
    status = jails.run(["sh", "-c", "grep Seccomp: /proc/self/status"]).stdout
    assert status.split() == ["Seccomp:", "2"]


def test_the_escape_surface_is_refused(jails: Jails) -> None:
    """Each call on the list fails with EPERM before the kernel looks at its arguments."""
    refused = syscalls.numbers(syscalls.REFUSED, platform.machine())
    found = jails.answer(
        f"{_SYSCALL}\nanswer({{name: call(nr, 0, 0, 0, 0, 0) for name, nr in {refused!r}.items()}})"
    )
    assert found == dict.fromkeys(refused, errno.EPERM)


def test_what_is_not_allowed_does_not_exist(jails: Jails) -> None:
    """Calls of later kernels (listmount, statmount, file_getattr), dead ones and numbers that
    nobody has given out yet are ENOSYS, also where this kernel has them: a new call is out of
    reach until somebody has thought about it."""
    known = set(_numbers().values())
    unknown = [n for n in (*range(600), 4096, 2**31, 2**32 - 1) if n not in known]
    found = jails.answer(f"{_SYSCALL}\nanswer([n for n in {unknown} if call(n, 0, 0, 0) != 38])")
    assert found == []
    assert len([n for n in unknown if n < 470]) > 20


def test_a_call_can_be_refused_to_one_jail() -> None:
    """Some calls are refused only where a limit depends on that."""
    calls = _numbers("x86_64")
    program = seccomp.program("x86_64", refuse=["sched_setaffinity"])
    decided = [_simulate(program, calls[f"sched_{x}affinity"]) for x in ("set", "get")]
    assert decided == [0x50000 | errno.EPERM, 0x7FFF0000]


def test_clone_makes_processes_but_no_namespaces(jails: Jails) -> None:
    """Every CLONE_NEW* flag is refused; clone3 is hidden so that libc uses clone."""
    flags = [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]
    numbers = _numbers()
    found = jails.answer(
        f"""{_SYSCALL}
sigchld = 17
answer([[call({numbers["clone"]}, flag | sigchld, 0, 0, 0, 0) for flag in {flags}],
        call(435, 0, 0)])
"""
    )
    assert found == [[errno.EPERM] * 7, errno.ENOSYS]


def test_socket_families(jails: Jails) -> None:
    """Unix, internet and netlink sockets work; the rest of the kernel's protocols is hidden: other
    families, also in pairs, netlink to anything but the routes, and internet protocols for which
    modules would be loaded (SCTP, DCCP, MPTCP)."""
    found = jails.answer(
        """
import socket
def opens(make, *arguments):
    try:
        made = make(*arguments)
    except OSError as error:
        return error.errno
    for one in made if isinstance(made, tuple) else (made,):
        one.close()
    return 0
stream, raw = socket.SOCK_STREAM, socket.SOCK_RAW
hidden = (17, 29, 30, 31, 38, 40, 44)
answer([
    [opens(socket.socket, f, raw if f == 16 else stream) for f in (1, 2, 10, 16)],
    [opens(socket.socket, f, stream) for f in hidden],
    [opens(socket.socketpair, 1, stream), *(opens(socket.socketpair, f, stream) for f in hidden)],
    [opens(socket.socket, 16, raw, p) for p in (4, 6, 9, 12, 15, 16)],
    [opens(socket.socket, f, stream, p) for f in (2, 10) for p in (33, 132, 262)],
    opens(socket.socket, 2, stream, 6), opens(socket.socket, 10, socket.SOCK_DGRAM, 17),
])
"""
    )
    family, protocol = errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT
    assert found == [
        *([0] * 4, [family] * 7, [0, *[family] * 7], [protocol] * 6, [protocol] * 6, 0, 0),
    ]


def test_limits_of_others_can_be_seen_but_not_changed(jails: Jails) -> None:
    """The jail's keepers have the same uid; without files or memory their watch would be blind.
    One's own limits can be changed, and be named by one's own number to be seen."""
    found = jails.answer(
        """
import resource
def tried(pid, *limits):
    try:
        return len(resource.prlimit(pid, resource.RLIMIT_NOFILE, *limits))
    except PermissionError as error:
        return error.errno
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 100))
child = os.fork()
if child == 0:
    os.execvp("sleep", ["sleep", "60"])
answer([tried(child), tried(child, (5, 5)), tried(1, (5, 5)), tried(0, (40, 100)),
        tried(os.getpid()), resource.getrlimit(resource.RLIMIT_NOFILE)])
os.kill(child, 9)
"""
    )
    assert found == [2, errno.EPERM, errno.EPERM, 2, 2, [40, 100]]


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
    audit = seccomp._MACHINES[machine]
    program = seccomp.program(machine)
    numbers = _numbers(machine)
    refuse, allow, none = 0x50000 | errno.EPERM, 0x7FFF0000, 0x50000 | errno.ENOSYS

    def decide(name: str, *arguments: int) -> int:
        return _simulate(program, numbers[name], arguments, audit)

    assert {decide(name) for name in syscalls.numbers(syscalls.REFUSED, machine)} == {refuse}
    assert {decide(name) for name in syscalls.numbers(syscalls.ALLOWED, machine)} == {allow}
    unknown = [n for n in range(1000) if n not in numbers.values()]
    assert {_simulate(program, n, (), audit) for n in unknown} == {none}
    assert 435 in unknown  # clone3
    assert decide("clone", 17) == allow
    assert decide("clone", 0x10000000 | 17) == refuse
    assert decide("ioctl", 0, 0x5412) == refuse
    for request in (0x5401, 0x541B, 0x8905, 0x8910, 0x8933, 0x8A00, 0x8C00):
        assert decide("ioctl", 0, request) == allow
    for request in (0x8912, 0x8915, 0x8932, 0x8934, 0x8946, 0x89FF, 0x8B00, 0x8BFF):
        assert decide("ioctl", 0, request) == 0x50000 | errno.ENODEV
    for call in ("socket", "socketpair"):
        assert decide(call, 2) == allow
        assert decide(call, 2, 1, 132) == 0x50000 | errno.EPROTONOSUPPORT
        assert decide(call, 16, 3, 0) == allow
        assert decide(call, 16, 3, 12) == 0x50000 | errno.EPROTONOSUPPORT
        assert decide(call, 40) == 0x50000 | errno.EAFNOSUPPORT
    assert decide("personality", 0xFFFFFFFF) == allow
    assert decide("personality", 0x40000) == refuse
    assert [decide("prlimit64", pid, 7, new) for pid, new in ((0, 8), (1, 0))] == [allow, allow]
    assert [decide("prlimit64", 1, 7, new) for new in (8, 1 << 40)] == [refuse, refuse]
    assert [decide("prlimit64", 0, 4, new) for new in (0, 8)] == [allow, 0x50000]
    assert [decide("prlimit64", 0, 4, 8, old) for old in (8, 1 << 40)] == [refuse, refuse]
    assert [decide("setrlimit", limit) for limit in (4, 7)] == [0x50000, allow]
    assert _simulate(program, numbers["clone"], arch=0x40000003) == 0x80000000
    assert len(set(numbers.values())) == len(numbers)


def test_the_machines_have_the_same_calls() -> None:
    """But for those that newer machines were spared."""
    x86, arm = _numbers("x86_64"), _numbers("aarch64")
    assert set(arm) <= set(x86)
    special = {"iopl", "ioperm", "modify_ldt", "arch_prctl", "uretprobe", "uprobe"}
    old = """access alarm chmod chown creat dup2 epoll_create epoll_wait eventfd fork futimesat
        getdents getpgrp inotify_init lchown link lstat mkdir mknod open pause pipe poll readlink
        rename rmdir select signalfd stat symlink time unlink utime utimes vfork"""
    assert set(x86) - set(arm) == special | set(old.split())


def test_an_unknown_machine_is_refused() -> None:
    """No filter, no jail."""
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        seccomp.program("riscv64")


_PROGRAMS = {
    "gcc": "echo 'int main(){return 0;}' > t.c && gcc t.c -o t && ./t && echo works",
    "git": "git init -q . && touch a && git add a && git -c user.name=a -c user.email=a commit -qma"
    " && git gc -q && git status --porcelain && echo works",
    "node": "node -e \"require('fs').promises.writeFile('n', 'x').then(() => require('fs').promises"
    ".readFile('n')).then(() => new Promise(r => new (require('worker_threads').Worker)("
    "'', {eval: true}).on('exit', r))).then(() => console.log('works'))\"",
    "java": "printf 'class T { public static void main(String[] a) throws Exception { Thread t = "
    'new Thread(() -> System.out.println("works")); t.start(); t.join(); } }\' > T.java'
    " && java -Xmx128m T.java",
    "perl": "perl -e '$p = fork; exit 0 unless $p; waitpid $p, 0; print \"works\\n\" unless $?'",
    "tar": "echo x > f && tar cf t.tar f && tar xf t.tar && cp --reflink=auto f g && mv g h"
    " && find . -name h | xargs cat | sed s/x/works/",
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_other_programs_do_not_notice(name: str) -> None:
    """Compilers, version control and other languages' run times find all the calls they need."""
    if not os.access(f"/usr/bin/{name}", os.X_OK):
        pytest.skip(f"there is no {name} here")
    jails = Jails(bubblewrap.find())
    ran = jails.run(["sh", "-c", f"cd /tmp && {_PROGRAMS[name]}"], tmp_bytes=256 * 2**20)
    assert ran.stdout.split()[-1:] == ["works"], ran.stderr
