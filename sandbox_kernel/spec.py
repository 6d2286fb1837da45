"""SandboxSpec: what the user asks a sandbox to be.

The same keys are used everywhere: as keyword arguments in Python, in a kernelspec's
``metadata.kernel_provisioner.config``, in traitlets configuration, as ``SANDBOX_KERNEL_<KEY>`` in
the environment and as ``--key`` on the command line. Reading a spec never guesses: an unknown key
or a value of the wrong kind is a SpecError that names it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets as _secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecError

ENV_PREFIX = "SANDBOX_KERNEL_"
LEAST_MEMORY_MIB = 128
"""With less, a kernel, the agent and its spare interpreter do not fit."""
MAX_ENV = 128 * 1024
"""Bytes of all environment variables of a spec together; Linux gives a process little more."""
NOTEBOOK = ".ipynb"
"""How the path of a notebook ends. Where a workspace's name may stand, so may such a path."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# What each field is for; the command line and the docs print these.
FIELD_HELP: dict[str, str] = {
    "name": "name of the sandbox (default: a random one)",
    "image": "image, template or snapshot that the sandbox is made from",
    "memory_mib": "memory for the whole sandbox, in MiB",
    "cpus": "CPUs for the whole sandbox; fractions are allowed",
    "processes": "most processes and threads at once",
    "open_files": "most open files of one process",
    "disk_mib": "most that the workspace and home folders may hold, in MiB",
    "workspace": "name of a persistent workspace, mounted at /workspace",
    "env": "environment variables for everything that runs in the sandbox, NAME=VALUE",
    "readable": "host paths that the sandbox may read, at the same path",
    "python": "host interpreter whose environment the sandbox shows (default: this one)",
    "secrets": "names of secrets that the sandbox may use",
    "egress": "hosts that the sandbox may reach, or rules as JSON; none means no network",
    "options": "settings that only the chosen backend knows, as JSON; see its page in the docs",
    "labels": "free labels for your own book-keeping, NAME=VALUE",
    "lease_seconds": "the sandbox ends when nobody has been attached to it for so long",
    "delete_after_seconds": "a hosted sandbox that has been paused for so long is deleted",
    "start_timeout": "seconds that starting the sandbox may take",
}


@dataclass(frozen=True)
class SandboxSpec:
    """A request for a sandbox, validated when it is made.

    ``None`` means "the backend's default". A backend refuses (SpecRefused) what it cannot
    enforce; it never ignores a field.
    """

    name: str = ""
    image: str | None = None
    memory_mib: int | None = None
    cpus: float | None = None
    processes: int | None = None
    open_files: int | None = None
    disk_mib: int | None = None
    workspace: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    readable: tuple[str, ...] = ()
    python: str | None = None
    secrets: tuple[str, ...] = ()
    egress: EgressPolicy = field(default_factory=EgressPolicy)
    """Also taken: whatever ``EgressPolicy.read`` reads, such as a list of host names."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What only the backend knows. It checks them; one that has none refuses any."""
    labels: Mapping[str, str] = field(default_factory=dict)
    lease_seconds: float = 3600.0
    delete_after_seconds: float | None = None
    start_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", f"sandbox-{_secrets.token_hex(4)}")
        object.__setattr__(self, "egress", EgressPolicy.read(self.egress))
        _check(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without what is at its default; ``from_mapping`` reads it back."""
        default = SandboxSpec(name=self.name)
        plain = {k: v for k, v in asdict(self).items() if k == "name" or v != getattr(default, k)}
        if self.egress != default.egress:
            plain["egress"] = self.egress.to_json()
        else:
            plain.pop("egress", None)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str = "the spec") -> SandboxSpec:
        """Read a spec from configuration. ``where`` names the source in error messages."""
        known = {f.name for f in fields(cls)}
        kwargs: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                close = difflib.get_close_matches(str(key), sorted(known), n=1)
                hint = f" Did you mean {close[0]!r}?" if close else f" Known: {sorted(known)}."
                raise SpecError(f"{where} has an unknown key {key!r}.{hint}")
            kwargs[key] = _coerce(key, value, where)
        return cls(**kwargs)

    def override_from_env(self, environ: Mapping[str, str] | None = None) -> SandboxSpec:
        """This spec with every ``SANDBOX_KERNEL_<FIELD>`` of the environment applied."""
        environ = os.environ if environ is None else environ
        changes = {}
        for f in fields(self):
            variable = ENV_PREFIX + f.name.upper()
            if environ.get(variable):
                changes[f.name] = _coerce(f.name, environ[variable], f"${variable}")
        return replace(self, **changes) if changes else self


_NUMBERS: dict[str, type[int] | type[float]] = {
    "memory_mib": int,
    "cpus": float,
    "processes": int,
    "open_files": int,
    "disk_mib": int,
    "lease_seconds": float,
    "delete_after_seconds": float,
    "start_timeout": float,
}
_LISTS = ("readable", "secrets")
_MAPS = ("env", "labels", "options")


def _coerce(key: str, value: Any, where: str) -> Any:
    """Bring a configuration value (JSON type or string) to the field's type."""
    if value is None and key not in ("lease_seconds", "start_timeout", "name", "egress"):
        return {} if key in _MAPS else () if key in _LISTS else None
    if key == "egress":
        try:
            return EgressPolicy.read(value)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
    if key in _NUMBERS:
        kind = _NUMBERS[key]
        try:
            if isinstance(value, bool):
                raise TypeError
            number = kind(value)
            if isinstance(value, float) and number != value:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise SpecError(
                f"{where}: {key} takes {'a whole number' if kind is int else 'a number'}, "
                f"not {value!r}."
            ) from None
        return number
    if key in _LISTS:
        items = [v for v in re.split(r"[,\s]+", value) if v] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(v, str) for v in items):
            raise SpecError(f"{where}: {key} takes a list of strings, not {value!r}.")
        return tuple(items)
    if key == "options":
        return _coerce_options(value, where)
    if key in _MAPS:
        return _coerce_map(key, value, where)
    if not isinstance(value, str):
        raise SpecError(f"{where}: {key} takes a string, not {value!r}.")
    return value or None if key != "name" else value


def _coerce_options(value: Any, where: str) -> dict[str, Any]:
    """An object, as JSON types or as text; several texts (from a command line) are combined."""
    found: dict[str, Any] = {}
    for item in value if isinstance(value, (list, tuple)) else [value]:
        try:
            read = json.loads(item) if isinstance(item, str) else item
        except ValueError:
            raise SpecError(f"{where}: options is not valid JSON: {item!r}.") from None
        if not isinstance(read, Mapping) or not all(isinstance(key, str) for key in read):
            raise SpecError(f"{where}: options takes an object with names, not {item!r}.")
        found.update(read)
    return found


def _coerce_map(key: str, value: Any, where: str) -> dict[str, str]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("{") else value.split(",")
        except ValueError:
            raise SpecError(f"{where}: {key} is not valid JSON: {value!r}.") from None
    if isinstance(value, (list, tuple)):
        pairs = [str(item).partition("=") for item in value]
        if not all(sep for _, sep, _ in pairs):
            raise SpecError(f"{where}: {key} takes NAME=VALUE entries, not {value!r}.")
        value = {name: text for name, _, text in pairs}
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in value.items()
    ):
        raise SpecError(f"{where}: {key} takes names and string values, not {value!r}.")
    return dict(value)


def check_name(name: str, what: str = "A sandbox name") -> str:
    """The name itself, or SpecError. Names become file and host names, so they are strict."""
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{what} has 1 to 63 characters of a-z 0-9 . _ - and starts with a letter or digit; "
            f"{name!r} does not fit."
        )
    return name


def _check(spec: SandboxSpec) -> None:
    check_name(spec.name)
    if spec.workspace is not None:
        check_name(spec.workspace, "A workspace name")
    for key in _NUMBERS:
        value = getattr(spec, key)
        if value is not None and not 0 < value < 1e15:
            raise SpecError(f"{key} must be more than 0, not {value!r}.")
    if spec.memory_mib is not None and spec.memory_mib < LEAST_MEMORY_MIB:
        raise SpecError(
            f"memory_mib must be at least {LEAST_MEMORY_MIB} to run a kernel, not "
            f"{spec.memory_mib}."
        )
    for name, value in spec.env.items():
        if not _ENV_NAME.fullmatch(name) or "\0" in value:
            raise SpecError(f"env has an entry that is no environment variable: {name!r}.")
    if sum(len(name) + len(value) for name, value in spec.env.items()) > MAX_ENV // 2:
        raise SpecError(f"env holds more than {MAX_ENV // 2} characters; put the data in a file.")
    for path in spec.readable:
        if not os.path.isabs(path):
            raise SpecError(f"readable takes absolute paths, not {path!r}.")
    if spec.python is not None and not os.path.isabs(spec.python):
        raise SpecError(f"python takes an absolute path, not {spec.python!r}.")
