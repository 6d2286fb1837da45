"""``sandbox-kernel stats``."""

from __future__ import annotations

import argparse
import asyncio
import time

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import FoundSandbox, sandbox, survey
from sandbox_kernel.cli.formatting import limit, note, print_json, short_path, table, used
from sandbox_kernel.cli.options import Commands, add_command, add_json, add_sandbox
from sandbox_kernel.sandboxes.base import Usage

INTERVAL = 1.0
"""Seconds over which the use of CPUs is measured."""


def add(commands: Commands) -> None:
    parser = add_command(commands, "stats", run)
    add_sandbox(parser, several="*")
    parser.add_argument("-f", "--follow", action="store_true", help="repeat until Ctrl-C")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show what sandboxes use, and their limits.

    CPU is the use of CPUs within one second, in percent of one. With --json: a list of objects
    with the keys name, backend, notebook, cpu_percent, memory_used_mib, memory_limit_mib,
    processes, processes_limit; null if the backend does not tell.

    examples:
      sandbox-kernel stats
      sandbox-kernel stats kernel-1a2b
      sandbox-kernel stats -f
      sandbox-kernel stats --json
    """
    while True:
        rows = foreground.run(_measure(arguments.names, arguments.backend))
        if arguments.json:
            print_json([_plain(found, percent) for found, percent in rows])
        else:
            heading = ("NAME", "CPU", "MEMORY", "PROCESSES", "NOTEBOOK")
            print(table([heading, *(_row(found, percent) for found, percent in rows)]), flush=True)
        if not arguments.follow:
            return 0
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


def _plain(found: FoundSandbox, percent: float | None) -> dict[str, object]:
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


def _row(found: FoundSandbox, percent: float | None) -> tuple[str, ...]:
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
