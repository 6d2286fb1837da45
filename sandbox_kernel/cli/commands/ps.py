"""``sandbox-kernel ps`` and ``stats``."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import FoundSandbox, sandbox, survey
from sandbox_kernel.cli.formatting import age, limit, note, print_json, short_path, table, used
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.sandboxes.base import Usage
from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:
    from sandbox_kernel.kernels.decision_log import Denial

INTERVAL = 1.0
"""Seconds over which the use of CPUs is measured."""
_MOST_HOST = 40
_HEADING = ("NAME", "BACKEND", "STATUS", "AGE", "KERNEL", "MEMORY", "NOTEBOOK", "LIMITS")


def add(commands: Commands) -> None:
    parser = add_command(commands, "ps", run)
    parser.add_flag("-a", "--all", help="also those that have stopped")
    parser.add_json(quiet=True)
    parser = add_command(commands, "stats", stats)
    parser.add_sandbox(several="*", default=" (default: all)")
    parser.add_flag("-f", "--follow", help="repeat until Ctrl-C")
    parser.add_json()


def run(arguments: argparse.Namespace) -> None:
    """List sandboxes.

    KERNEL is the process id of the kernel in the sandbox, 'yes' if its id is not known, 'not yet',
    'no kernel', or 'spare' for a sandbox that waits for the next kernel. MEMORY is the memory in
    use and its limit. With --json: a list of objects with the keys name, backend, id, status
    (running, paused, stopped, gone), created (seconds since 1970), kernel (true, false), spare
    (true, false), kernel_pid, notebook, memory_used_mib, processes, cpu_seconds (each may be null),
    elsewhere (true: another machine made it, under the same $SANDBOX_KERNEL_LABEL), unsaved (why
    files in it could not be saved, or null; `workspace save` tries again), denied (what its rules
    for egress have denied in the last minute: objects with host, port, reason, count, last; STATUS
    has it, too), limits (numbers), limits_by (what enforces each), egress (which way what leaves it
    takes: gateway, the backend's own rules, or closed; null if not known), oom_kills, last_kill.
    Backends that do not answer are noted on stderr.

    examples:
      sandbox-kernel ps
      sandbox-kernel ps --all
      sandbox-kernel ps --json | jq -r '.[].name'
    """
    found = foreground.run(survey(note))
    shown = [one for one in found if one.running or one.unsaved or arguments.all]
    if arguments.json:
        print_json([_plain(one) for one in shown])
    elif arguments.quiet:
        for one in shown:
            print(printable(one.info.name))
    else:
        print(table([_HEADING, *map(_row, shown)]))


def _plain(found: FoundSandbox) -> dict[str, object]:
    info, usage = found.info, found.usage
    return {
        "name": info.name,
        "backend": info.backend,
        "id": info.id,
        "status": info.status,
        "created": info.created,
        "kernel": found.has_kernel and found.running and not found.starting,
        "spare": found.spare and found.running,
        "kernel_pid": found.kernel_pid if found.running else None,
        "elsewhere": found.elsewhere,
        "unsaved": found.unsaved.reason if found.unsaved else None,
        "denied": [
            {
                "host": one.host,
                "port": one.port,
                "reason": one.why,
                "count": one.count,
                "last": one.last,
            }
            for one in _denied(found)
        ],
        "notebook": found.notebook or None,
        "memory_used_mib": round(usage.memory / 2**20, 1) if usage else None,
        "processes": usage.processes if usage else None,
        "cpu_seconds": usage.cpu_seconds if usage else None,
        "limits": {field: limit(words) for field, words in info.limits.items()},
        "limits_by": dict(info.limits),
        "egress": info.egress or None,
        "oom_kills": info.oom_kills,
        "last_kill": info.last_kill,
    }


def _row(found: FoundSandbox) -> tuple[str, ...]:
    info, usage = found.info, found.usage
    # What enforces a limit is in brackets; --json has it.
    limits = (
        f"{field.removesuffix('_mib').replace('_', ' ')} {words.partition(' (')[0]}"
        for field, words in info.limits.items()
        if field != "memory_mib"
    )
    return (
        info.name,
        info.backend,
        _status(found),
        age(time.time() - info.created),
        _kernel(found),
        used(usage.memory if usage else None, info.limits.get("memory_mib", "")),
        short_path(found.notebook) or "-",
        ", ".join(limits) or "-",
    )


def _status(found: FoundSandbox) -> str:
    words = [found.info.status, *(["unsaved"] if found.unsaved else [])]
    if denied := _denied(found):
        host, more = denied[-1].host[:_MOST_HOST], len(denied) - 1
        words.append(f"{len(denied)} denied: {host}" + (f" and {more} more" if more else ""))
    return ", ".join(words)


def _denied(found: FoundSandbox) -> list[Denial]:
    """What was denied in the last minute."""
    if not found.running:
        return []
    from sandbox_kernel.audit.trail import audit_path  # lazy: start-up time
    from sandbox_kernel.kernels.decision_log import denied_in

    return denied_in(audit_path(found.info.backend, found.info.name))


def _kernel(found: FoundSandbox) -> str:
    if found.elsewhere:
        return f"on {found.place}" if found.place else "elsewhere"
    if found.spare and found.running:
        return "spare"
    if not (found.has_kernel and found.running):
        return "no kernel"
    return "not yet" if found.starting else str(found.kernel_pid or "yes")


def stats(arguments: argparse.Namespace) -> None:
    """Show what sandboxes use, and their limits.

    CPU is the use of CPUs within one second, in percent of one. With --json: a list of objects
    with the keys name, backend, notebook, cpu_percent, memory_used_mib, memory_limit_mib,
    processes, processes_limit; null if the backend does not say.

    examples:
      sandbox-kernel stats
      sandbox-kernel stats kernel-1a2b
      sandbox-kernel stats -f
      sandbox-kernel stats --json
    """
    while True:
        rows = foreground.run(_measure(arguments.names, arguments.backend))
        if arguments.json:
            print_json([_plain_use(*row) for row in rows])
        else:
            heading = ("NAME", "CPU", "MEMORY", "PROCESSES", "NOTEBOOK")
            print(table([heading, *(_use_row(*row) for row in rows)]), flush=True)
        if not arguments.follow:
            return
        print(flush=True)


async def _measure(
    names: list[str], backend: str | None
) -> list[tuple[FoundSandbox, float | None]]:
    wanted = set()
    for name in names:
        async with sandbox(name, backend) as (_, handle):
            wanted.add((handle.backend, handle.name))
    before = await survey(note)
    began = time.monotonic()
    await asyncio.sleep(INTERVAL)
    passed = time.monotonic() - began
    usages = {(f.info.backend, f.info.name): f.usage for f in before}
    rows = []
    for found in await survey(lambda _: None):
        key = (found.info.backend, found.info.name)
        if found.running and (key in wanted or not names):
            rows.append((found, _percent(usages.get(key), found.usage, passed)))
    return rows


def _percent(before: Usage | None, after: Usage | None, passed: float) -> float | None:
    if before is None or after is None:
        return None
    # Less than before: a process has ended.
    return 100 * max(0.0, after.cpu_seconds - before.cpu_seconds) / passed


def _plain_use(found: FoundSandbox, percent: float | None) -> dict[str, object]:
    usage, limits = found.usage, found.info.limits
    return {
        "name": found.info.name,
        "backend": found.info.backend,
        "notebook": found.notebook or None,
        "cpu_percent": None if percent is None else round(percent, 1),
        "memory_used_mib": round(usage.memory / 2**20, 1) if usage else None,
        "memory_limit_mib": limit(limits.get("memory_mib", "")),
        "processes": usage.processes if usage else None,
        "processes_limit": limit(limits.get("processes", "")),
    }


def _use_row(found: FoundSandbox, percent: float | None) -> tuple[str, ...]:
    usage, limits = found.usage, found.info.limits
    most = limit(limits.get("processes", ""))
    processes = str(usage.processes) if usage else "?"
    return (
        found.info.name,
        "?" if percent is None else f"{percent:.0f} %",
        used(usage.memory if usage else None, limits.get("memory_mib", "")),
        processes if most is None else f"{processes}/{most}",
        short_path(found.notebook) or "-",
    )
