"""The options of all commands, and what they have in common."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from sandbox_kernel import __version__
from sandbox_kernel.spec import FIELD_HELP, SandboxSpec

Commands = Any  # argparse has no public name for what add_subparsers gives
_SPEC_DEST = "spec_"
_METAVARS = {
    "name": "NAME",
    "image": "IMAGE",
    "workspace": "NAME",
    "secrets": "NAME",
    "readable": "PATH",
    "python": "PATH",
    "egress": "RULE",
    "options": "JSON",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line. What stands behind ``--`` is a command for the sandbox and is not
    looked into; it becomes ``command``. ``run`` is the function to call."""
    own, command = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    parser = build_parser()
    arguments = parser.parse_args(own)
    arguments.command = command
    if command and arguments.takes_command is None:
        arguments.parser.error("this command takes nothing behind --")
    if arguments.takes_command and not command:
        arguments.parser.error("say what to run behind --, for example: -- python -V")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; ``completion`` reads the options from it."""
    # They need this module in turn.
    from sandbox_kernel.cli.commands import (
        completion,
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
        rm.add,
        pause.add,
        logs.add,
        exec_.add,
        shell.add,
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
) -> argparse.ArgumentParser:
    """A parser for one command. ``takes_command``: whether something behind ``--`` is needed
    (True), allowed (False), or wrong (None)."""
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
    made.set_defaults(run=run, parser=made, takes_command=takes_command)
    return made


def add_sandbox(parser: argparse.ArgumentParser) -> None:
    """The name of a sandbox that exists."""
    parser.add_argument("name", metavar="NAME", help="name of the sandbox, as `ps` shows it")
    add_which_backend(parser)


def add_which_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", metavar="BACKEND", help="where the sandbox is, if two backends have that name"
    )


def add_spec_options(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Every field of SandboxSpec as an option; ``spec_values`` reads them."""
    group = parser.add_argument_group(
        "the sandbox", "What is not given is the backend's default; $SANDBOX_KERNEL_<OPTION> too."
    )
    for field in fields(SandboxSpec):
        if field.name in leave_out:
            continue
        several = any(kind in str(field.type) for kind in ("Mapping", "tuple", "EgressPolicy"))
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=_SPEC_DEST + field.name,
            metavar=_METAVARS.get(field.name) or _metavar(field.name, str(field.type)),
            action="append" if several else "store",
            help=FIELD_HELP[field.name] + ("; may be repeated" if several else ""),
        )


def spec_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of SandboxSpec that the command line gives, for ``SandboxSpec.from_mapping``.
    Paths may be relative here, and an interpreter may be named as on the shell's PATH."""
    values = {
        key.removeprefix(_SPEC_DEST): value
        for key, value in vars(arguments).items()
        if key.startswith(_SPEC_DEST) and value is not None
    }
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
