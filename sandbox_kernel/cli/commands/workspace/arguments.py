"""Arguments and output that the ``workspace`` commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from sandbox_kernel.cli.options import Commands, add_command, add_json
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.workspace.reports import Quota
    from sandbox_kernel.workspace.store import Store

MOST_PROBLEMS = 50
NAME_HELP = "the workspace, as `workspace list` shows it, or the path of its notebook"
AT_HELP = "a save, by its id or the start of it; default: the newest"
Run = Callable[[argparse.Namespace], int]


def add_workspace_command(
    commands: Commands,
    command: str,
    run: Run,
    *,
    name: bool = True,
    at: str = "",
    json: bool = False,
) -> argparse.ArgumentParser:
    """Add a command with ``--store``, and NAME, ``--at`` (with this help) and ``--json`` if
    wanted."""
    parser = add_command(commands, command, run)
    parser.add_argument(
        "--store", default="", metavar="URL", help="the store: a folder, or a URL as s3://bucket/x"
    )
    if name:
        parser.add_argument("name", metavar="NAME", type=workspace_name, help=NAME_HELP)
    if at:
        parser.add_argument("--at", default="", metavar="SAVE", help=at)
    if json:
        add_json(parser)
    return parser


def workspace_name(text: str) -> str:
    """The name of a workspace, given as such or as the path of its notebook."""
    if not text.endswith(NOTEBOOK):
        return text
    from sandbox_kernel.workspace.workspaces import name_for_notebook

    return name_for_notebook(os.path.abspath(text))


def positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return number


def add_quota(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-files", type=positive, metavar="N", help="default: 500,000")
    parser.add_argument("--max-bytes", type=positive, metavar="N", help="default: 20 GiB")


def quota_of(arguments: argparse.Namespace) -> Quota:
    from sandbox_kernel.workspace.reports import Quota

    given = {"max_files": arguments.max_files, "max_bytes": arguments.max_bytes}
    return Quota(**{key: value for key, value in given.items() if value is not None})


def open_store(arguments: argparse.Namespace) -> Store:
    from sandbox_kernel.workspace.store import Store

    return Store.open(arguments.store)


def shown_size(count: float) -> str:
    """A number of bytes in its largest unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def shown_path(path: str) -> str:
    """A path in printable form, on one line."""
    plain = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return printable(plain).replace("\n", "\\n").replace("\t", "\\t")
