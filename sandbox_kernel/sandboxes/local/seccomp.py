"""The seccomp filter of the local jail: a classic BPF program for ``bwrap --seccomp FD``.

The jail has no capabilities and no way to another namespace, so most of what is refused here
would fail anyway. The filter takes the kernel code behind it out of reach: an exploitable bug in
io_uring, bpf or the mount API cannot be tried at all. It refuses a list and allows the rest,
because a kernel runs arbitrary scientific software, and a refused call gives an errno, not a
signal, so that programs can fall back.

The program is assembled here, without libseccomp. Linux runs it for every system call, but keeps a
bitmap of the calls that it always allows (since 5.11), so ordinary calls cost nothing.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox_kernel.errors import SandboxUnavailable

# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]
_NR = 0
_ARCH = 4


def _argument(index: int) -> int:
    """Offset of the low 32 bits of an argument (both machines are little-endian). All arguments
    inspected here are 32 bits wide for the kernel, which ignores their upper half, as we do."""
    return 16 + 8 * index


_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
_KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS


def _fail(error: int) -> int:
    return 0x00050000 | error  # SECCOMP_RET_ERRNO


_X32_BIT = 0x40000000
# Every CLONE_NEW* that clone() takes: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACE = (
    0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
_TIOCSTI = 0x5412  # types into the terminal
_TIOCLINUX = 0x541C  # pastes into a virtual console
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: AF_NETLINK, for getaddrinfo
_PERSONALITIES = (0, 0xFFFFFFFF)  # the ordinary one, and the question for the current one

# Numbers that all architectures share: every call since Linux 5.1.
_COMMON = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "open_tree_attr": 467,
}

_X86_64 = {
    **_COMMON,
    "ioctl": 16,
    "socket": 41,
    "clone": 56,
    "ptrace": 101,
    "syslog": 103,
    "uselib": 134,
    "personality": 135,
    "vhangup": 153,
    "modify_ldt": 154,
    "pivot_root": 155,
    "_sysctl": 156,
    "adjtimex": 159,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "sethostname": 170,
    "setdomainname": 171,
    "iopl": 172,
    "ioperm": 173,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "nfsservctl": 180,
    "lookup_dcookie": 212,
    "clock_settime": 227,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "migrate_pages": 256,
    "unshare": 272,
    "move_pages": 279,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "clock_adjtime": 305,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
}

_AARCH64 = {
    **_COMMON,
    "lookup_dcookie": 18,
    "ioctl": 29,
    "umount2": 39,
    "mount": 40,
    "pivot_root": 41,
    "nfsservctl": 42,
    "chroot": 51,
    "vhangup": 58,
    "quotactl": 60,
    "acct": 89,
    "personality": 92,
    "unshare": 97,
    "kexec_load": 104,
    "init_module": 105,
    "delete_module": 106,
    "clock_settime": 112,
    "syslog": 116,
    "ptrace": 117,
    "reboot": 142,
    "sethostname": 161,
    "setdomainname": 162,
    "settimeofday": 170,
    "adjtimex": 171,
    "socket": 198,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "clone": 220,
    "swapon": 224,
    "swapoff": 225,
    "migrate_pages": 238,
    "move_pages": 239,
    "perf_event_open": 241,
    "fanotify_init": 262,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "clock_adjtime": 266,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "finit_module": 273,
    "bpf": 280,
    "userfaultfd": 282,
    "kexec_file_load": 294,
}

# Not refused outright: their arguments decide, or another errno is the useful one.
_SPECIAL = ("clone", "clone3", "ioctl", "socket", "personality")


@dataclass(frozen=True)
class _Machine:
    audit: int
    """AUDIT_ARCH_*: what seccomp calls the architecture of a system call."""
    numbers: Mapping[str, int]
    has_x32: bool = False


_MACHINES = {
    "x86_64": _Machine(0xC000003E, _X86_64, has_x32=True),
    "aarch64": _Machine(0xC00000B7, _AARCH64),
}


def program(machine: str | None = None) -> bytes:
    """The filter for ``machine`` (default: this one) as an array of ``struct sock_filter``.

    Raises SandboxUnavailable for a machine whose system calls are not known here: a jail without
    its filter would be a silent downgrade.
    """
    name = machine or platform.machine()
    known = _MACHINES.get(name)
    if known is None:
        raise SandboxUnavailable(
            f"The local jail has no seccomp filter for {name!r} machines, only for "
            f"{' and '.join(sorted(_MACHINES))}. Use another backend on this machine."
        )
    return _filter(known).assemble()


def _filter(machine: _Machine) -> _Assembler:
    number = machine.numbers
    asm = _Assembler()

    # The numbers below mean something else on a foreign architecture (i386 calls on x86_64).
    asm.load(_ARCH)
    asm.jump(_EQUAL, machine.audit, otherwise="kill")

    asm.load(_NR)
    if machine.has_x32:
        asm.jump(_ANY_BIT, _X32_BIT, then="no such call")
    # Its flags lie in memory, where a filter cannot look. libc falls back to clone().
    asm.jump(_EQUAL, number["clone3"], then="no such call")
    for name in ("clone", "ioctl", "socket", "personality"):
        asm.jump(_EQUAL, number[name], then=name)
    for name, value in number.items():
        if name not in _SPECIAL:
            asm.jump(_EQUAL, value, then="refuse")
    asm.finish(_ALLOW)

    asm.label("clone")
    asm.load(_argument(0))
    asm.jump(_ANY_BIT, _NEW_NAMESPACE, then="refuse", otherwise="allow")

    asm.label("ioctl")
    asm.load(_argument(1))
    asm.jump(_EQUAL, _TIOCSTI, then="refuse")
    asm.jump(_EQUAL, _TIOCLINUX, then="refuse", otherwise="allow")

    asm.label("personality")
    asm.load(_argument(0))
    for allowed in _PERSONALITIES:
        asm.jump(_EQUAL, allowed, then="allow")
    asm.finish(_fail(errno.EPERM))

    asm.label("socket")
    asm.load(_argument(0))
    for family in _FAMILIES:
        asm.jump(_EQUAL, family, then="allow")
    asm.finish(_fail(errno.EAFNOSUPPORT))

    asm.label("allow")
    asm.finish(_ALLOW)
    asm.label("refuse")
    asm.finish(_fail(errno.EPERM))
    asm.label("no such call")
    asm.finish(_fail(errno.ENOSYS))
    asm.label("kill")
    asm.finish(_KILL)
    return asm


class _Assembler:
    """Classic BPF with labels. Jumps go forward only, and over at most 255 instructions."""

    def __init__(self) -> None:
        self._code: list[tuple[int, str, str, int]] = []
        self._labels: dict[str, int] = {}

    def load(self, offset: int) -> None:
        """Load 32 bits of struct seccomp_data into the accumulator."""
        self._code.append((_LOAD, "", "", offset))

    def jump(self, test: int, value: int, *, then: str = "", otherwise: str = "") -> None:
        """Compare the accumulator and jump; no label means: go on with the next instruction."""
        self._code.append((test, then, otherwise, value))

    def finish(self, action: int) -> None:
        """End the program with an action."""
        self._code.append((_RETURN, "", "", action))

    def label(self, name: str) -> None:
        """Name the next instruction."""
        self._labels[name] = len(self._code)

    def assemble(self) -> bytes:
        return b"".join(
            struct.pack("=HBBI", code, self._distance(at, then), self._distance(at, other), value)
            for at, (code, then, other, value) in enumerate(self._code)
        )

    def _distance(self, at: int, label: str) -> int:
        distance = self._labels[label] - at - 1 if label else 0
        if not 0 <= distance <= 255:
            raise AssertionError(f"The label {label!r} is {distance} instructions away.")
        return distance
