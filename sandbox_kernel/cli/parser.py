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
    pause,
    policy,
    ps,
    rm,
    run,
    workspace,
)
from sandbox_kernel.cli.options import CommandParser
from sandbox_kernel.spec import NOTEBOOK

_COMMANDS = (
    *(install, doctor, ps, rm, pause, logs, exec_, cp, run, launch, image, workspace),
    *(gateway, policy, audit),
)
_EPILOG = """\
Start with `sandbox-kernel doctor`. Each command has its own --help, with examples.

exit codes:
  0 worked, 1 failed (a line on stderr says why), 2 wrong usage, 130 Ctrl-C;
  exec, shell, run and launch give the code of what they ran;
  run with a notebook: 3 a cell failed, 4 out of time, 5 its kernel died"""


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
    that (``exec NAME ls -l``). What may be run instead becomes ``notebooks``. ``run`` is the
    function to call."""
    own, command = list(argv), []
    parser = build_parser()
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    chosen, at = _chosen(parser, own)
    notebooks = chosen is not None and _names_notebook(chosen, own[at:])
    bare = None if chosen is None or notebooks else _bare_command(chosen, own, at)
    if bare is not None:
        own, command = own[:bare], [*own[bare:], *(["--", *command] if command else [])]
    arguments, unknown = parser.parse_known_args(own)
    arguments.notebooks = []
    if notebooks:
        arguments.notebooks = [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
    if unknown:
        arguments.parser.refuse(unknown)
    arguments.command = command
    if command and (arguments.takes_command is None or notebooks):
        what = "a notebook" if notebooks else "this command"
        arguments.parser.error(f"{what} takes nothing behind --")
    if arguments.takes_command and not command and not arguments.notebooks:
        say = "which notebook" if notebooks else "what to run, for example: -- python -V"
        arguments.parser.error(f"say {say}")
    return arguments


def _chosen(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.ArgumentParser | None, int]:
    """The parser of the command that a command line names, and where its own words begin."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    return (commands.choices.get(argv[at]) if at < len(argv) else None), at + 1


def _names_notebook(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    """Whether a command that runs commands or notebooks (``notebook_options``) is given one: it has
    an option for notebooks, or what it is to run is called so."""
    wanted = parser.get_default("notebook_options")
    if wanted is None:
        return False
    at = 0
    while at < len(words):
        option, length = _option_at(parser, words[at])
        if not length:
            return words[at].endswith(NOTEBOOK)
        if option is not None and option.dest in wanted:
            return True
        at += length
    return False


def _bare_command(parser: argparse.ArgumentParser, argv: Sequence[str], begin: int) -> int | None:
    """Where in a command line the sandbox's own command begins, if that is not behind ``--``."""
    if not parser.get_default("bare"):
        return None
    ours = sum(1 for action in parser._actions if not action.option_strings)
    at = begin
    while at < len(argv):
        _, length = _option_at(parser, argv[at])
        if length:
            at += length
        elif ours:
            ours, at = ours - 1, at + 1
        else:
            return at
    return None


def _option_at(parser: argparse.ArgumentParser, word: str) -> tuple[argparse.Action | None, int]:
    """The option that a word is, and how many words it takes with its values: 0 if it is none."""
    if len(word) < 2 or not word.startswith("-"):
        return None, 0
    name, given, _ = word.partition("=")
    meant = [a for o, a in parser._option_string_actions.items() if o.startswith(name)]
    if given or not meant:
        return (meant[0] if meant else None), 1
    values = meant[0].nargs
    return meant[0], 1 + (values if isinstance(values, int) else 1)
