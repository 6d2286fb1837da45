"""The hint for a misspelled name: "Did you mean ...?"."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from sandbox_kernel.errors import SpecError


def closest(word: object, known: Iterable[str]) -> str | None:
    """The known name that is most like the word; None if none is close."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1)), None)


def did_you_mean(word: object, known: Collection[str]) -> str:
    """A sentence that proposes the closest name, or lists all if none is close."""
    close = closest(word, known)
    return f"Did you mean {close!r}?" if close else f"Known: {', '.join(known) or 'none'}."


def check_keys(keys: Iterable[object], known: Collection[str], where: str) -> None:
    """SpecError for a key that is not known. ``where`` begins the sentence."""
    for key in keys:
        if key not in known:
            raise SpecError(f"{where} has an unknown key {key!r}. {did_you_mean(key, known)}")
