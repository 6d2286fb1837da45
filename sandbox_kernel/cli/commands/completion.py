"""``sandbox-kernel completion``."""

from __future__ import annotations

import argparse
from typing import Any

from sandbox_kernel.cli.options import SANDBOX_HELP, Commands, add_command
from sandbox_kernel.sandboxes.backends import backend_names

_SHELLS = ("bash", "fish", "zsh", "tcsh", "powershell")
_SANDBOXES = "sandbox-kernel ps --all --quiet 2>/dev/null"
_ZSH, _ZSH_BODY = "_sandbox_kernel_names", f"compadd -- $({_SANDBOXES})"


def add(commands: Commands) -> None:
    parser = add_command(commands, "completion", run)
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def run(arguments: argparse.Namespace) -> None:
    """Print a completion script for a shell.

    examples:
      sandbox-kernel completion bash > ~/.local/share/bash-completion/completions/sandbox-kernel
      sandbox-kernel completion zsh > "${fpath[1]}/_sandbox-kernel"
      sandbox-kernel completion fish > ~/.config/fish/completions/sandbox-kernel.fish
    """
    import shtab  # lazy: start-up time

    parser: argparse.ArgumentParser = arguments.whole_parser
    names: dict[str, Any] = dict(shtab.cmd(_SANDBOXES))
    # shtab's own for zsh would run the command once, when the script is read.
    names |= {"zsh": _ZSH, "preamble": {**names["preamble"], "zsh": f"{_ZSH}() {{ {_ZSH_BODY} }}"}}
    _name_words(parser, names)
    print(shtab.complete(parser, arguments.shell))


def _name_words(parser: argparse.ArgumentParser, sandboxes: object) -> None:
    """Tell shtab which arguments are names of sandboxes or backends."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _name_words(below, sandboxes)
        elif (action.help or "").startswith(SANDBOX_HELP):
            action.complete = sandboxes  # type: ignore[attr-defined]
        elif action.dest in ("backend", "backends"):
            action.choices = backend_names()
