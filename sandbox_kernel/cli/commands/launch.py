"""``sandbox-kernel launch``: the ``argv`` of kernelspecs for clients without provisioners."""

from __future__ import annotations

import argparse
import json
import secrets
import signal
from typing import Any

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.commands.run import configured
from sandbox_kernel.cli.parser import Commands, add_command, add_spec_options
from sandbox_kernel.errors import SpecError


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "launch",
        run,
        "run a kernel in a sandbox, for a connection file",
        details="Behaves as the kernel's process\nwould: listens where the connection file says, "
        "SIGINT interrupts, SIGTERM and SIGHUP shut\ndown, and the exit code is the kernel's. The "
        "sandbox ends with it. `install --launcher`\nwrites kernelspecs that call this; Ctrl-C "
        "twice on a terminal ends it.",
        usage="-f CONNECTION_FILE [options] [-- KERNEL ARGV...]",
        examples=(
            "launch -f kernel.json --memory-mib 1024",
            "launch -f kernel.json -- python -m bash_kernel -f {connection_file}",
        ),
        takes_command=False,
    )
    parser.add_argument(
        "-f", "--connection-file", required=True, metavar="CONNECTION_FILE", help="as Jupyter's"
    )
    parser.add_argument("--backend", metavar="BACKEND", help="default: local")
    parser.add_argument(
        "--config", default="{}", metavar="JSON", help="the kernelspec's config; options win"
    )
    add_spec_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from sandbox_kernel.jupyter.launcher import DEFAULTS, Launcher

    config = {**DEFAULTS, **_config(arguments.config)}
    configuration = configured(arguments, config, f"kernel-{secrets.token_hex(4)}")
    launcher = Launcher(arguments.connection_file, configuration, arguments.command)
    # A server that was started in the background has SIGINT ignored, and so had we.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return foreground.run(launcher.run(), on_signal=launcher.on_signal)


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise SpecError(f"--config is not valid JSON ({error}).") from None
    if not isinstance(config, dict):
        raise SpecError(f"--config takes a JSON object, not {text[:100]!r}.")
    return config
