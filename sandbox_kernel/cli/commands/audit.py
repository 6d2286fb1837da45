"""``sandbox-kernel audit``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from sandbox_kernel.audit import Event
from sandbox_kernel.audit.event_log import SUFFIX
from sandbox_kernel.audit.reading import Follower, audits, is_denied, merged, read
from sandbox_kernel.audit.trail import FOLDER
from sandbox_kernel.cli import foreground
from sandbox_kernel.cli.formatting import note, shown_path
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.errors import SandboxNotFound, SpecError
from sandbox_kernel.paths import data_dir
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.suggestions import closest

INTERVAL = 0.5
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_KIND, _WIDEST = 16, 30
_MOST_SHOWN = 300
_COMMON = ("time", "kind", "sandbox", "by", "cell", "notebook")


def add(commands: Commands) -> None:
    parser = add_command(commands, "audit", audit)
    about = "name of a sandbox, its beginning, or a notebook's path; it may be gone"
    parser.add_argument("name", nargs="?", metavar="SANDBOX", help=about)
    parser.add_flag("--denied", help="only what was refused")
    parser.add_argument(
        "--since", metavar="WHEN", help="10m, 2h, 1d, or a time such as 2026-01-31T12:00"
    )
    parser.add_flag("-f", "--follow", help="go on with new events until Ctrl-C")
    parser.add_flag("--json", help="one JSON object a line")


def audit(arguments: argparse.Namespace) -> int:
    """Show what happened to sandboxes, and by whom, oldest first.

    Without a name: all of them, merged by time. Exit code 1 if there is no audit of that sandbox.

    examples:
      sandbox-kernel audit --denied --since 1h
      sandbox-kernel audit sandbox-1a2b3c4d --json
      sandbox-kernel audit --follow work/demo.ipynb
    """
    folder, since = data_dir() / FOLDER, _since(arguments.since)
    try:
        paths = _meant(arguments.name, audits(folder))
    except SandboxNotFound as error:
        note(str(error))
        return 1
    # Before the events are read: what comes in between is not missed.
    wanted = (lambda path: True) if arguments.name is None else paths.__contains__
    follower = Follower(folder, wanted) if arguments.follow else None
    width = min(_WIDEST, max((len(_name(path)) for path in paths), default=0))
    for event in merged(paths, since=since, denied=arguments.denied):
        _print(event, width, arguments)
    if follower is not None:
        foreground.run(_follow(follower, width, arguments))
    return 0


async def _follow(follower: Follower, width: int, arguments: argparse.Namespace) -> None:
    while True:
        for event in await asyncio.to_thread(follower.new):
            if not arguments.denied or is_denied(event):
                _print(event, width, arguments)
        await asyncio.sleep(INTERVAL)


def _print(event: Event, width: int, arguments: argparse.Namespace) -> None:
    print(
        json.dumps(event) if arguments.json else shown_event(event, width), flush=arguments.follow
    )


# --- which


def _name(path: Path) -> str:
    return path.name.removesuffix(SUFFIX).partition("-")[2]


def _meant(text: str | None, paths: list[Path]) -> list[Path]:
    """The audits of the sandbox, or of those of a notebook. SandboxNotFound, SpecError."""
    if text is None:
        return paths
    if text.endswith(NOTEBOOK):
        notebook = os.path.abspath(os.path.expanduser(text))
        found = [path for path in paths if any(e.get("notebook") == notebook for e in read(path))]
        if not found:
            raise SandboxNotFound(f"There is no audit of a sandbox for the notebook {notebook}.")
        return found
    names = {_name(path) for path in paths}
    meant = {text} & names or {name for name in names if name.startswith(text)}
    if len(meant) > 1:
        raise SpecError(f"{text!r} may mean {', '.join(sorted(meant))}. Give more of the name.")
    if not meant:
        close = closest(text, sorted(names))
        hint = f" Did you mean {close!r}?" if close else ""
        raise SandboxNotFound(f"There is no audit of a sandbox {text!r}.{hint}")
    return [path for path in paths if _name(path) in meant]


def _since(text: str | None) -> datetime | None:
    if text is None:
        return None
    if text[:-1].isdecimal() and text[-1] in _UNITS:
        try:
            ago = timedelta(seconds=int(text[:-1]) * _UNITS[text[-1]])
            return datetime.now(timezone.utc) - ago
        except (OverflowError, ValueError):  # thousands of digits are a ValueError
            return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise SpecError(
            f"--since takes 10m, 2h, 1d, or a time such as 2026-01-31T12:00, not {text!r}."
        ) from None


# --- how


def shown_event(event: Event, width: int) -> str:
    """One event for people. Nothing in it is trusted."""
    kind = str(event.get("kind", "?"))
    about = _egress(event) if kind == "egress" else _facts(event)
    parts = [
        _local(event.get("time")),
        str(event.get("sandbox") or "-")[:_WIDEST].ljust(width),
        (str(event.get("action", "?")) if kind == "egress" else kind)[:_KIND].ljust(_KIND),
        *(about, _cell(event), _by(event)),
    ]
    return shown_path("  ".join(part for part in parts if part).rstrip())


def _local(time: object) -> str:
    try:
        return datetime.fromisoformat(str(time)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return "?".ljust(19)


def _egress(event: Event) -> str:
    where = f"{event.get('host') or '?'}:{event.get('port') or '*'}"
    request = " ".join(str(event[key]) for key in ("method", "path") if event.get(key))
    moved = f"{event.get('sent', 0)} B out, {event.get('received', 0)} B in"
    said = moved if event.get("action") == "allow" else str(event.get("reason", ""))
    return "  ".join(part[:_MOST_SHOWN] for part in (where, request, said) if part)


def _facts(event: Event) -> str:
    shown = {key: value for key, value in event.items() if key not in _COMMON and value}
    return " ".join(f"{key}={_value(value)}" for key, value in shown.items())[:_MOST_SHOWN]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value if value and " " not in value else repr(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    return json.dumps(value)


def _cell(event: Event) -> str:
    cell, notebook = event.get("cell"), event.get("notebook")
    name = os.path.basename(str(notebook))[:60] if notebook else ""
    if isinstance(cell, Mapping):
        number = f"[{cell.get('execution_count', '?')}]"
        return f"{name}{number} (says the guest)"
    return name


def _by(event: Event) -> str:
    by = event.get("by")
    if not isinstance(by, Mapping):
        return ""
    return f"by {by.get('user')} ({by.get('program')}, pid {by.get('pid')})"[:_MOST_SHOWN]
