"""The options of all commands, and what they have in common."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from sandbox_kernel import __version__
from sandbox_kernel.cli.text import note
from sandbox_kernel.jupyter.configuration import (
    OWN_FIELDS,
    OWN_HELP,
    KernelConfiguration,
    read_configuration,
)
from sandbox_kernel.spec import FIELD_HELP, SandboxSpec

Commands = Any  # argparse has no public name for what add_subparsers gives
_SPEC_DEST, _KERNEL_DEST = "spec_", "kernel_"
_FORMER_VOLUME = "former_volume"
SANDBOX_HELP = "the sandbox, as `ps` shows it: its name, the beginning of it, or its notebook"
VOLUME_HELP = "keep the files of /workspace under this name, for the next sandbox with it"
_METAVARS = {
    "name": "NAME",
    "image": "IMAGE",
    "workspace": "NAME",
    "secrets": "NAME",
    "readable": "PATH",
    "python": "PATH",
    "egress": "RULE",
    "options": "JSON",
    "guest_transport": "ipc|tcp",
    "upload": "WHAT",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line. What stands behind ``--`` is a command for the sandbox and is not
    looked into; it becomes ``command``. So does what follows the last of our own words, where the
    command allows that (``exec NAME ls -l``). ``run`` is the function to call."""
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
        arguments.parser.error(_what_was_meant(arguments.parser, unknown))
    arguments.command = command
    if command and arguments.takes_command is None:
        arguments.parser.error("this command takes nothing behind --")
    if arguments.takes_command and not command:
        arguments.parser.error("say what to run, for example: -- python -V")
    return arguments


def _what_was_meant(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """An error for words of a command line that its command does not know."""
    word = unknown[0].partition("=")[0]
    close = difflib.get_close_matches(word, parser._option_string_actions, n=1)
    if close and word.startswith("-"):
        return f"there is no option {word}; did you mean {close[0]}?"
    return f"unrecognized arguments: {' '.join(unknown)}"


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


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; ``completion`` reads the options from it."""
    # They need this module in turn.
    from sandbox_kernel.cli.commands import (
        completion,
        cp,
        doctor,
        exec_,
        image,
        install,
        launch,
        list_,
        logs,
        pause,
        ps,
        rm,
        run,
        shell,
        stats,
        uninstall,
        workspace,
    )

    parser = argparse.ArgumentParser(
        prog="sandbox-kernel",
        description="Jupyter kernels, and other commands, in sandboxes.",
        epilog="""\
Start with `sandbox-kernel doctor`. Each command has its own --help, with examples.

exit codes:
  0 worked, 1 failed (a line on stderr says why), 2 wrong usage, 130 Ctrl-C;
  exec, shell, run and launch give the code of what they ran""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sandbox-kernel {__version__}")
    parser.add_argument("--debug", action="store_true", help="log more, and show tracebacks")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        install.add,
        uninstall.add,
        list_.add,
        doctor.add,
        ps.add,
        stats.add,
        rm.add,
        pause.add,
        logs.add,
        exec_.add,
        shell.add,
        cp.add,
        run.add,
        launch.add,
        image.add,
        workspace.add,
        completion.add,
    ):
        add(added)
    return parser


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    details: str = "",
    examples: Sequence[str] = (),
    usage: str | None = None,
    takes_command: bool | None = None,
    bare: bool = False,
) -> argparse.ArgumentParser:
    """A parser for one command. ``takes_command``: whether something behind ``--`` is needed
    (True), allowed (False), or wrong (None). ``bare``: the ``--`` itself may be left out."""
    epilog = "examples:\n" + "\n".join(f"  sandbox-kernel {example}" for example in examples)
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        usage=f"sandbox-kernel {name} {usage}" if usage else None,
        description=f"{summary[0].upper()}{summary[1:]}.{' ' if details else ''}{details}",
        epilog=epilog if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    made.set_defaults(run=run, parser=made, takes_command=takes_command, bare=bare)
    # Whose output a person reads also tells what has been left waiting.
    made.set_defaults(reads_settings=False, tells_left=name not in ("completion", "rm"))
    return made


def add_sandbox(parser: argparse.ArgumentParser) -> None:
    """The name of a sandbox that exists."""
    parser.add_argument("name", metavar="NAME", help=SANDBOX_HELP)
    add_which_backend(parser)


def add_which_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", metavar="BACKEND", help="where the sandbox is, if two backends have that name"
    )


def add_kernel_options(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Every setting of KernelConfiguration that is not the sandbox's as an option;
    ``kernel_values`` reads them."""
    group = parser.add_argument_group("the kernel and its files")
    kinds = {field.name: str(field.type) for field in fields(KernelConfiguration)}
    for name in OWN_FIELDS:
        if name in leave_out:
            continue
        option, dest = "--" + name.replace("_", "-"), _KERNEL_DEST + name
        if kinds[name] == "bool":
            group.add_argument(
                option, dest=dest, action=argparse.BooleanOptionalAction, help=OWN_HELP[name]
            )
            continue
        several = "tuple" in kinds[name]
        group.add_argument(
            option,
            dest=dest,
            metavar=_METAVARS.get(name) or _metavar(name, kinds[name]),
            action="append" if several else "store",
            help=OWN_HELP[name] + ("; may be repeated" if several else ""),
        )


def kernel_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives, as ``read_configuration`` understands them and as
    they stand in a kernelspec."""
    given = {}
    for key, value in vars(arguments).items():
        if key.startswith(_KERNEL_DEST) and value is not None:
            one = isinstance(value, list) and len(value) == 1
            given[key.removeprefix(_KERNEL_DEST)] = value[0] if one else value
    read = read_configuration(given, default_name="kernel", environ={}, where="the command line")
    values = {key: getattr(read, key) for key in given}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def add_spec_options(
    parser: argparse.ArgumentParser,
    *,
    leave_out: Sequence[str] = (),
    volume: bool = False,
    workspace: str = "",
) -> None:
    """Every field of SandboxSpec as an option; ``spec_values`` reads them. ``volume``: the field
    ``workspace`` is a folder of the sandbox's, which has nothing to do with saved workspaces.
    ``workspace``: what else it is."""
    group = parser.add_argument_group(
        "the sandbox", "What is not given is the backend's default; $SANDBOX_KERNEL_<OPTION> too."
    )
    for field in fields(SandboxSpec):
        if field.name in leave_out:
            continue
        several = any(kind in str(field.type) for kind in ("Mapping", "tuple", "EgressPolicy"))
        option, text = "--" + field.name.replace("_", "-"), FIELD_HELP[field.name]
        if field.name == "workspace":
            option, text = ("--volume", VOLUME_HELP) if volume else (option, workspace or text)
        group.add_argument(
            option,
            dest=_SPEC_DEST + field.name,
            metavar=_METAVARS.get(field.name) or _metavar(field.name, str(field.type)),
            action="append" if several else "store",
            help=text + ("; may be repeated" if several else ""),
        )
    if volume:
        group.add_argument("--workspace", dest=_FORMER_VOLUME, help=argparse.SUPPRESS)


def spec_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of SandboxSpec that the command line gives, for ``SandboxSpec.from_mapping``.
    Paths may be relative here, and an interpreter may be named as on the shell's PATH."""
    values = {
        key.removeprefix(_SPEC_DEST): value
        for key, value in vars(arguments).items()
        if key.startswith(_SPEC_DEST) and value is not None
    }
    if getattr(arguments, _FORMER_VOLUME, None):
        note(
            "--workspace is called --volume here, since a saved workspace is something else; it "
            "still works, for now."
        )
        values.setdefault("workspace", getattr(arguments, _FORMER_VOLUME))
    if values.get("python"):
        given = values["python"]
        values["python"] = os.path.abspath(os.path.expanduser(shutil.which(given) or given))
    if "readable" in values:
        values["readable"] = [os.path.abspath(os.path.expanduser(p)) for p in values["readable"]]
    return values


def _metavar(name: str, kind: str) -> str:
    if "Mapping" in kind:
        return "NAME=VALUE"
    if name.endswith("_mib"):
        return "MIB"
    return "SECONDS" if name.endswith(("_seconds", "_timeout")) else "N"
