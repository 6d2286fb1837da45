"""``@conda``: the channels that this machine's conda is set up for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway.presets import Source, is_web
from sandbox_kernel.host_programs import find_program, run_program

_TIMEOUT = 60.0
_KEYS = ("channels", "default_channels", "channel_alias", "custom_channels", "custom_multichannels")
_KEY = re.compile(r"([A-Za-z_]+)\s*:")
_URL = re.compile(r"https?://[^\s\"'#,\]]+")


def read() -> Source:
    """The hosts of conda's channels. SpecError if conda is neither configured nor installed."""
    source = Source()
    conda = find_program("conda")
    urls = _ask(conda) if conda else [url for file in _files() for url in _configured_in(file)]
    for url in filter(is_web, dict.fromkeys(urls)):
        source.add(url)
    if not source.targets:
        raise SpecError(
            "egress: @conda cannot be used: conda is not installed, and no channel with a URL is "
            "in .condarc."
        )
    return source


def _files() -> list[Path]:
    named = os.environ.get("CONDARC")
    home = Path.home()
    return [*([Path(named)] if named else []), home / ".condarc", home / ".conda" / "condarc"]


def _configured_in(file: Path) -> Iterator[str]:
    """The URLs below the keys for channels. (A reader of YAML would be a dependency.)"""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    key = ""
    for line in text.splitlines():
        if found := _KEY.match(line):
            key = found[1]
        if key in _KEYS and not line.lstrip().startswith("#"):
            yield from _URL.findall(line)


def _ask(conda: str) -> list[str]:
    try:
        ran = run_program([conda, "config", "--show", *_KEYS, "--json"], _TIMEOUT, cwd="/")
        ran.check_returncode()
        return list(_urls_in(json.loads(ran.stdout)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SpecError(f"egress: @conda cannot be used: no answer of conda ({error}).") from None


def _urls_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _urls_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _urls_in(inner)
