"""The command line: all commands, and the command for the sandbox behind ``--``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sandbox_kernel import __version__
from sandbox_kernel.cli.commands import (
    audit,
    completion,
    cp,
    doctor,
    exec_,
    gateway,
    image,
    install,
    launch,
    logs,
    mcp,
    pause,
    policy,
    ps,
    rm,
    run,
    workspace,
)
from sandbox_kernel.cli.options import CommandParser

_COMMANDS = (
    *(install, doctor, ps, rm, pause, logs, exec_, cp, run, launch, image, workspace),
    *(mcp, gateway, policy, audit),
)
_EPILOG = """\
Start with `sandbox-kernel doctor`. Each command has its own --help, with examples.

exit codes:
  0 worked, 1 failed (a line on stderr says why), 2 wrong usage, 130 Ctrl-C;
  exec, shell, run and launch give the code of what they ran"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = CommandParser(
        prog="sandbox-kernel",
        description="Jupyter kernels, and other commands, in sandboxes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sandbox-kernel {__version__}")
    parser.add_argument("--debug", action="store_true", help="log more, and show tracebacks")
    parser.set_defaults(whole_parser=parser)
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (*_COMMANDS, completion):
        command.add(added)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line. Everything behind ``--`` is a command for the sandbox: it is not parsed,
    and becomes ``command``. So do the words behind the last of our own, where the command allows
    that (``exec NAME ls -l``). ``run`` is the function to call."""
    own, command = list(argv), []
    parser = build_parser()
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    bare = _bare_command(parser, own)
    if bare is not None:
        own, command = own[:bare], [*own[bare:], *(["--", *command] if command else [])]
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        arguments.parser.refuse(unknown)
    arguments.command = command
    if command and arguments.takes_command is None:
        arguments.parser.error("this command takes nothing behind --")
    if arguments.takes_command and not command:
        arguments.parser.error("say what to run, for example: -- python -V")
    return arguments


def _bare_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int | None:
    """Where in a command line the sandbox's own command begins, if that is not behind ``--``."""
    (chosen,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    below = chosen.choices.get(argv[at]) if at < len(argv) else None
    if below is None or not below.get_default("bare"):
        return None
    ours = sum(1 for action in below._actions if not action.option_strings)
    at += 1
    while at < len(argv):
        word = argv[at]
        if len(word) > 1 and word.startswith("-"):
            name, given, _ = word.partition("=")
            meant = [a for o, a in below._option_string_actions.items() if o.startswith(name)]
            at += 1 if given or not meant or meant[0].nargs == 0 else 2
        elif ours:
            ours, at = ours - 1, at + 1
        else:
            return at
    return None
