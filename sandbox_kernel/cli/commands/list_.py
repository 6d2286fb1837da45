"""``sandbox-kernel list``."""

from __future__ import annotations

import argparse

from sandbox_kernel.cli.formatting import note, print_json, table
from sandbox_kernel.cli.options import Commands, add_command, add_json


def add(commands: Commands) -> None:
    add_json(add_command(commands, "list", run))


def run(arguments: argparse.Namespace) -> int:
    """List the sandboxed kernels that can be chosen in Jupyter.

    With --json: a list of objects with the keys name, display_name, backend, launcher, path,
    config, outdated.

    examples:
      sandbox-kernel list
      sandbox-kernel list --json
    """
    from sandbox_kernel.jupyter.kernelspec import list_kernelspecs  # lazy: start-up time

    keys = ("name", "display_name", "backend", "launcher", "path", "config", "outdated")
    found = list_kernelspecs()
    if arguments.json:
        print_json([{key: getattr(spec, key) for key in keys} for spec in found])
    else:
        rows = [(spec.name, spec.backend, spec.display_name, spec.path) for spec in found]
        print(table([("NAME", "BACKEND", "SHOWN AS", "FOLDER"), *rows]))
        for spec in found:
            if spec.outdated:
                note(spec.advice)
    return 0
