"""``@npm``: the registry that this machine's npm is set up for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway.presets import Source, is_web
from sandbox_kernel.host_programs import find_program, run_program

_TIMEOUT = 30.0
_VARIABLES = ("NPM_CONFIG_REGISTRY", "npm_config_registry")
_PUBLIC = "https://registry.npmjs.org/"
_LINE = re.compile(r"^\s*(@[^:\s]+:)?registry\s*=\s*[\"']?([^\"'\s;#]+)", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{(\w+)\}")


def read() -> Source:
    """The host of npm's registry, and those of scopes with a registry of their own. SpecError if
    npm is neither configured nor installed."""
    source = Source()
    configured = [("", os.environ[name]) for name in _VARIABLES if os.environ.get(name)][:1]
    configured += _configured_in(Path.home() / ".npmrc")
    for scope, url in configured:
        if is_web(url):
            plain = source.add(url)
            if not scope:
                source.env.setdefault("NPM_CONFIG_REGISTRY", plain)
    if "NPM_CONFIG_REGISTRY" not in source.env:
        npm = find_program("npm")
        if npm is None and not source.targets:
            raise SpecError("egress: @npm cannot be used: npm is neither installed nor configured.")
        source.add(_ask(npm) if npm else _PUBLIC)
    return source


def _configured_in(file: Path) -> list[tuple[str, str]]:
    """Scopes, or an empty text for all others, and their registries."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [
        (scope, _REFERENCE.sub(lambda name: os.environ.get(name[1], ""), url))
        for scope, url in _LINE.findall(text)
    ]


def _ask(npm: str) -> str:
    try:
        # In /: a project's own configuration is not the owner's.
        ran = run_program([npm, "config", "get", "registry"], _TIMEOUT, cwd="/")
        ran.check_returncode()
    except (OSError, subprocess.SubprocessError) as error:
        raise SpecError(f"egress: @npm cannot be used: npm does not answer ({error}).") from None
    url = ran.stdout.strip()
    if not is_web(url):
        raise SpecError("egress: @npm cannot be used: npm's registry is not reached over http.")
    return url
