"""Reads an MCP server's policy: a TOML or JSON file, then options, then what backends say to it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sandbox_kernel.agents.mcp.policy import Door, Limits, Policy
from sandbox_kernel.errors import SpecError
from sandbox_kernel.jupyter.configuration import read_configuration
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.settings import PATHS, Setting, settings_of
from sandbox_kernel.spec import SETTINGS
from sandbox_kernel.suggestions import check_keys

LEASE = 600.0
"""Seconds that sandboxes outlive their server, unless the policy says otherwise."""
_TABLES = ("sandbox", "backend", "http")
NOT_SHARED = ("backend", "name", "pool_size")
"""Settings that cannot be those of several sandboxes, or that mean nothing here."""
_PLACEHOLDER = "mcp-0"


def read_policy(
    file: str | None,
    limits: Mapping[str, Any],
    sandbox: Mapping[str, Any],
    door: Mapping[str, Any],
) -> Policy:
    """The policy of a file, if there is one, and of options, which win. SpecError names what is
    wrong; a request that a backend cannot enforce is SpecRefused."""
    found = _read_file(Path(file)) if file else {}
    where = file or "the command line"
    check_keys(found, [*settings_of(Limits), *_TABLES], where)
    tables = {name: _table(found.pop(name, {}), f"{where}: {name}") for name in _TABLES}
    all_limits = _read(Limits, {**_in_home(found, Limits), **limits}, where)
    all_door = _read(Door, {**_in_home(tables["http"], Door), **door}, f"{where}: http")
    if not all_limits.backends:
        raise SpecError(f"{where}: backends names none. Leave it out for the local jail.")
    check_keys(tables["backend"], all_limits.backends, f"{where}: backend")
    settings = {}
    for backend in all_limits.backends:
        own = _table(tables["backend"].get(backend, {}), f"{where}: backend.{backend}")
        settings[backend] = _checked(backend, {**tables["sandbox"], **own, **sandbox}, where)
    return Policy(all_limits, settings, all_door)


def settle_environment() -> None:
    """The policy has been read: from now on, no variable of this process says more about sandboxes
    than it does."""
    for one in SETTINGS.values():
        os.environ.pop(one.variable, None)


def _read(cls: Any, values: Mapping[str, Any], where: str) -> Any:
    check_keys(values, settings_of(cls), where)
    try:
        return cls(**values)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _checked(backend: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a backend's sandboxes, after the backend has agreed to enforce them. The
    environment gives those that the operator has left open, and changes no other."""
    check_keys(given, [name for name in SETTINGS if name not in NOT_SHARED], where)
    client = load_backend(backend)
    decided = {SETTINGS[name].variable for name in given}
    configuration = read_configuration(
        {"lease_seconds": LEASE, **given, "backend": backend},
        default_name=_PLACEHOLDER,
        environ={name: value for name, value in os.environ.items() if name not in decided},
        not_for="launcher",
        where=where,
    )
    client.check(configuration.spec)
    client.capabilities.check_kernel(configuration, client.backend)
    settings = configuration.to_dict()
    for name in ("backend", "name"):
        settings.pop(name, None)
    return settings


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"The policy {path} cannot be read: {error}.") from None
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise SpecError(f"The policy {path} is not valid {kind}: {error}.") from None
    return dict(_table(found, str(path)))


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} takes a table of settings, not {value!r}.")
    return value


def _in_home(values: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """``~`` of paths in a file is this user's home; other relative paths are refused later."""
    known: Mapping[str, Setting] = settings_of(cls)
    paths = {name for name, one in known.items() if one.kind.metavar == PATHS.metavar}
    return {name: _expanded(value) if name in paths else value for name, value in values.items()}


def _expanded(value: object) -> object:
    if isinstance(value, str):
        return os.path.expanduser(value)
    if isinstance(value, Iterable):
        return [_expanded(one) for one in value]
    return value
