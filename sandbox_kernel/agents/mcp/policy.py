"""What the operator of an MCP server allows its models. No tool can change any of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.settings import (
    BOOLEAN,
    PATHS,
    TEXT,
    WORDS,
    ValueKind,
    choice,
    number,
    read_fields,
    setting,
)
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.suggestions import did_you_mean

NAME = "sandbox-kernel"
"""Of the server, for its clients."""
LONGEST_CALL = 50.0
"""Clients give up after 60 s."""


def _call_seconds(value: Any) -> float:
    seconds: float = number(float, "SECONDS").read(value)
    if seconds > LONGEST_CALL:
        raise ValueError(f"must be at most {LONGEST_CALL:g}, since clients give up after 60")
    return seconds


_COUNT, _SECONDS = number(int, "N"), number(float, "SECONDS")


@dataclass(frozen=True)
class Limits:
    """The settings of a server, beside those of its sandboxes."""

    backends: tuple[str, ...] = setting(
        ("local",), "backends that the model may choose from; the first is the default", WORDS
    )
    kernel: str | None = setting(
        None, "kernelspec of the kernels (default: Python)", TEXT._replace(metavar="NAME")
    )
    notebooks: tuple[str, ...] = setting(
        (), "folder in which the model may record notebooks (default: it may not)", PATHS
    )
    max_sandboxes: int = setting(4, "most sandboxes at once, of all servers of this policy", _COUNT)
    max_queue: int = setting(16, "most cells that run or wait in one sandbox", _COUNT)
    call_seconds: float = setting(
        20.0, "answer each call within this time", ValueKind(_call_seconds, "SECONDS")
    )
    cell_seconds: float = setting(3600.0, "interrupt a cell that runs longer", _SECONDS)
    idle_seconds: float = setting(
        1800.0, "end a sandbox that no call has used for this long", _SECONDS
    )
    output_chars: int = setting(20_000, "most characters of output in one answer", _COUNT)
    image_bytes: int = setting(2**20, "larger pictures become resources", _COUNT)
    file_bytes: int = setting(8 * 2**20, "largest file that is read or written", _COUNT)
    code_chars: int = setting(200_000, "longest cell", _COUNT)
    install: bool = setting(
        True, "offer the tool install; what it reaches is up to egress", BOOLEAN
    )
    on_disconnect: str = setting(
        "detach",
        "when the client leaves: detach from its sandboxes, until their lease ends, or close them",
        choice("detach", "close"),
    )

    def __post_init__(self) -> None:
        read_fields(self)


@dataclass(frozen=True)
class Door:
    """Where a server listens with ``--http``."""

    host: str = setting("127.0.0.1", "address to listen at", TEXT._replace(metavar="ADDRESS"))
    port: int = setting(8808, "port to listen at (0: one that is free)", number(int, "N", least=0))
    token_file: str | None = setting(
        None,
        "file with the token that clients must send (default: one that is made for this user)",
        PATHS._replace(
            read=lambda value: PATHS.read([value])[0],
            several=False,
            from_shell=lambda typed: PATHS.from_shell([typed])[0],
        ),
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "further value of the header Host that is accepted, as HOST or HOST:PORT", WORDS
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "value of the header Origin that is accepted (default: none)", WORDS
    )

    def __post_init__(self) -> None:
        read_fields(self)


@dataclass(frozen=True)
class Policy:
    """All of what an operator has decided: the limits, and the settings of sandboxes by backend."""

    limits: Limits = field(default_factory=Limits)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each backend, what its sandboxes are made with: keyword arguments of Notebook.open."""
    door: Door = field(default_factory=Door)

    def choose(self, backend: str | None) -> str:
        """The backend that a model has asked for; the first one if it did not say."""
        allowed = self.limits.backends
        if backend is None:
            return allowed[0]
        if backend not in allowed:
            raise SpecRefused(
                f"The backend {backend!r} is not allowed here. {did_you_mean(backend, allowed)}"
            )
        return backend

    def fingerprint(self, backend: str) -> str:
        """Tells sandboxes that were made with these settings from others."""
        made_with = [backend, self.limits.kernel, self.settings.get(backend, {})]
        text = json.dumps(made_with, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def fingerprints(self) -> dict[str, str]:
        """Backend by fingerprint."""
        return {self.fingerprint(backend): backend for backend in self.limits.backends}

    def notebook_path(self, asked: str) -> Path:
        """Where a notebook that a model has named is recorded. SpecRefused outside of the folders
        that are allowed, also through links."""
        folders = [Path(folder) for folder in self.limits.notebooks]
        if not folders:
            raise SpecRefused(
                "Notebooks cannot be recorded here: the operator has named no folder for them. "
                "Leave notebook out; the tool notebook shows the cells."
            )
        if not asked.endswith(NOTEBOOK) or "\0" in asked:
            raise SpecRefused(f"A notebook's name ends with {NOTEBOOK}; {asked!r} does not.")
        path = folders[0] / asked
        place = path.parent.resolve() / path.name
        for folder in folders:
            if place.is_relative_to(folder.resolve()) and not place.is_symlink():
                if not place.parent.is_dir():
                    raise SpecRefused(f"The folder of {asked!r} does not exist. Choose another.")
                return place
        raise SpecRefused(
            f"The notebook {asked!r} is outside of the folders where notebooks may be recorded. "
            f"Give a name such as 'analysis{NOTEBOOK}'."
        )
