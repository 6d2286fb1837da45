"""Arguments that the ``workspace`` commands share."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from sandbox_kernel.cli.options import CommandParser, Commands, Run, add_command
from sandbox_kernel.spec import NOTEBOOK

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.workspace.store import Store

MOST_PROBLEMS = 50
NAME_HELP = "the workspace, as `workspace list` shows it, or the path of its notebook"
AT_HELP = "a save, by its id or the start of it; default: the newest"


def add_workspace_command(
    commands: Commands,
    command: str,
    run: Run,
    *,
    name: bool = True,
    at: str = "",
    json: bool = False,
) -> CommandParser:
    """A command with ``--store``, and with NAME, ``--at`` (with this help) or ``--json``."""
    parser = add_command(commands, command, run)
    parser.add_argument(
        "--store", default="", metavar="URL", help="the store: a folder, or a URL as s3://bucket/x"
    )
    if name:
        parser.add_argument("name", metavar="NAME", type=workspace_name, help=NAME_HELP)
    if at:
        parser.add_argument("--at", default="", metavar="SAVE", help=at)
    if json:
        parser.add_json()
    return parser


def workspace_name(text: str) -> str:
    """The name of a workspace, given as such or as the path of its notebook."""
    if not text.endswith(NOTEBOOK):
        return text
    from sandbox_kernel.workspace.workspaces import name_for_notebook

    return name_for_notebook(os.path.abspath(text))


def open_store(arguments: argparse.Namespace) -> Store:
    from sandbox_kernel.workspace.store import Store

    return Store.open(arguments.store)
