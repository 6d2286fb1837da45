"""Shell scripts that the host runs inside a VM.

Only /bin/sh is taken for granted. Where there is Python, too, the exit signal of a command is
known exactly, and the VM ends with its main command.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

CONSOLE = "/dev/console"
"""The VM's console: the host finds it in the VM's log, also after the VM has ended."""

_ACCOUNTS = "/var/.sandbox-kernel-accounts"
_ACCOUNT = struct.Struct("<BBHIIIII")
_ACCOUNT_SIZE, _ACCOUNT_VERSION = 64, 3
_KEPT, _MOST = 64 * 1024, 4 * 2**20

# Process accounting: the kernel notes how each process ended. The SDK tells only that a signal
# ended a command, not which.
_SET_UP = f"""
import ctypes, os
path = "{_ACCOUNTS}"
os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))
ctypes.CDLL(None).acct(path.encode())
"""
SET_UP = [
    "-c",
    f"command -v python3 >/dev/null && python3 -I -S -c '{_SET_UP}'; mkdir -p /workspace",
]
"""Arguments for /bin/sh, each time a VM has booted."""

LOOK_UP = [
    "-c",
    f"tail -c {_KEPT} {_ACCOUNTS}; [ $(wc -c <{_ACCOUNTS}) -lt {_MOST} ] || : >{_ACCOUNTS}",
]
"""Arguments for /bin/sh: prints the latest accounts, and makes room if there are very many."""

_POWER_OFF = "import ctypes, os; os.sync(); ctypes.CDLL(None).reboot(0x4321FEDC)"
_START = f"""
command -v "$1" >/dev/null || exit 127
if [ -w {CONSOLE} ]; then exec </dev/null >>{CONSOLE} 2>&1; else exec </dev/null >/dev/null 2>&1; fi
"""
_APART = "command -v setsid >/dev/null && set -- setsid"
_SPAWN = f'{_START} {_APART} "$@"; "$@" & '
_MAIN = f"""{_START}
set -- sh -c '"$@"; echo "the main command has ended"; python3 -I -S -c "{_POWER_OFF}"' sh "$@"
{_APART} "$@"; "$@" & """

GOODBYE = [
    "-c",
    """
trap "" TERM
kill -TERM -1
rounds=0
while [ $rounds -lt 50 ]; do
    left=""
    for folder in /proc/[0-9]*; do
        pid=${folder#/proc/}
        words=""
        read -r words 2>/dev/null <$folder/cmdline
        [ -z "$words" ] || [ $pid = 1 ] || [ $pid = $$ ] || left=$pid
    done
    [ -n "$left" ] || break
    rounds=$((rounds + 1))
    sleep 0.1
done
sync
""",
]
"""Arguments for /bin/sh: asks everything in the VM to end, and waits for it, 5 seconds or so."""


def spawned(argv: Sequence[str], *, main: bool) -> list[str]:
    """Arguments for /bin/sh that start a command which outlives the one that starts it."""
    return ["-c", _MAIN if main else _SPAWN, "sh", *argv]


def with_terminal(argv: Sequence[str], size: tuple[int, int]) -> list[str]:
    """Arguments for /bin/sh: a terminal has its size before the command can ask for it."""
    script = f'stty rows {size[0]:d} cols {size[1]:d} 2>/dev/null; exec "$@"'
    return ["-c", script, "sh", *argv]


def exit_signal(accounts: bytes, pid: int) -> int | None:
    """The signal that ended a process, from the kernel's accounts; None if they do not say. They
    are untrusted: whatever they hold, the result is a signal number or None."""
    whole = len(accounts) - len(accounts) % _ACCOUNT_SIZE
    for start in range(whole - _ACCOUNT_SIZE, -1, -_ACCOUNT_SIZE):
        _, version, _, status, _, _, found, _ = _ACCOUNT.unpack_from(accounts, start)
        if found == pid and version & 0x7F == _ACCOUNT_VERSION:
            return status & 0x7F or None
    return None
