"""``sandbox-kernel ps``: the sandboxes of this user."""

from __future__ import annotations

import argparse
import time

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find import Found, survey
from sandbox_kernel.cli.parser import Commands, add_command
from sandbox_kernel.cli.text import age, note, print_json, table
from sandbox_kernel.text import printable

_HEADING = ("NAME", "BACKEND", "STATUS", "AGE", "KERNEL", "LIMITS")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "ps",
        run,
        "list sandboxes",
        details="KERNEL is the process id of the kernel in the sandbox, 'yes' if\nthere is one "
        "whose id is not known, or '-'. With --json: a list of objects with the keys\nname, "
        "backend, id, status (running, paused, stopped, gone), created (seconds since 1970),\n"
        "kernel (true, false), kernel_pid (or null), elsewhere (true: another machine made it,\n"
        "under the same $SANDBOX_KERNEL_LABEL), limits, oom_kills, last_kill. Backends that do\n"
        "not answer are noted on stderr.",
        examples=("ps", "ps --all", "ps --json | jq -r '.[].name'"),
    )
    parser.add_argument("-a", "--all", action="store_true", help="also those that have stopped")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("-q", "--quiet", action="store_true", help="print names only")


def run(arguments: argparse.Namespace) -> int:
    found = foreground.run(survey(note))
    shown = [sandbox for sandbox in found if sandbox.running or arguments.all]
    if arguments.json:
        print_json([_plain(sandbox) for sandbox in shown])
    elif arguments.quiet:
        for sandbox in shown:
            print(printable(sandbox.info.name))
    else:
        print(table([_HEADING, *map(_row, shown)]))
    return 0


def _plain(sandbox: Found) -> dict[str, object]:
    info = sandbox.info
    return {
        "name": info.name,
        "backend": info.backend,
        "id": info.id,
        "status": info.status,
        "created": info.created,
        "kernel": sandbox.has_kernel and sandbox.running,
        "kernel_pid": sandbox.kernel_pid if sandbox.running else None,
        "elsewhere": sandbox.elsewhere,
        "limits": dict(info.limits),
        "oom_kills": info.oom_kills,
        "last_kill": info.last_kill,
    }


def _row(sandbox: Found) -> tuple[str, ...]:
    info = sandbox.info
    kernel = str(sandbox.kernel_pid or "yes") if sandbox.has_kernel and sandbox.running else "-"
    kernel = "elsewhere" if sandbox.elsewhere else kernel
    # By what a limit is held stands in brackets, and in --json.
    limits = (
        f"{field.removesuffix('_mib').replace('_', ' ')} {words.partition(' (')[0]}"
        for field, words in info.limits.items()
    )
    passed = age(time.time() - info.created)
    return info.name, info.backend, info.status, passed, kernel, ", ".join(limits) or "-"
