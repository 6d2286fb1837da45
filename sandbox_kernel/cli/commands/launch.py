"""``sandbox-kernel launch``: the ``argv`` of kernelspecs for clients without provisioners."""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.options import Commands, add_command, configured
from sandbox_kernel.errors import SpecError

_log = logging.getLogger(__name__)


def add(commands: Commands) -> None:
    usage = "-f CONNECTION_FILE [options] [-- KERNEL ARGV...]"
    parser = add_command(commands, "launch", run, usage=usage, takes_command=False)
    file = "CONNECTION_FILE"
    parser.add_argument("-f", "--connection-file", required=True, metavar=file, help="as Jupyter's")
    about = "the kernelspec's config, as JSON; options win"
    parser.add_argument("--config-file", metavar="FILE", help=about)
    about = "the config itself; every user of this host can see it"
    parser.add_argument("--config", metavar="JSON", help=about)
    parser.add_sandbox_settings()


def run(arguments: argparse.Namespace) -> int:
    """Run a kernel in a sandbox, for a connection file.

    Behaves as the kernel's process would: listens where the connection file says, SIGINT
    interrupts, SIGTERM and SIGHUP shut down, and the exit code is the kernel's. The sandbox ends
    with it. `install --launcher` writes kernelspecs that call this; Ctrl-C twice on a terminal
    ends it.

    examples:
      sandbox-kernel launch -f kernel.json --memory-mib 1024
      sandbox-kernel launch -f kernel.json -- python -m bash_kernel -f {connection_file}
    """
    # lazy: start-up time
    from sandbox_kernel.jupyter.launcher import DEFAULTS, Guardian, Launcher

    config = {**DEFAULTS, **_config(arguments)}
    configuration = configured(arguments, config, f"kernel-{secrets.token_hex(4)}")
    if arguments.config is not None and not sys.flags.safe_path:
        _log.warning(
            "An earlier version wrote the kernelspec of kernel %s: it runs code of the notebook's "
            "folder on this host. Install it again (`sandbox-kernel list` names it).",
            configuration.spec.name,
        )
    launcher = Launcher(
        arguments.connection_file, configuration, arguments.command, Guardian.start()
    )
    # A server that runs in the background ignores SIGINT, and so would we.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return foreground.run(launcher.run(), on_signal=launcher.on_signal)


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.config_file is None:
        return _parsed(arguments.config or "{}", "--config")
    if arguments.config is not None:
        raise SpecError("The config is given by --config-file or by --config, not by both.")
    where = f"--config-file {arguments.config_file}"
    try:
        return _parsed(Path(arguments.config_file).read_text(encoding="utf-8"), where)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{where} cannot be read ({error}). Install the kernel again, as the user who runs it."
        ) from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{where} is not valid JSON ({error}).") from None
    if not isinstance(config, dict):
        raise SpecError(f"{where} takes a JSON object, not {text[:100]!r}.")
    return config
