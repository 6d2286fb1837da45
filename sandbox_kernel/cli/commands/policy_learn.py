"""``sandbox-kernel policy learn``."""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox_kernel.audit.event_log import SUFFIX
from sandbox_kernel.audit.reading import read
from sandbox_kernel.audit.trail import FOLDER
from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.formatting import note, print_json
from sandbox_kernel.cli.options import Commands, add_command, winning
from sandbox_kernel.egress import ALLOW, DENY, EgressPolicy, EgressRule
from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.paths import data_dir
from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.agents.run_report import FailedCell
    from sandbox_kernel.gateway.learning import Learned

_QUIET, _MOST_WAIT = 0.5, 10.0
"""Seconds without a new event after which the audit of an ended sandbox is complete: connections
that were open are recorded when they are closed."""


def add(below: Commands) -> None:
    parser = add_command(below, "learn", learn)
    parser.add_argument("notebook", metavar="NOTEBOOK", type=Path)
    about = f"what the run may reach: {ALLOW} (all but private networks) or {DENY} (default: allow)"
    parser.add_argument("--default", choices=(ALLOW, DENY), default=ALLOW, help=about)
    about = "name of a kernel of ours (default: sandbox)"
    parser.add_argument("--kernel", metavar="NAME", default="sandbox", help=about)
    parser.add_flag("--paths", help="rules for methods and paths; https is read (extra 'gateway')")
    parser.add_timeout()
    parser.add_flag("--json", help="print JSON: egress, denied, private, failed_cells")


def learn(arguments: argparse.Namespace) -> int:
    """Run a notebook, and print the smallest policy that lets it pass.

    It runs in a sandbox of its own, under the default that you choose; with allow, code of the
    notebook reaches the whole internet while it is learned. What was refused is listed in comments.
    The output is a policy file, and fits $SANDBOX_KERNEL_EGRESS. --timeout is for each cell.

    Exit codes: 0 all cells passed; 1 a cell failed, so the policy may lack what comes after it.

    examples:
      sandbox-kernel policy learn analysis.ipynb > rules.txt
      sandbox-kernel policy learn analysis.ipynb --default deny
      sandbox-kernel policy learn analysis.ipynb --json --paths
    """
    from sandbox_kernel.gateway.learning import (
        known_presets,
        policy_to_learn_under,
    )
    from sandbox_kernel.gateway.learning import learn as learn_from

    presets = known_presets()
    under = policy_to_learn_under(arguments.default, presets, paths=arguments.paths)
    name = f"learn-{secrets.token_hex(4)}"
    settings = {
        "name": name,
        "audit": "all",
        "egress": under.to_json(),
        "keep_on_exit": False,
        "pause_on_exit": False,
    }
    failed = _run(arguments, settings)
    audit = _audit_of(name, under)
    learned = learn_from(read(_complete(audit)), presets, paths=arguments.paths)
    if arguments.json:
        print_json(
            {
                "egress": learned.policy.to_json(),
                "denied": learned.denied,
                "private": learned.private,
                "failed_cells": {cell.number: cell.error for cell in failed},
            }
        )
    else:
        print("\n".join(_lines(arguments, learned, failed)))
    for cell in failed:
        note(f"Cell {cell.number} failed: {cell.error}")
    if failed:
        note("The policy is of what has run; it may lack what those cells would have reached.")
    return 1 if failed else 0


def _run(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> Sequence[FailedCell]:
    """Run all cells, also after one has failed; the failed ones. The notebook is left alone."""
    from sandbox_kernel.agents.notebook_run import RunOptions, run_notebook  # lazy: start-up time
    from sandbox_kernel.agents.run_report import Ending

    options = RunOptions(
        cell_timeout=arguments.timeout,
        kernel=arguments.kernel,
        settings=settings,
        keep_going=True,
    )
    with tempfile.TemporaryDirectory(prefix="sandbox-kernel-") as folder, winning(settings):
        output = Path(folder, "ran.ipynb")
        report = foreground.run(run_notebook(arguments.notebook, output, options))
    if report.ending is Ending.REFUSED:
        raise SpecError(report.message)
    if report.ending is Ending.SANDBOX_FAILED and not report.failed:
        raise SandboxError(report.message)
    return report.failed


def _audit_of(name: str, under: EgressPolicy) -> Path:
    from sandbox_kernel.sandboxes.backends import load_backend  # lazy: start-up time
    from sandbox_kernel.sandboxes.capabilities import EgressWay

    found = list((data_dir() / FOLDER).glob(f"*-{name}{SUFFIX}"))
    if len(found) != 1:
        raise SandboxError(
            f"Nothing was learned: there is no audit of sandbox {name!r}. The log above may say "
            f"why its kernel did not start, or that the audit cannot be written."
        )
    backend = found[0].name.removesuffix(f"-{name}{SUFFIX}")
    if load_backend(backend).capabilities.egress_way(under) is not EgressWay.GATEWAY:
        raise SandboxError(
            f"Nothing was learned: the backend {backend!r} enforces egress rules itself, and tells "
            f"nobody what passes. Learn with a kernel of the backend local; the policy fits both."
        )
    return found[0]


def _complete(path: Path) -> Path:
    """The audit, once no more events come."""
    begin = changed = time.monotonic()
    size = path.stat().st_size
    while time.monotonic() - changed < _QUIET and time.monotonic() - begin < _MOST_WAIT:
        time.sleep(_QUIET / 10)
        if path.stat().st_size != size:
            size, changed = path.stat().st_size, time.monotonic()
    return path


def _lines(
    arguments: argparse.Namespace, learned: Learned, failed: Sequence[FailedCell]
) -> list[str]:
    """A policy file. Whatever is not ours is in comments, escaped, and one line each."""
    lines = [f"# What {_plain(arguments.notebook.name)} reached (default: {arguments.default})."]
    lines += [f"# Incomplete: cell {one.number} failed: {_plain(one.error)}" for one in failed]
    for rule in learned.policy.rules:
        lines += _rule_lines(rule)
    if not learned.policy.rules:
        lines.append("# Nothing: it needs no egress.")
    if learned.private:
        lines.append("# Reached in a private network, which takes a rule for its address:")
        lines += [f"#   {what} (through {word})" for what, word in learned.private.items()]
    if learned.denied:
        lines.append("# Refused:")
        lines += [f"#   {what} ({_plain(why)})" for what, why in learned.denied.items()]
    return lines


def _rule_lines(rule: EgressRule) -> list[str]:
    if rule.is_partial:
        return [json.dumps(rule.to_json())]
    host = f"[{rule.host}]" if ":" in rule.host else rule.host
    return [f"{host}:{port}" for port in rule.ports] or [host]


def _plain(text: str) -> str:
    return printable(" ".join(text.split()))[:300]
