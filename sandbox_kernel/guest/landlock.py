"""Landlock: a second wall behind the mounts of the local jail, where Linux has it.

Process 1 of the jail puts it up before it runs anything; all descendants inherit it, and nothing
can take it off. It repeats what the mounts say to another part of Linux: a file may be read,
executed or listed only below the jail's root, and changed only below a writable mount. So neither a
leaked descriptor of a host folder nor a bug in mount namespaces gives the host's files away.

The jail's namespace handles the network, but since Linux 6.12 signals and abstract sockets to
processes outside are refused here, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

LEAST_ABI = 2
"""Older versions forbid to rename or link files from one folder to another."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on all machines
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_GET_NO_NEW_PRIVS = 39

# LANDLOCK_ACCESS_FS_*, in their order.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))  # remove and make all kinds of files
_MAKE_BLOCK = 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPES = 1 << 0 | 1 << 1  # abstract Unix sockets, signals
# Hostile code can try a million times, which must not fill the host's log.
_LOG_NOTHING = 1 << 0 | 1 << 2


def abi() -> int:
    """The version of Landlock; 0 if Linux has none, or has it turned off."""
    try:
        return _call(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def restrict() -> int:
    """Put the wall up for this process, which must have no other threads, and its descendants.

    Return the version in force, or 0 if Linux has none that suffices. OSError if it fails.
    """
    version = abi()
    if version < LEAST_ABI:
        return 0
    handled = _READ | _WRITE_FILE | _CHANGE_FOLDER | _REFER
    handled |= _TRUNCATE if version >= 3 else 0
    handled |= _IOCTL_DEV if version >= 5 else 0
    ruleset = _ruleset(handled, _SCOPES if version >= 6 else 0)
    try:
        _allow(ruleset, "/", _READ & handled)
        _allow(ruleset, "/dev", (_READ | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV) & handled)
        for place in writable_mounts():
            _allow(ruleset, place, handled)
        _call(_RESTRICT_SELF, ruleset, _LOG_NOTHING if version >= 7 else 0)
    finally:
        os.close(ruleset)
    return version


def layer() -> int:
    """A descriptor of a layer to put on processes with ``enter``; -1 if there is none.

    It forbids nothing in the file system, but a process in it cannot look into the memory of a
    process outside, such as this one. It needs no_new_privs.
    """
    if abi() < LEAST_ABI or ctypes.CDLL(None).prctl(_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        return -1
    # At least one right must be named, and nobody in there can make block devices. Moving files
    # between folders would be forbidden if REFER were not named and allowed.
    ruleset = _ruleset(_MAKE_BLOCK | _REFER, 0)
    _allow(ruleset, "/", _REFER)
    return ruleset


def enter(ruleset: int) -> None:
    """Put a layer on this process, which must have no other threads, and its descendants."""
    _call(_RESTRICT_SELF, ruleset, 0)


def writable_mounts(mountinfo: Iterable[str] | None = None) -> list[str]:
    """The mount points that this process sees as writable."""
    if mountinfo is None:
        path, plain = "/proc/self/mountinfo", "surrogateescape"
        with open(path, encoding="utf-8", errors=plain, newline="\n") as file:
            mountinfo = file.readlines()
    found = {}
    for line in mountinfo:
        # number, parent, device, root, mount point, options; the later of two at one place counts.
        # A name may have whatever else is a blank or the end of a line to Python.
        fields = line.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        found[place] = "rw" in fields[5].split(",")
    return [place for place, writable in found.items() if writable and place != "/"]


def _ruleset(handled: int, scopes: int) -> int:
    # Older kernels know a shorter structure, and take a longer one if the rest is zero.
    attributes = struct.pack("=QQQ", handled, 0, scopes)  # rights: files, network; scopes
    return _call(_CREATE_RULESET, attributes, len(attributes), 0)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # below another mount
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _OF_FILES
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", access, fd), 0)
    finally:
        os.close(fd)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), f"the system call {number} of Landlock failed")
    return int(result)
