"""``sandbox-kernel mcp``: sandboxes for agents, through the Model Context Protocol."""

from __future__ import annotations

import argparse
import os
from typing import Any

from sandbox_kernel.agents.mcp.client_config import CLIENTS, http_config, stdio_config
from sandbox_kernel.agents.mcp.configuration import (
    LEASE,
    NOT_SHARED,
    read_policy,
    settle_environment,
)
from sandbox_kernel.agents.mcp.http_address import address_url, listen, url
from sandbox_kernel.agents.mcp.policy import Door, Limits, Policy
from sandbox_kernel.agents.mcp.token import read_token
from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.formatting import note, print_json
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.errors import SandboxUnavailable, SpecError
from sandbox_kernel.settings import BOOLEAN, Setting, settings_of
from sandbox_kernel.spec import SandboxSpec

_LIMIT, _DOOR, _SETTING = "limit_", "door_", "setting_"


def add(commands: Commands) -> None:
    parser = add_command(commands, "mcp", run)
    about = "the policy: TOML, or JSON if its name ends so; options win over it"
    parser.add_argument("--config", metavar="FILE", help=about)
    parser.add_flag("--http", help="serve HTTP at a port, instead of stdin and stdout")
    about = "print what to paste into a client's configuration, and do not serve"
    shown = "|".join(CLIENTS)
    parser.add_argument("--print-config", choices=[*CLIENTS], metavar=shown, help=about)
    _add_options(parser, "what the model may do", Limits, _LIMIT)
    _add_options(parser, "with --http", Door, _DOOR)
    _add_options(parser, "each sandbox", SandboxSpec, _SETTING)
    parser.set_defaults(reads_settings=True, tells_left=False)


def _add_options(parser: Any, title: str, cls: type, prefix: str) -> None:
    group = parser.add_argument_group(title)
    for one in _options(cls):
        how: dict[str, Any] = {"metavar": one.kind.metavar}
        if one.kind is BOOLEAN:
            how = {"action": argparse.BooleanOptionalAction}
        elif one.kind.several:
            how["action"] = "append"
        default = LEASE if one.name == "lease_seconds" else one.default
        tells = not default or callable(default) or "(default" in one.help
        shown = "" if tells else f" (default: {_shown(default)})"
        several = "; may be repeated" if one.kind.several else ""
        group.add_argument(
            one.option, dest=prefix + one.name, help=one.help + shown + several, **how
        )


def _options(cls: type) -> list[Setting]:
    """What can be given on the command line: not the names of sandboxes, nor what is for others."""
    return [
        one
        for one in settings_of(cls).values()
        if one.only_for != "launcher" and one.name not in NOT_SHARED
    ]


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


def run(arguments: argparse.Namespace) -> int:
    """Give agents sandboxes with Jupyter kernels: a server of the Model Context Protocol.

    A client such as Claude, Cursor or VS Code starts it and talks to it on stdin and stdout, or
    over HTTP at a port of this machine. Models open sandboxes, run cells in them, and read and
    write files there. What they may do is decided here, never by them: with options, or in a
    file. Sandboxes of a server that has ended wait for the next one until their lease is over.

    examples:
      sandbox-kernel mcp --print-config claude
      sandbox-kernel mcp --egress @pip --memory-mib 2048 --max-sandboxes 2
      sandbox-kernel mcp --config policy.toml --print-config vscode
      sandbox-kernel mcp --http --notebooks ~/notebooks
    """
    policy = read_policy(
        arguments.config,
        _given(arguments, Limits, _LIMIT),
        _given(arguments, SandboxSpec, _SETTING),
        _given(arguments, Door, _DOOR),
    )
    if arguments.print_config:
        return _print_config(arguments, policy)
    settle_environment()
    return _serve_http(policy) if arguments.http else _serve_stdio(policy)


def _given(arguments: argparse.Namespace, cls: type, prefix: str) -> dict[str, Any]:
    return {
        one.name: one.kind.from_shell(value)
        for one in _options(cls)
        if (value := getattr(arguments, prefix + one.name)) is not None
    }


def _print_config(arguments: argparse.Namespace, policy: Policy) -> int:
    client, door = arguments.print_config, policy.door
    if arguments.http:
        if not door.port:
            raise SpecError("--port 0 is another port at each start; name one for a configuration.")
        token = read_token(door.token_file)
        print_json(http_config(client, address_url(door.host, door.port), token))
    else:
        print_json(stdio_config(client, _same_arguments(arguments)))
    note(f"Paste this into {CLIENTS[client]}.")
    return 0


def _same_arguments(arguments: argparse.Namespace) -> list[str]:
    """The options that were given, for a server that starts in another folder."""
    words = ["--config", os.path.abspath(arguments.config)] if arguments.config else []
    for cls, prefix in ((Limits, _LIMIT), (SandboxSpec, _SETTING)):
        for name, value in _given(arguments, cls, prefix).items():
            option = settings_of(cls)[name].option
            if isinstance(value, bool):
                words.append(option if value else f"--no-{option.removeprefix('--')}")
                continue
            for item in value if isinstance(value, list) else [value]:
                words += [option, str(item)]
    return words


def _serve_stdio(policy: Policy) -> int:
    _check_extra()
    from sandbox_kernel.agents.mcp.stdio import serve_stdio

    return _until_signal(serve_stdio(policy))


def _serve_http(policy: Policy) -> int:
    _check_extra()
    from sandbox_kernel.agents.mcp.http import serve_http

    token = read_token(policy.door.token_file)
    with listen(policy.door) as listening:

        async def serve() -> None:
            print(url(listening), flush=True)  # now that signals are heeded
            await serve_http(policy, listening, token)

        return _until_signal(serve())


def _until_signal(serving: Any) -> int:
    try:
        foreground.run(serving)
    except foreground.Interrupted as interrupted:
        if interrupted.at_once:
            raise
    return 0  # the usual end


def _check_extra() -> None:
    try:
        import mcp.server.mcpserver  # noqa: F401
    except ImportError as error:
        raise SandboxUnavailable(
            f"`sandbox-kernel mcp` needs the package mcp, version 2: "
            f"pip install 'sandbox-kernel[mcp]' ({error})."
        ) from error
