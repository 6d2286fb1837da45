"""``sandbox-kernel workspace``: saved workspaces, their history, and their files."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli.commands.workspace import files, history, upkeep
from sandbox_kernel.cli.options import Commands, add_group


def add(commands: Commands) -> None:
    inner = add_group(commands, "workspace", _workspace)
    for module in (history, files, upkeep):
        module.add(inner)


def _workspace(arguments: argparse.Namespace) -> None:
    """Look at saved workspaces, and bring them back.

    A workspace is the history of the files that a notebook's code has written, in a store that
    outlives the sandboxes: $SANDBOX_KERNEL_STORE, or a folder of Jupyter's data folder. Each
    notebook has its own; kernels of `install --workspace NAME` share one. (A volume,
    `run --volume`, is something else: a folder of this machine, at /workspace in a local jail.)

    examples:
      sandbox-kernel workspace list
      sandbox-kernel workspace log work/demo.ipynb
      sandbox-kernel workspace export work-demo-3f2a9c41 ./results
    """
