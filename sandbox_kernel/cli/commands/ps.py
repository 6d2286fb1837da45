"""``sandbox-kernel ps``."""

from __future__ import annotations

import argparse
import time

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import FoundSandbox, survey
from sandbox_kernel.cli.formatting import age, limit, note, print_json, short_path, table, used
from sandbox_kernel.cli.options import Commands, add_command, add_json
from sandbox_kernel.untrusted_text import printable

_HEADING = ("NAME", "BACKEND", "STATUS", "AGE", "KERNEL", "MEMORY", "NOTEBOOK", "LIMITS")


def add(commands: Commands) -> None:
    parser = add_command(commands, "ps", run)
    parser.add_argument("-a", "--all", action="store_true", help="also those that have stopped")
    add_json(parser, quiet=True)


def run(arguments: argparse.Namespace) -> int:
    """List sandboxes.

    KERNEL is the process id of the kernel in the sandbox, 'yes' if its id is not known, 'not yet',
    or 'no kernel'. MEMORY is the memory in use and its limit. With --json: a list of objects with
    the keys name, backend, id, status (running, paused, stopped, gone), created (seconds since
    1970), kernel (true, false), kernel_pid, notebook, memory_used_mib, processes, cpu_seconds
    (each may be null), elsewhere (true: another machine made it, under the same
    $SANDBOX_KERNEL_LABEL), unsaved (why files in it could not be saved, or null; `workspace save`
    tries again), limits (numbers), limits_by (what enforces each), oom_kills, last_kill. Backends
    that do not answer are noted on stderr.

    examples:
      sandbox-kernel ps
      sandbox-kernel ps --all
      sandbox-kernel ps --json | jq -r '.[].name'
    """
    found = foreground.run(survey(note))
    shown = [sandbox for sandbox in found if sandbox.running or sandbox.unsaved or arguments.all]
    if arguments.json:
        print_json([_plain(sandbox) for sandbox in shown])
    elif arguments.quiet:
        for sandbox in shown:
            print(printable(sandbox.info.name))
    else:
        print(table([_HEADING, *map(_row, shown)]))
    return 0


def _plain(sandbox: FoundSandbox) -> dict[str, object]:
    info, usage = sandbox.info, sandbox.usage
    return {
        "name": info.name,
        "backend": info.backend,
        "id": info.id,
        "status": info.status,
        "created": info.created,
        "kernel": sandbox.has_kernel and sandbox.running and not sandbox.starting,
        "kernel_pid": sandbox.kernel_pid if sandbox.running else None,
        "elsewhere": sandbox.elsewhere,
        "unsaved": sandbox.unsaved.reason if sandbox.unsaved else None,
        "notebook": sandbox.notebook or None,
        "memory_used_mib": round(usage.memory / 2**20, 1) if usage else None,
        "processes": usage.processes if usage else None,
        "cpu_seconds": usage.cpu_seconds if usage else None,
        "limits": {field: limit(words) for field, words in info.limits.items()},
        "limits_by": dict(info.limits),
        "oom_kills": info.oom_kills,
        "last_kill": info.last_kill,
    }


def _row(sandbox: FoundSandbox) -> tuple[str, ...]:
    info, usage = sandbox.info, sandbox.usage
    # What enforces a limit is in brackets; --json has it.
    limits = (
        f"{field.removesuffix('_mib').replace('_', ' ')} {words.partition(' (')[0]}"
        for field, words in info.limits.items()
        if field != "memory_mib"
    )
    return (
        info.name,
        info.backend,
        f"{info.status}, unsaved" if sandbox.unsaved else info.status,
        age(time.time() - info.created),
        _kernel(sandbox),
        used(usage.memory if usage else None, info.limits.get("memory_mib", "")),
        short_path(sandbox.notebook) or "-",
        ", ".join(limits) or "-",
    )


def _kernel(sandbox: FoundSandbox) -> str:
    if sandbox.elsewhere:
        return f"on {sandbox.place}" if sandbox.place else "elsewhere"
    if not (sandbox.has_kernel and sandbox.running):
        return "no kernel"
    return "not yet" if sandbox.starting else str(sandbox.kernel_pid or "yes")
