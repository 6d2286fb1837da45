"""``sandbox-kernel completion``: completion scripts for shells, made from the parser."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

from sandbox_kernel.cli.parser import Commands, add_command, build_parser

_SANDBOXES = "sandbox-kernel ps --all --quiet 2>/dev/null"
_OF_SANDBOXES = ("rm", "pause", "resume", "logs", "stats", "exec", "shell", "cp")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        run,
        "print a completion script for a shell",
        examples=(
            "completion bash > ~/.local/share/bash-completion/completions/sandbox-kernel",
            'completion zsh > "${fpath[1]}/_sandbox-kernel"',
            "completion fish > ~/.config/fish/completions/sandbox-kernel.fish",
        ),
    )
    parser.add_argument("shell", metavar="SHELL", choices=sorted(_SCRIPTS), help="bash, fish, zsh")


@dataclass(frozen=True)
class _Option:
    long: str
    help: str
    value: bool


@dataclass(frozen=True)
class _Command:
    name: str
    help: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]
    """What its positional argument may be, if that is known beforehand."""


def run(arguments: argparse.Namespace) -> int:
    print(_SCRIPTS[arguments.shell](_described()), end="")
    return 0


def _described() -> list[_Command]:
    found = []
    for action in build_parser()._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for choice in action._choices_actions:
            parser = action.choices[choice.dest]
            options, words = _of_parser(parser)
            found.append(_Command(choice.dest, choice.help or "", tuple(options), tuple(words)))
    return found


def _of_parser(parser: argparse.ArgumentParser) -> tuple[list[_Option], list[str]]:
    """Options and known words of a command, those of its own commands included."""
    from sandbox_kernel.sandboxes.backends import backend_names

    options, words = [], []
    for inner in parser._actions:
        if isinstance(inner, argparse._SubParsersAction):
            words += list(inner.choices)
            for below in inner.choices.values():
                more, _ = _of_parser(below)
                options += [option for option in more if option not in options]
        elif inner.option_strings and inner.help != argparse.SUPPRESS:
            takes_value = inner.nargs != 0
            text = (inner.help or "").replace("%%", "%")
            options.append(_Option(inner.option_strings[-1], text, takes_value))
        elif not inner.option_strings:
            words += list(inner.choices or ())
            words += backend_names() if inner.dest in ("backend", "backends") else []
    return options, words


def _bash(commands: list[_Command]) -> str:
    cases = "".join(
        f"    {command.name}) words={shlex.quote(' '.join(_words(command)))};;\n"
        for command in commands
    )
    return f"""\
# bash completion for sandbox-kernel
_sandbox_kernel() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command= words= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    [ "$word" = -- ] && {{ COMPREPLY=($(compgen -o default -- "$current")); return; }}
    case $word in -*) ;; *) [ -z "$command" ] && command=$word;; esac
  done
  case $command in
    '') words={shlex.quote(" ".join([c.name for c in commands] + ["--help", "--version"]))};;
{cases}  esac
  case $command in
    {"|".join(_OF_SANDBOXES)}) [[ $current == -* ]] || words+=" $({_SANDBOXES})";;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [ -n "${{COMPREPLY-}}" ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -F _sandbox_kernel sandbox-kernel
"""


def _zsh(commands: list[_Command]) -> str:
    names = "\n".join(f"    {shlex.quote(f'{c.name}:{c.help}')}" for c in commands)
    cases = "".join(
        f"    {command.name}) words_={shlex.quote(' '.join(_words(command)))};;\n"
        for command in commands
    )
    return f"""\
#compdef sandbox-kernel
# zsh completion for sandbox-kernel
_sandbox_kernel() {{
  local words_=''
  local -a commands
  commands=(
{names}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  if (( ${{words[(I)--]}} && ${{words[(I)--]}} < CURRENT )); then
    _files
    return
  fi
  case $words[2] in
{cases}  esac
  case $words[2] in
    {"|".join(_OF_SANDBOXES)}) [[ $PREFIX == -* ]] || words_+=" $({_SANDBOXES})";;
  esac
  compadd -- ${{=words_}} || _files
}}
if [ "$funcstack[1]" = _sandbox_kernel ]; then
  _sandbox_kernel "$@"
else
  compdef _sandbox_kernel sandbox-kernel
fi
"""


def _fish(commands: list[_Command]) -> str:
    names = " ".join(command.name for command in commands)
    lines = ["# fish completion for sandbox-kernel"]
    none = f"not __fish_seen_subcommand_from {names}"
    for command in commands:
        chosen = f"__fish_seen_subcommand_from {command.name}"
        start = "complete -c sandbox-kernel"
        lines.append(
            f"{start} -f -n {_fish_quoted(none)} -a {command.name} -d {_fish_quoted(command.help)}"
        )
        lines += [
            f"{start} -n {_fish_quoted(chosen)} -l {option.long.lstrip('-')}"
            f"{' -r' if option.value else ''} -d {_fish_quoted(option.help)}"
            for option in command.options
        ]
        if command.words:
            words = _fish_quoted(" ".join(command.words))
            lines.append(f"{start} -f -n {_fish_quoted(chosen)} -a {words}")
        if command.name in _OF_SANDBOXES:
            names_now = _fish_quoted(f"({_SANDBOXES})")
            lines.append(f"{start} -f -n {_fish_quoted(chosen)} -a {names_now}")
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _words(command: _Command) -> list[str]:
    return [*command.words, *(option.long for option in command.options)]


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
