"""One command for several sandboxes: it tries all, and the exit code says whether one failed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.formatting import note
from sandbox_kernel.errors import SandboxError, SandboxNotFound
from sandbox_kernel.untrusted_text import printable


def named(arguments: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The sandboxes that a command's arguments name."""
    return [(name, arguments.backend) for name in arguments.names]


def each(
    sandboxes: Iterable[tuple[str, str | None]],
    do: Callable[[str, str | None], Coroutine[Any, Any, None]],
    *,
    absent: str = "",
) -> int:
    """Call ``do`` with each sandbox's name and backend in turn, and print the names where it
    worked. A missing sandbox is a failure, unless ``absent`` says why it is none."""
    failed = False
    for name, backend in sandboxes:
        try:
            foreground.run(do(name, backend))
        except (SandboxError, OSError) as error:
            if absent and isinstance(error, SandboxNotFound):
                note(f"{error} {absent}")
            else:
                note(str(error))
                failed = True
        else:
            print(printable(name))
    return 1 if failed else 0
