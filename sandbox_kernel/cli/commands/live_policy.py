"""``sandbox-kernel policy set`` and ``policy show``: the rules of a sandbox that runs."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping

from sandbox_kernel import audit
from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.find_sandboxes import sandbox
from sandbox_kernel.cli.formatting import note, print_json
from sandbox_kernel.cli.options import SANDBOX_HELP, Commands, add_command
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SandboxError, SpecRefused
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.sandboxes.capabilities import EgressWay
from sandbox_kernel.sandboxes.unattended import user_of
from sandbox_kernel.untrusted_text import printable

CONFIRMED_WITHIN = 15.0
"""Seconds for the process that carries the sandbox to carry a change out."""
_LOOK_EVERY = 0.1
_RESET = "--reset"


def add(below: Commands) -> None:
    usage = "[--backend BACKEND] NAME RULE ... | NAME --reset"
    parser = add_command(below, "set", set_rules, usage=usage)
    parser.add_which_backend()
    parser.add_flag(_RESET, help="back to the rules that the sandbox was made with")
    parser.add_argument("name", metavar="NAME", help=SANDBOX_HELP)
    about = "RULE ... in place of all; +RULE to add; -HOST to remove"
    parser.add_argument("rules", nargs=argparse.REMAINDER, metavar="RULE", help=about)
    parser = add_command(below, "show", show)
    parser.add_sandbox()
    parser.add_json()


def set_rules(arguments: argparse.Namespace) -> int:
    """Change what a running sandbox may reach, at once and until it is removed.

    Rules are as in `egress`: HOST, HOST:PORT, !HOST, @pip, JSON, default=allow. Plain ones stand
    in place of all; +RULE adds one in front of the others, -HOST removes those for a host. Open
    connections that the new rules forbid are ended. It waits until the process that carries the
    sandbox's connections has confirmed; without such a process the rules apply as soon as there is
    one. Exit code 1 if they are not in force.

    examples:
      sandbox-kernel policy set kernel-1a2b +data.example
      sandbox-kernel policy set notebook.ipynb -data.example
      sandbox-kernel policy set kernel-1a2b @pip data.example
      sandbox-kernel policy set kernel-1a2b default=deny
      sandbox-kernel policy set kernel-1a2b --reset
    """
    words = list(arguments.rules)
    reset = words == [_RESET] or (arguments.reset and not words)
    if not reset and (not words or arguments.reset or _RESET in words):
        arguments.parser.error("give rules, or --reset alone")
    option = next((word for word in words if word.startswith("--") and not reset), None)
    if option:
        arguments.parser.error(f"{option} comes before the sandbox's name")
    return foreground.run(_set(arguments.name, arguments.backend, None if reset else words))


async def _set(name: str, backend: str | None, words: list[str] | None) -> int:
    from sandbox_kernel.gateway.edits import edited  # lazy: start-up time
    from sandbox_kernel.gateway.presets import expand
    from sandbox_kernel.kernels.live_policy import read_change, write_change

    async with sandbox(name, backend) as (client, handle):
        record = Records().load(handle.backend, handle.name)
        spec = handle.spec
        _check_has_gateway(client, handle.name, spec.egress)
        policy = None
        if words is not None:
            present = spec.egress
            if all(word[:1] in ("+", "-") for word in words):
                change = read_change(handle.backend, handle.name, handle.id)
                present = change.policy if change and change.policy is not None else present
            policy = edited(present, words)
            _check_enforced(client, handle.name, policy)
            found = await asyncio.to_thread(expand, policy)
            _tell_of_variables(found.env, spec.env, await asyncio.to_thread(_known, spec.egress))
        change = write_change(record, policy)
        wanted = spec.egress if policy is None else policy
        audit.note(handle, "policy", action="set", egress=wanted.to_json())
        return await _confirmed(record, change.revision, wanted)


def _known(egress: EgressPolicy) -> dict[str, str]:
    from sandbox_kernel.gateway.presets import expand

    return expand(egress).env


def _check_has_gateway(client: SandboxClient, name: str, egress: EgressPolicy) -> None:
    if client.capabilities.egress_way(egress) is EgressWay.BACKEND:
        raise SpecRefused(
            f"The rules of sandbox {name!r} stay as they are: the backend {client.backend!r} "
            f"enforces them itself, and gets them when the sandbox is made. Start a new one with "
            f"other rules (egress)."
        )
    if not egress:
        raise SpecRefused(
            f"Sandbox {name!r} was made without a way out, so no rule can open one now. Start a "
            f"new one with rules: SANDBOX_KERNEL_EGRESS=HOST, or "
            f"`sandbox-kernel install {client.backend} --egress HOST`; for a kernel, shut it down "
            f"first."
        )


def _check_enforced(client: SandboxClient, name: str, policy: EgressPolicy) -> None:
    beyond = policy.unenforceable(client.capabilities.egress_parts)
    if beyond:
        field = "egress." + beyond.partition("=")[0].partition(".")[2]
        why = client.capabilities.notes.get(field, "")
        raise SpecRefused(
            f"The rules of sandbox {name!r} stay as they are: the backend {client.backend!r} "
            f"cannot enforce {beyond}. {why}".rstrip()
        )


def _tell_of_variables(
    wanted: Mapping[str, str], own: Mapping[str, str], known: Mapping[str, str]
) -> None:
    """What a preset sets in the environment reaches only sandboxes that are made with it."""
    missing = {k: v for k, v in wanted.items() if k not in own and known.get(k) != v}
    if missing:
        set_there = ", ".join(f"{name}={value}" for name, value in sorted(missing.items()))
        note(f"New sandboxes with these presets also have {set_there}; set that in this one.")


async def _confirmed(record: Record, revision: str, policy: EgressPolicy) -> int:
    from sandbox_kernel.kernels.live_policy import Change, carried_out

    deadline = time.monotonic() + CONFIRMED_WITHIN
    while True:
        try:
            now = Records().load(record.backend, record.name)
        except SandboxError as error:
            note(f"The rules are not in force: {error}")
            return 1
        error_text = carried_out(now, Change(revision, policy))
        if error_text:
            note(f"Sandbox {record.name!r}: {printable(error_text)}")
            return 1
        if error_text is not None:
            print(_in_words(policy))
            return 0
        if user_of(now) is None:
            note(
                f"No process of this machine carries the connections of sandbox {record.name!r} "
                f"now, so nothing passes. The rules apply as soon as one does."
            )
            return 1
        if time.monotonic() > deadline:
            note(
                f"Process {user_of(now)}, which carries sandbox {record.name!r}, has not confirmed "
                f"the rules within {CONFIRMED_WITHIN:g} s. `sandbox-kernel policy show "
                f"{record.name}` says when it has."
            )
            return 1
        await asyncio.sleep(_LOOK_EVERY)


def show(arguments: argparse.Namespace) -> int:
    """Show the rules of a running sandbox, and where they come from.

    With --json: an object with the keys sandbox, backend, source ("made with" or "policy set"),
    egress (as in the settings), enforced_by ("gateway", "backend", or null without a way out),
    in_force (null if nothing was changed) and error.

    examples:
      sandbox-kernel policy show kernel-1a2b
    """
    return foreground.run(_show(arguments.name, arguments.backend, arguments.json))


async def _show(name: str, backend: str | None, as_json: bool) -> int:
    from sandbox_kernel.kernels.live_policy import carried_out, read_change

    async with sandbox(name, backend) as (client, handle):
        record, egress = Records().load(handle.backend, handle.name), handle.spec.egress
        error: str | None = ""
        try:
            change = read_change(handle.backend, handle.name, handle.id)
        except SandboxError as problem:
            change, error, egress = None, str(problem), EgressPolicy()
        source, in_force = "made with", None
        if change is not None:
            done = carried_out(record, change)
            in_force, error = done == "", done
            if change.policy is not None:
                source, egress = "policy set", change.policy
        way = client.capabilities.egress_way(handle.spec.egress)
        by = None if way is EgressWay.CLOSED else way.value
        if as_json:
            facts: dict[str, object] = {
                "sandbox": handle.name,
                "backend": handle.backend,
                "source": source,
            }
            facts |= {"egress": egress.to_json(), "enforced_by": by}
            print_json({**facts, "in_force": in_force, "error": error or None})
        else:
            print(f"{handle.name}: {'the rules of' if source == 'policy set' else 'as'} {source}")
            print(_in_words(egress) if by else "  no way out: nothing is allowed")
            if in_force is False and not error:
                note("These rules are not in force yet: no process has confirmed them.")
        if error:
            note(error)
    return 1 if error else 0


def _in_words(policy: EgressPolicy) -> str:
    lines = []
    for number, level in enumerate(policy.levels):
        if number:
            lines.append("  and only within:")
        for index, rule in enumerate(level.rules, 1):
            parts = {k: v for k, v in _plain(rule.to_json()).items() if k not in ("host", "action")}
            rest = "".join(f" {key}={_words(value)}" for key, value in parts.items())
            lines.append(f"  {index}. {rule.action} {rule.host}{rest}")
        lines.append(f"  default: {level.default}")
    return printable("\n".join(lines))


def _plain(rule: str | dict[str, object]) -> dict[str, object]:
    return {} if isinstance(rule, str) else rule


def _words(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
