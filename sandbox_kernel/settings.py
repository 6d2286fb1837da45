"""How a setting is declared, and how its value is read.

``spec.py`` declares each setting once, as a dataclass field made by ``setting``. Everything else
follows from that field: keyword arguments, keys in kernelspecs, traits of the provisioner, options
and help of the command, ``SANDBOX_KERNEL_*`` variables, what a backend's Capabilities may name, and
the table in docs/settings.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, NamedTuple

from sandbox_kernel.errors import SpecError

ENV_PREFIX = "SANDBOX_KERNEL_"
ITSELF = "itself"


class ValueKind(NamedTuple):
    """What values a setting takes."""

    read: Callable[[Any], Any]
    """Turns a JSON value or a string into the field's type. Its ValueError continues a sentence
    that begins with the setting's name: ``takes a number, not 'x'``."""
    metavar: str = ""
    several: bool = False
    """The option may be repeated."""
    from_shell: Callable[[Any], Any] = lambda value: value
    """Completes what the user typed, such as a relative path."""


@dataclass(frozen=True)
class Setting:
    """One setting, as ``spec.py`` declares it."""

    name: str
    default: Any
    help: str
    kind: ValueKind
    capability: str
    """Which of the backend's Capabilities it needs; without that the backend refuses it."""
    only_for: str
    """``provisioner`` or ``launcher`` if the other way to start a kernel does not know it."""

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def read(self, value: Any) -> Any:
        """The value in the field's type; None and "" give the default. SpecError names it."""
        try:
            found = None if value is None else self.kind.read(value)
        except SpecError:
            raise
        except ValueError as error:
            raise SpecError(f"{self.name} {error}.") from None
        if found is None:
            return self.default() if callable(self.default) else self.default
        return found


def setting(
    default: Any, about: str, kind: ValueKind, *, needs: str = "", only_for: str = ""
) -> Any:
    """A dataclass field that declares a setting. A callable default makes the value. ``needs``
    names a capability: ITSELF is the one with the setting's own name."""
    rest = {"help": about, "kind": kind, "capability": needs, "only_for": only_for}
    if callable(default):
        return field(default_factory=default, metadata=rest)
    return field(default=default, metadata=rest)


def settings_of(cls: type) -> Mapping[str, Setting]:
    """The settings that a dataclass declares, by name."""
    return {declared.name: _setting(declared) for declared in fields(cls) if declared.metadata}


def _setting(declared: Field[Any]) -> Setting:
    factory, about = declared.default_factory, dict(declared.metadata)
    if about["capability"] == ITSELF:
        about["capability"] = declared.name
    return Setting(declared.name, declared.default if factory is MISSING else factory, **about)


def read_fields(instance: Any) -> None:
    """Bring all settings of a new frozen dataclass to their types. SpecError."""
    for one in settings_of(type(instance)).values():
        object.__setattr__(instance, one.name, one.read(getattr(instance, one.name)))


def changed_fields(instance: Any) -> dict[str, Any]:
    """The settings that are not at their default, as plain JSON types."""
    values = {one.name: getattr(instance, one.name) for one in settings_of(type(instance)).values()}
    defaults = {one.name: one.read(None) for one in settings_of(type(instance)).values()}
    return {name: _plain(value) for name, value in values.items() if value != defaults[name]}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def values_from_environment(
    settings: Mapping[str, Setting], environ: Mapping[str, str]
) -> dict[str, Any]:
    """The settings that ``SANDBOX_KERNEL_*`` variables give. Empty variables count as unset."""
    found = {}
    for one in settings.values():
        if environ.get(one.variable):
            try:
                found[one.name] = one.read(environ[one.variable])
            except SpecError as error:
                raise SpecError(f"${one.variable}: {error}") from None
    return found


# --- kinds


def _wrong(takes: str, value: Any) -> ValueError:
    return ValueError(f"{takes}, not {value!r}")


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        raise _wrong("takes a string", value)
    return value or None


TEXT = ValueKind(_text, "TEXT")


def number(
    kind: type[int] | type[float], metavar: str, *, least: float | None = None, why: str = ""
) -> ValueKind:
    """A number of at least ``least``, or above 0 if that is None."""

    def read(value: Any) -> float:
        try:
            if isinstance(value, bool):
                raise TypeError
            found = kind(value)
            if isinstance(value, float) and found != value:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            takes = "takes a whole number" if kind is int else "takes a number"
            raise _wrong(takes, value) from None
        if least is None and not 0 < found < 1e15:
            raise _wrong("must be more than 0", found)
        if least is not None and not least <= found < 1e15:
            raise _wrong(f"must be at least {least}{why}", found)
        return found

    return ValueKind(read, metavar)


def choice(*words: str) -> ValueKind:
    def read(value: Any) -> str:
        if value not in words:
            raise _wrong(f"is {' or '.join(map(repr, words))}", value)
        return str(value)

    return ValueKind(read, "|".join(words))


def _boolean(value: Any) -> bool:
    word = str(value).lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise _wrong("is true or false", value)
    return word in ("1", "true", "yes", "on")


BOOLEAN = ValueKind(_boolean)


def _words(value: Any) -> tuple[str, ...]:
    items = [v for v in re.split(r"[,\s]+", value) if v] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(v, str) for v in items):
        raise _wrong("takes a list of strings", value)
    return tuple(items)


WORDS = ValueKind(_words, "NAME", several=True)


def _path(value: Any) -> str | None:
    given = _text(value)
    if given is not None and not os.path.isabs(given):
        raise _wrong("takes an absolute path", given)
    return given


def _paths(value: Any) -> tuple[str, ...]:
    given = _words(value)
    for path in given:
        if not os.path.isabs(path):
            raise _wrong("takes absolute paths", path)
    return given


def _full_path(typed: str) -> str:
    return os.path.abspath(os.path.expanduser(typed))


PROGRAM = ValueKind(
    _path, "PATH", from_shell=lambda typed: _full_path(shutil.which(typed) or typed)
)
FOLDER = ValueKind(_path, "FOLDER", from_shell=_full_path)
PATHS = ValueKind(_paths, "PATH", several=True, from_shell=lambda typed: [*map(_full_path, typed)])


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"is not valid JSON: {value!r}") from None


def _object(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in value if isinstance(value, (list, tuple)) else [value]:
        read = _json(item) if isinstance(item, str) else item
        if not isinstance(read, Mapping) or not all(isinstance(key, str) for key in read):
            raise _wrong("takes an object with names", item)
        found.update(read)
    return found


def _pairs(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        value = _json(value) if value.lstrip().startswith("{") else value.split(",")
    if isinstance(value, (list, tuple)):
        pairs = [str(item).partition("=") for item in value]
        if not all(separator for _, separator, _ in pairs):
            raise _wrong("takes NAME=VALUE entries", value)
        value = {name: item for name, _, item in pairs}
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in value.items()
    ):
        raise _wrong("takes names and string values", value)
    return dict(value)


OBJECT = ValueKind(_object, "JSON", several=True)
PAIRS = ValueKind(_pairs, "NAME=VALUE", several=True)
