"""``sandbox-kernel audit``."""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timedelta, timezone

from sandbox_kernel.cli.formatting import note
from sandbox_kernel.cli.options import Commands, add_command
from sandbox_kernel.errors import SpecError
from sandbox_kernel.untrusted_text import printable

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add(commands: Commands) -> None:
    parser = add_command(commands, "audit", audit)
    parser.add_argument("name", nargs="?", metavar="NAME", help="of a sandbox; it may be gone")
    parser.add_flag("--denied", help="only what was refused")
    parser.add_argument(
        "--since", metavar="WHEN", help="10m, 2h, 1d, or a time such as 2026-01-31T12:00"
    )
    parser.add_flag("--json", help="one JSON object a line")


def audit(arguments: argparse.Namespace) -> int:
    """Show which connections sandboxes made or tried to make, oldest first.

    Exit code 1 if there is no audit of that sandbox.

    examples:
      sandbox-kernel audit --denied --since 1h
      sandbox-kernel audit sandbox-1a2b3c4d --json
    """
    from sandbox_kernel.gateway.audit import read
    from sandbox_kernel.paths import data_dir

    folder, since = data_dir() / "audit", _since(arguments.since)
    paths = [
        path
        for path in (sorted(folder.glob("*.jsonl")) if folder.is_dir() else ())
        if arguments.name is None or path.stem.partition("-")[2] == arguments.name
    ]
    if arguments.name is not None and not paths:
        note(f"There is no audit of a sandbox {arguments.name!r}.")
        return 1
    events = [event for path in paths for event in read(path, since=since, denied=arguments.denied)]
    for event in sorted(events, key=lambda event: str(event.get("time", ""))):
        print(json.dumps(event) if arguments.json else _line(event))
    return 0


def _line(event: dict[str, object]) -> str:
    where = f"{event.get('host') or '?'}:{event.get('port') or '*'}"
    request = " ".join(str(event[key]) for key in ("method", "path") if event.get(key))
    moved = f"{event.get('sent', 0)} B out, {event.get('received', 0)} B in"
    parts = [event.get("time"), event.get("sandbox"), event.get("action"), where, request]
    text = "  ".join(str(part) for part in parts if part)
    allowed = event.get("action") == "allow"
    return printable(f"{text}  {moved if allowed else event.get('reason', '')}")


def _since(text: str | None) -> datetime | None:
    if text is None:
        return None
    if text[:-1].isdecimal() and text[-1] in _UNITS:
        return datetime.now(timezone.utc) - timedelta(seconds=int(text[:-1]) * _UNITS[text[-1]])
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise SpecError(
            f"--since takes 10m, 2h, 1d, or a time such as 2026-01-31T12:00, not {text!r}."
        ) from None
