"""What commands have in common: help, options, settings."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sandbox_kernel.cli.formatting import note
from sandbox_kernel.jupyter.configuration import read_configuration
from sandbox_kernel.settings import BOOLEAN, settings_of
from sandbox_kernel.spec import FORMER_VOLUME, NOTEBOOK, SETTINGS, KernelConfiguration, SandboxSpec
from sandbox_kernel.suggestions import closest, did_you_mean

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.workspace.reports import Quota

Commands = Any  # argparse has no public name for what add_subparsers gives
Run = Callable[[argparse.Namespace], "int | None"]
"""Does a command, and gives its exit code; None is 0."""
SANDBOX_HELP = "the sandbox, as `ps` shows it: its name, the beginning of it, or its notebook"
_SETTING = "setting_"
_WORKSPACE, _VOLUME = SETTINGS["workspace"].variable, SETTINGS["volume"].variable


class CommandParser(argparse.ArgumentParser):
    """The parser of a command, with the options that several commands have. Proposes a name for a
    misspelled one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(value, list(action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is unknown. {hint}")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Usage error for words of a command line that the command does not know."""
        word = unknown[0].partition("=")[0]
        close = closest(word, self._option_string_actions)
        if close and word.startswith("-"):
            self.error(f"there is no option {word}; did you mean {close}?")
        self.error(f"unrecognized arguments: {' '.join(unknown)}")

    def add_flag(self, *names: str, help: str) -> None:  # noqa: A002
        self.add_argument(*names, action="store_true", help=help)

    def add_sandbox(self, *, several: str | None = None, default: str = "") -> None:
        """The ``name`` of a sandbox, or ``names`` of several (``+`` or ``*``), and its backend."""
        dest = "names" if several else "name"
        self.add_argument(dest, nargs=several, metavar="NAME", help=SANDBOX_HELP + default)
        self.add_which_backend()

    def add_which_backend(self) -> None:
        about = "where the sandbox is, if two backends have that name"
        self.add_argument("--backend", metavar="BACKEND", help=about)

    def add_json(self, *, quiet: bool = False) -> None:
        form = self.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print JSON")
        if quiet:
            form.add_argument("-q", "--quiet", action="store_true", help="print names only")

    def add_timeout(self, default: float | None = None) -> None:
        about = "end it after this long" + (f" (default: {default:g})" if default else "")
        unit = "SECONDS"
        self.add_argument("--timeout", type=seconds, default=default, metavar=unit, help=about)

    def add_quota(self) -> None:
        """How much a command may copy; ``quota_of`` reads it."""
        self.add_argument("--max-files", type=positive, metavar="N", help="default: 500,000")
        self.add_argument("--max-bytes", type=positive, metavar="N", help="default: 20 GiB")

    def add_settings(self, *, of: type, leave_out: str = "") -> None:
        """An option for each setting of a class but ``leave_out``, for ``given_settings``."""
        group = self.add_argument_group(
            "the sandbox" if of is SandboxSpec else "the kernel and its files",
            "The default is the variable SANDBOX_KERNEL_<OPTION>, else the backend's own.",
        )
        for setting in settings_of(of).values():
            kind = setting.kind
            if setting.name == leave_out:
                continue
            if kind is BOOLEAN:
                how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            else:
                how = {"metavar": kind.metavar, "action": "append" if kind.several else "store"}
            group.add_argument(
                setting.option,
                dest=_SETTING + setting.name,
                help=setting.help + ("; may be repeated" if kind.several else ""),
                **how,
            )

    def add_sandbox_settings(self) -> None:
        """The options of a command that makes a sandbox of its own; ``configured`` reads them."""
        self.add_argument("--backend", metavar="BACKEND", help="default: local")
        self.set_defaults(reads_settings=True, has_former_volume=True)
        self.add_settings(of=SandboxSpec)
        files = SETTINGS["files"]
        about = "show this folder as /workspace: none, mount-ro, mount; for notebooks also copy"
        self.add_argument(files.option, dest=_SETTING + files.name, metavar="HOW", help=about)
        self.add_argument("--workspace", dest=_SETTING + FORMER_VOLUME, help=argparse.SUPPRESS)


def add_command(
    commands: Commands,
    name: str,
    run: Run,
    *,
    usage: str | None = None,
    takes_command: bool | None = None,
    bare: bool = False,
) -> CommandParser:
    """A parser for one command. Its help is the docstring of ``run``: a summary, details, and
    examples at the end.

    ``takes_command``: whether something behind ``--`` is needed (True), allowed (False), or wrong
    (None). ``bare``: the ``--`` itself may be left out.
    """
    text, _, epilog = inspect.cleandoc(run.__doc__ or "").partition("\n\nexamples:\n")
    summary, _, details = text.partition("\n\n")
    made: CommandParser = commands.add_parser(
        name,
        help=f"{summary[:1].lower()}{summary[1:].rstrip('.')}",
        usage=f"%(prog)s {usage}" if usage else None,
        description=f"{summary}\n{details}".strip(),
        epilog=f"examples:\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    made.set_defaults(run=run, parser=made, takes_command=takes_command, bare=bare)
    # A command whose output a person reads also mentions sandboxes that were left behind.
    made.set_defaults(reads_settings=False, tells_left=name not in ("completion", "rm"))
    return made


def add_group(commands: Commands, name: str, about: Run) -> Commands:
    """A command that only has commands of its own, added to the result; ``about`` has its help."""
    parser = add_command(commands, name, about)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def quota_of(arguments: argparse.Namespace) -> Quota:
    from sandbox_kernel.workspace.reports import Quota  # lazy: start-up time

    given = {"max_files": arguments.max_files, "max_bytes": arguments.max_bytes}
    return Quota(**{key: value for key, value in given.items() if value is not None})


def positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return number


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise ValueError
    return number


seconds.__name__ = "number of seconds"  # argparse says "invalid <this> value"


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives, for ``read_configuration``. Paths may be relative
    here, and an interpreter may be named as on the shell's PATH."""
    values = {}
    for option, value in vars(arguments).items():
        if option.startswith(_SETTING) and value is not None:
            key = option.removeprefix(_SETTING)
            values[key] = SETTINGS[key].kind.from_shell(value)
    if FORMER_VOLUME in values and getattr(arguments, "has_former_volume", False):
        note(
            "--workspace is called --volume here, since a saved workspace is something else; it "
            "still works, for now."
        )
        values.setdefault("volume", values.pop(FORMER_VOLUME))
    return values


@contextlib.contextmanager
def winning(settings: Iterable[str]) -> Iterator[None]:
    """Meanwhile, the environment says nothing about these settings, which would win over what
    kernels of this process are given."""
    variables = [SETTINGS[name].variable for name in settings]
    hidden = {name: os.environ.pop(name) for name in variables if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def configured(
    arguments: argparse.Namespace, config: Mapping[str, Any], default_name: str
) -> KernelConfiguration:
    """The settings of a new sandbox: options win over the environment, that over ``config``."""
    options = given_settings(arguments)
    if arguments.backend:
        options["backend"] = arguments.backend
    overridden = {SETTINGS[key].variable for key in options}
    environ = {name: value for name, value in os.environ.items() if name not in overridden}
    former = environ.get(_WORKSPACE, "")
    if former and not former.endswith(NOTEBOOK):
        del environ[_WORKSPACE]
        if "volume" not in options and not environ.get(_VOLUME):
            environ[_VOLUME] = former
            note(f"{_WORKSPACE} is called {_VOLUME} here: a saved workspace is something else.")
    if FORMER_VOLUME in config:  # of a launcher that an earlier version installed
        config = {"volume": config[FORMER_VOLUME], **config}
        del config[FORMER_VOLUME]
    return read_configuration(
        config, options, default_name=default_name, environ=environ, where="the command line"
    )
