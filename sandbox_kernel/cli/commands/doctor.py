"""``sandbox-kernel doctor``."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.diagnosis import diagnose
from sandbox_kernel.cli.formatting import print_json
from sandbox_kernel.cli.options import Commands, add_command, add_json
from sandbox_kernel.sandboxes.backends import backend_names, no_backend
from sandbox_kernel.sandboxes.base import Diagnosis
from sandbox_kernel.spec import DEFAULT_BACKEND
from sandbox_kernel.untrusted_text import printable

_MARKS = {True: "v", False: "x", None: "!"}


def add(commands: Commands) -> None:
    parser = add_command(commands, "doctor", run)
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="default: all")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check which backends work here, by trying them.

    Marks: v works, x does not, ! works with a remark; below it, what to do. The exit code is 0 if
    the named backends work; without names, all are shown and 'local' decides. With --json: a list
    of objects with the keys backend, ok, checks; each check has ok (true, false, or null for a
    remark), what, fix.

    examples:
      sandbox-kernel doctor
      sandbox-kernel doctor local
      sandbox-kernel doctor --json
    """
    from sandbox_kernel.jupyter.kernelspec import list_kernelspecs  # lazy: start-up time

    unknown = sorted(set(arguments.backends) - set(backend_names()))
    if unknown:
        raise no_backend(unknown[0])
    asked = arguments.backends or backend_names()
    found = foreground.run(_diagnose_all(asked))
    works = {backend: all(check.ok is not False for check in found[backend]) for backend in asked}
    if arguments.json:
        print_json(
            [
                {
                    "backend": backend,
                    "ok": works[backend],
                    "checks": [{"ok": c.ok, "what": c.what, "fix": c.fix} for c in found[backend]],
                }
                for backend in asked
            ]
        )
    else:
        for backend in asked:
            print(f"{backend}: {'works' if works[backend] else 'does not work here'}")
            for check in found[backend]:
                _print(check)
        for spec in list_kernelspecs():
            if spec.outdated:
                _print(Diagnosis(None, f"kernel {spec.name}: outdated", spec.advice))
    needed = arguments.backends or [DEFAULT_BACKEND]
    return 0 if all(works.get(backend, False) for backend in needed) else 1


async def _diagnose_all(backends: Sequence[str]) -> dict[str, Sequence[Diagnosis]]:
    found = await asyncio.gather(*(diagnose(backend) for backend in backends))
    return dict(zip(backends, found, strict=True))


def _print(check: Diagnosis) -> None:
    print(f"  {_MARKS[check.ok]} {_indented(check.what)}")
    if check.fix:
        print(f"      {_indented(check.fix)}")


def _indented(text: str) -> str:
    return printable(text.strip()).replace("\n", "\n      ")
