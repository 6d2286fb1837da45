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
from typing import NamedTuple

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
_SIOCGIFNAME, _SIOCGIFINDEX = 0x8910, 0x8933  # for if_nametoindex
_INTERFACES = ((0x8910, 0x89FF), (0x8B00, 0x8BFF))  # addresses and settings, those of radios
_AF_NETLINK, _NETLINK_ROUTE = 16, 0  # for getaddrinfo and the like
# Any, ICMP, TCP, UDP, ICMPv6. For others the kernel would load modules.
_PROTOCOLS = (0, 1, 6, 17, 58)
_RLIMIT_CORE = 4
_PERSONALITIES = (0, 0xFFFFFFFF)  # the ordinary one, and the question for the current one


_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_*: what seccomp calls the architecture of a system call."""


class _Op(NamedTuple):
    """An instruction. Jumps go forward only, to a label; none is the next instruction."""

    code: int
    value: int = 0
    then: str = ""
    otherwise: str = ""


def _within(first: int, last: int, label: str) -> Sequence[_Op | str]:
    """Go to the label if what is loaded is one of these numbers."""
    below, above = f"below {first:#x}", f"above {last:#x}"
    return (
        _Op(_AT_LEAST, first, otherwise=below),
        _Op(_AT_LEAST, last + 1, then=above, otherwise=label),
        below,
        above,
    )


# A string is a label: the name of the next instruction.
_RULES: Sequence[_Op | str] = (
    "clone",
    _Op(_LOAD, _argument(0)),
    _Op(_ANY_BIT, _NEW_NAMESPACE, then="refuse", otherwise="allow"),
    "ioctl",
    _Op(_LOAD, _argument(1)),
    _Op(_EQUAL, _TIOCSTI, then="refuse"),
    _Op(_EQUAL, _TIOCLINUX, then="refuse"),
    # A socket answers for the network that it was made in, and some are made by the host.
    _Op(_EQUAL, _SIOCGIFNAME, then="allow"),
    _Op(_EQUAL, _SIOCGIFINDEX, then="allow"),
    *(line for first, last in _INTERFACES for line in _within(first, last, "no such device")),
    _Op(_GO, then="allow"),
    "no such device",
    _Op(_RETURN, _fail(errno.ENODEV)),
    "personality",
    _Op(_LOAD, _argument(0)),
    *(_Op(_EQUAL, allowed, then="allow") for allowed in _PERSONALITIES),
    _Op(_RETURN, _fail(errno.EPERM)),
    # Everybody may see anybody's limits, but change his own only: those of the jail's keepers,
    # who have the same uid, are what their watch depends on. The limit of core dumps stays what
    # the host has made it. Programs that set it want none, so they are told that it is done.
    "prlimit64",
    _Op(_LOAD, _argument(2)),
    _Op(_EQUAL, 0, otherwise="new limit"),
    _Op(_LOAD, _argument(2) + 4),
    _Op(_EQUAL, 0, otherwise="new limit"),
    _Op(_RETURN, _ALLOW),
    "new limit",
    _Op(_LOAD, _argument(0)),
    _Op(_EQUAL, 0, otherwise="refuse"),
    _Op(_LOAD, _argument(1)),
    _Op(_EQUAL, _RLIMIT_CORE, otherwise="allow"),
    _Op(_LOAD, _argument(3)),
    _Op(_EQUAL, 0, otherwise="refuse"),
    _Op(_LOAD, _argument(3) + 4),
    _Op(_EQUAL, 0, otherwise="refuse"),
    _Op(_RETURN, _fail(0)),
    "setrlimit",
    _Op(_LOAD, _argument(0)),
    _Op(_EQUAL, _RLIMIT_CORE, otherwise="allow"),
    _Op(_RETURN, _fail(0)),
    "socketpair",
    "socket",
    _Op(_LOAD, _argument(0)),
    _Op(_EQUAL, socket.AF_UNIX, then="allow"),
    _Op(_EQUAL, socket.AF_INET, then="internet"),
    _Op(_EQUAL, socket.AF_INET6, then="internet"),
    _Op(_EQUAL, _AF_NETLINK, otherwise="no such family"),
    _Op(_LOAD, _argument(2)),
    _Op(_EQUAL, _NETLINK_ROUTE, then="allow", otherwise="no such protocol"),
    "internet",
    _Op(_LOAD, _argument(2)),
    *(_Op(_EQUAL, protocol, then="allow") for protocol in _PROTOCOLS),
    "no such protocol",
    _Op(_RETURN, _fail(errno.EPROTONOSUPPORT)),
    "no such family",
    _Op(_RETURN, _fail(errno.EAFNOSUPPORT)),
    "allow",
    _Op(_RETURN, _ALLOW),
    "refuse",
    _Op(_RETURN, _fail(errno.EPERM)),
)


def program(machine: str | None = None, *, refuse: Collection[str] = ()) -> bytes:
    """The filter for ``machine`` (default: this one) as an array of ``struct sock_filter``.

    ``refuse`` names calls that this jail may not use although others may. Raises
    SandboxUnavailable for a machine whose system calls are not known here: a jail without its
    filter would be a silent downgrade.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SandboxUnavailable(
            f"The local jail has no seccomp filter for {name!r} machines, only for "
            f"{' and '.join(sorted(_MACHINES))}. Use another backend on this machine."
        )
    decisions = {
        **dict.fromkeys(numbers(ALLOWED, name), "allow"),
        **{call: call for call in numbers(BY_ARGUMENTS, name)},
        **dict.fromkeys((*numbers(REFUSED, name), *refuse), "refuse"),
    }
    calls = numbers(ALLOWED + BY_ARGUMENTS + REFUSED, name)
    # The numbers mean something else on a foreign architecture (i386 calls on x86_64). Those of
    # the x32 ABI are this one's with a bit set, and larger than all that are known.
    return _assemble(
        [
            _Op(_LOAD, _ARCH),
            _Op(_EQUAL, _MACHINES[name], then="this machine"),
            _Op(_RETURN, _KILL),
            "this machine",
            _Op(_LOAD, _NR),
            *_search(_ranges({calls[call]: decision for call, decision in decisions.items()})),
            *_RULES,
        ]
    )


def _ranges(decisions: Mapping[int, str]) -> list[tuple[int, str]]:
    """First numbers of ranges, and what is decided for each; the last range is open."""
    found: list[tuple[int, str]] = []
    for number in range(max(decisions) + 2):
        decision = decisions.get(number, "no such call")
        if not found or found[-1][1] != decision:
            found.append((number, decision))
    return found


def _search(ranges: Sequence[tuple[int, str]]) -> list[_Op | str]:
    """Find the range of the number in the accumulator, by halving, and do what it says."""
    if len(ranges) > 1:
        middle = len(ranges) // 2
        first = ranges[middle][0]
        return [
            _Op(_AT_LEAST, first, otherwise=f"below {first}"),
            _Op(_GO, then=f"from {first}"),
            f"below {first}",
            *_search(ranges[:middle]),
            f"from {first}",
            *_search(ranges[middle:]),
        ]
    decision = ranges[0][1]
    answers = {"allow": _ALLOW, "refuse": _fail(errno.EPERM), "no such call": _fail(errno.ENOSYS)}
    return [_Op(_RETURN, answers[decision]) if decision in answers else _Op(_GO, then=decision)]


def _assemble(lines: Sequence[_Op | str]) -> bytes:
    labels: dict[str, int] = {}
    code: list[_Op] = []
    for line in lines:
        if isinstance(line, str):
            labels[line] = len(code)
        else:
            code.append(line)

    def distance(at: int, label: str, limit: int = 255) -> int:
        far = labels[label] - at - 1 if label else 0
        if not 0 <= far <= limit:
            raise AssertionError(f"The label {label!r} is {far} instructions away.")
        return far

    packed = b""
    for at, op in enumerate(code):
        if op.code == _GO:
            packed += struct.pack("=HBBI", _GO, 0, 0, distance(at, op.then, _FAR))
        else:
            jumps = distance(at, op.then), distance(at, op.otherwise)
            packed += struct.pack("=HBBI", op.code, *jumps, op.value)
    return packed
