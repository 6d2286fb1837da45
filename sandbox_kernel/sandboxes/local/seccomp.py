"""The seccomp filter of the local jail: a classic BPF program for ``bwrap --seccomp FD``.

The jail has no capabilities and no way to another namespace, so most of what is refused here
would fail anyway. The filter takes the kernel code behind it out of reach: an exploitable bug in
io_uring, bpf or the mount API cannot be tried at all, and one in a call that nobody has heard of
yet neither. It allows a list (``syscalls.py``). Of the rest, what programs may well try fails with
EPERM, and everything else with ENOSYS, as on a kernel that does not have it; nothing is killed, so
programs can fall back.

The program is assembled here, without libseccomp. Linux runs it for every system call, but keeps a
bitmap of the calls that it always allows (since 5.11), so ordinary calls cost nothing.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.sandboxes.local.syscalls import ALLOWED, BY_ARGUMENTS, REFUSED, numbers

# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]
_NR = 0
_ARCH = 4


def _argument(index: int) -> int:
    """Offset of the low 32 bits of an argument (both machines are little-endian). But for pointers
    all that are inspected here are 32 bits wide for the kernel, which ignores their upper half, as
    we do."""
    return 16 + 8 * index


_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_GO = 0x05  # BPF_JMP | BPF_JA
_RETURN = 0x06  # BPF_RET | BPF_K
_FAR = 4096

_ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
_KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS


def _fail(error: int) -> int:
    return 0x00050000 | error  # SECCOMP_RET_ERRNO


# Every CLONE_NEW* that clone() takes: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACE = (
    0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
_TIOCSTI = 0x5412  # types into the terminal
_TIOCLINUX = 0x541C  # pastes into a virtual console
_AF_NETLINK, _NETLINK_ROUTE = 16, 0  # for getaddrinfo and the like
# Any, ICMP, TCP, UDP, ICMPv6. For others the kernel would load modules.
_PROTOCOLS = (0, 1, 6, 17, 58)
_RLIMIT_CORE = 4
_PERSONALITIES = (0, 0xFFFFFFFF)  # the ordinary one, and the question for the current one


@dataclass(frozen=True)
class _Machine:
    audit: int
    """AUDIT_ARCH_*: what seccomp calls the architecture of a system call."""
    allowed: Mapping[str, int]
    by_arguments: Mapping[str, int]
    refused: Mapping[str, int]

    @classmethod
    def of(cls, name: str, audit: int) -> _Machine:
        return cls(audit, *(numbers(table, name) for table in (ALLOWED, BY_ARGUMENTS, REFUSED)))


_MACHINES = {
    "x86_64": _Machine.of("x86_64", 0xC000003E),
    "aarch64": _Machine.of("aarch64", 0xC00000B7),
}


def program(machine: str | None = None, *, refuse: Collection[str] = ()) -> bytes:
    """The filter for ``machine`` (default: this one) as an array of ``struct sock_filter``.

    ``refuse`` names calls that this jail may not use although others may. Raises
    SandboxUnavailable for a machine whose system calls are not known here: a jail without its
    filter would be a silent downgrade.
    """
    name = machine or platform.machine()
    known = _MACHINES.get(name)
    if known is None:
        raise SandboxUnavailable(
            f"The local jail has no seccomp filter for {name!r} machines, only for "
            f"{' and '.join(sorted(_MACHINES))}. Use another backend on this machine."
        )
    return _filter(known, refuse).assemble()


def _filter(machine: _Machine, refuse: Collection[str]) -> _Assembler:
    decisions: dict[int, str] = {}
    for name, number in (*machine.allowed.items(), *machine.by_arguments.items()):
        decisions[number] = name if name in machine.by_arguments else "allow"
        if name in refuse:
            decisions[number] = "refuse"
    decisions.update(dict.fromkeys(machine.refused.values(), "refuse"))

    asm = _Assembler()
    # The numbers mean something else on a foreign architecture (i386 calls on x86_64). Those of
    # the x32 ABI are this one's with a bit set, and larger than all that are known.
    asm.load(_ARCH)
    asm.jump(_EQUAL, machine.audit, then="this machine")
    asm.finish(_KILL)
    asm.label("this machine")
    asm.load(_NR)
    _search(asm, _ranges(decisions))

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

    # Everybody may see anybody's limits, but change his own only: those of the jail's keepers,
    # who have the same uid, are what their watch depends on. The limit of core dumps stays what
    # the host has made it. Programs that set it want none, so they are told that it is done.
    asm.label("prlimit64")
    for half in (0, 4):
        asm.load(_argument(2) + half)
        asm.jump(_EQUAL, 0, otherwise="new limit")
    asm.finish(_ALLOW)
    asm.label("new limit")
    asm.load(_argument(0))
    asm.jump(_EQUAL, 0, otherwise="refuse")
    asm.load(_argument(1))
    asm.jump(_EQUAL, _RLIMIT_CORE, otherwise="allow")
    for half in (0, 4):
        asm.load(_argument(3) + half)
        asm.jump(_EQUAL, 0, otherwise="refuse")
    asm.finish(_fail(0))
    asm.label("setrlimit")
    asm.load(_argument(0))
    asm.jump(_EQUAL, _RLIMIT_CORE, otherwise="allow")
    asm.finish(_fail(0))

    asm.label("socketpair")
    asm.label("socket")
    asm.load(_argument(0))
    asm.jump(_EQUAL, socket.AF_UNIX, then="allow")
    asm.jump(_EQUAL, socket.AF_INET, then="internet")
    asm.jump(_EQUAL, socket.AF_INET6, then="internet")
    asm.jump(_EQUAL, _AF_NETLINK, otherwise="no such family")
    asm.load(_argument(2))
    asm.jump(_EQUAL, _NETLINK_ROUTE, then="allow", otherwise="no such protocol")
    asm.label("internet")
    asm.load(_argument(2))
    for protocol in _PROTOCOLS:
        asm.jump(_EQUAL, protocol, then="allow")
    asm.label("no such protocol")
    asm.finish(_fail(errno.EPROTONOSUPPORT))
    asm.label("no such family")
    asm.finish(_fail(errno.EAFNOSUPPORT))

    asm.label("allow")
    asm.finish(_ALLOW)
    asm.label("refuse")
    asm.finish(_fail(errno.EPERM))
    return asm


def _ranges(decisions: Mapping[int, str]) -> list[tuple[int, str]]:
    """First numbers of ranges, and what is decided for each; the last range is open."""
    found: list[tuple[int, str]] = []
    for number in range(max(decisions) + 2):
        decision = decisions.get(number, "no such call")
        if not found or found[-1][1] != decision:
            found.append((number, decision))
    return found


def _search(asm: _Assembler, ranges: Sequence[tuple[int, str]]) -> None:
    """Find the range of the number in the accumulator, by halving, and do what it says."""
    if len(ranges) > 1:
        middle = len(ranges) // 2
        first = ranges[middle][0]
        asm.jump(_AT_LEAST, first, otherwise=f"below {first}")
        asm.go(f"from {first}")
        asm.label(f"below {first}")
        _search(asm, ranges[:middle])
        asm.label(f"from {first}")
        _search(asm, ranges[middle:])
        return
    decision = ranges[0][1]
    answers = {"allow": _ALLOW, "refuse": _fail(errno.EPERM), "no such call": _fail(errno.ENOSYS)}
    if decision in answers:
        asm.finish(answers[decision])
    else:
        asm.go(decision)


class _Assembler:
    """Classic BPF with labels. All go forward only, and ``jump`` over at most 255 instructions."""

    def __init__(self) -> None:
        self._code: list[tuple[int, str, str, int]] = []
        self._labels: dict[str, int] = {}

    def load(self, offset: int) -> None:
        """Load 32 bits of struct seccomp_data into the accumulator."""
        self._code.append((_LOAD, "", "", offset))

    def jump(self, test: int, value: int, *, then: str = "", otherwise: str = "") -> None:
        """Compare the accumulator and jump; no label means: go on with the next instruction."""
        self._code.append((test, then, otherwise, value))

    def go(self, label: str) -> None:
        """Go to a label, however far away."""
        self._code.append((_GO, label, "", 0))

    def finish(self, action: int) -> None:
        """End the program with an action."""
        self._code.append((_RETURN, "", "", action))

    def label(self, name: str) -> None:
        """Name the next instruction."""
        self._labels[name] = len(self._code)

    def assemble(self) -> bytes:
        return b"".join(
            struct.pack("=HBBI", code, 0, 0, self._distance(at, then, _FAR))
            if code == _GO
            else struct.pack(
                "=HBBI", code, self._distance(at, then), self._distance(at, other), value
            )
            for at, (code, then, other, value) in enumerate(self._code)
        )

    def _distance(self, at: int, label: str, limit: int = 255) -> int:
        distance = self._labels[label] - at - 1 if label else 0
        if not 0 <= distance <= limit:
            raise AssertionError(f"The label {label!r} is {distance} instructions away.")
        return distance
