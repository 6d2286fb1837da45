"""Which files are not saved: defaults, and the workspace's ``.sandboxignore``.

The file has gitignore's syntax. The host compiles it with pathspec to regular expressions, and only
the sandbox applies them, so a hostile pattern harms nobody else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pathspec import GitIgnoreSpec

from sandbox_kernel.errors import WorkspaceError

DEFAULTS = (
    "__pycache__/",
    ".ipynb_checkpoints/",
    ".cache/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".venv/",
    "node_modules/",
    ".Trash-*/",
    "lost+found/",
    ".nfs*",
)
MOST_LINES = 4096
Rule = tuple[str, bool]
"""A regular expression for a path (a folder's ends with a slash), and whether it is ignored."""


@functools.lru_cache(16)
def rules(text: bytes = b"") -> tuple[Rule, ...]:
    """Rules for the defaults and an ignore file. The last matching rule decides."""
    lines = text.decode(errors="surrogateescape").splitlines()  # as names are
    if len(lines) > MOST_LINES:
        raise WorkspaceError(f".sandboxignore has more than {MOST_LINES} lines. Shorten it.")
    return _compiled([*DEFAULTS, *lines])


def only(globs: Sequence[str]) -> tuple[Rule, ...]:
    """Rules that select the matching files only, without the defaults."""
    wanted = tuple((pattern, not ignored) for pattern, ignored in _compiled(globs))
    return ((r"^(?:.+/)?[^/]+$", True), *wanted, *_compiled(DEFAULTS))


def _compiled(lines: Sequence[str]) -> tuple[Rule, ...]:
    try:
        patterns = GitIgnoreSpec.from_lines(lines).patterns
    except ValueError as error:
        raise WorkspaceError(f"Invalid ignore pattern: {error}") from error
    return tuple(
        (pattern.regex.pattern, bool(pattern.include))
        for pattern in patterns
        if pattern.include is not None and pattern.regex is not None
    )
