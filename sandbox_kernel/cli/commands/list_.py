"""``sandbox-kernel list``: the kernels of ours that Jupyter finds."""

from __future__ import annotations

import argparse
import sys

from sandbox_kernel.cli.parser import Commands, add_command
from sandbox_kernel.cli.text import print_json, table


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "list",
        run,
        "list the sandboxed kernels that can be chosen in Jupyter",
        details="With --json:\na list of objects with the keys name, display_name, backend, "
        "launcher, path, config, outdated.",
        examples=("list", "list --json"),
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.jupyter.kernelspec import list_kernelspecs

    keys = ("name", "display_name", "backend", "launcher", "path", "config", "outdated")
    found = list_kernelspecs()
    if arguments.json:
        print_json([{key: getattr(spec, key) for key in keys} for spec in found])
    else:
        rows = [(spec.name, spec.backend, spec.display_name, spec.path) for spec in found]
        print(table([("NAME", "BACKEND", "SHOWN AS", "FOLDER"), *rows]))
        for spec in found:
            if spec.outdated:
                print(f"sandbox-kernel: {spec.advice}", file=sys.stderr)
    return 0
