"""The token that HTTP clients must send: the operator's file, or one that is made for this user."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from sandbox_kernel.atomic_write import written_aside
from sandbox_kernel.errors import SpecError
from sandbox_kernel.paths import data_dir, private_dir

LEAST = 16
_LONGEST = 1000


def read_token(file: str | None) -> str:
    """The token in a file that only this user can read; without a file, this user's own, made on
    first use. SpecError for one that others know or can guess."""
    path = Path(file) if file else _own()
    try:
        with open(path, encoding="ascii") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            token = opened.read(_LONGEST + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"The token file {path} cannot be read: {error}.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise SpecError(f"Others can read the token file {path}. Say: chmod 600 {path}")
    if not LEAST <= len(token) <= _LONGEST or not token.isprintable() or " " in token:
        raise SpecError(
            f"The token file {path} needs one line of {LEAST} to {_LONGEST} characters without "
            f"spaces. Delete it for a new one, or write one."
        )
    return token


def _own() -> Path:
    path = private_dir(data_dir() / "mcp") / "token"
    if not path.exists():
        with written_aside(path.parent, secrets.token_urlsafe(32).encode()) as made:
            try:
                os.link(made, path)  # two servers that start at once agree on one
            except FileExistsError:
                pass
    return path
