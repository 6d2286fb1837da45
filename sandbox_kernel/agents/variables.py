"""The variables of a Python kernel, without running any code of their classes.

``Notebook.variables`` sends an execute_request made of ``request()``, and gives the content of the
reply to ``variables_of``. Nothing remains in the kernel: no name, no line of history.
"""

from __future__ import annotations

import ast
import base64
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.agents.terminal_text import ends_of, plain
from sandbox_kernel.errors import KernelError, Unsupported
from sandbox_kernel.guest import list_variables

_KEY = "variables"
_LONGEST_ANSWER = 2**21
_LONGEST_WORD = 400
_MOST_DIMENSIONS = 64
_BASE64 = re.compile(r"'([A-Za-z0-9+/]*={0,2})'")
_SOURCE = ast.unparse(ast.parse(inspect.getsource(list_variables)))
# The user may have given any name another meaning: all is reached from the interpreter itself.
_EXPRESSION = (
    "(lambda builtins, shell: (lambda scope: (builtins.exec({source!r}, scope), "
    "scope['answer'](shell.user_ns, shell.user_ns_hidden))[1])"
    "({{'__builtins__': builtins, '__name__': 'sandbox_kernel_variables'}}))"
    "(__import__('builtins'), __import__('IPython').get_ipython())"
)


@dataclass(frozen=True)
class Variable:
    """One variable of the user."""

    name: str
    type: str
    """Of another module than the notebook's own with the module's name."""
    shape: tuple[int, ...] | None = None
    """Lengths of an array or a table in each direction, or the length of a string or collection."""
    size: int | None = None
    """Bytes, without those of the items that a collection refers to."""
    text: str = ""
    """A short description: a value, or its beginning; columns of a table; a function's head."""


def request() -> dict[str, Any]:
    """Content of an execute_request that lists the variables."""
    return {
        "code": "",
        "silent": True,
        "store_history": False,
        "allow_stdin": False,
        "stop_on_error": False,
        "user_expressions": {_KEY: _EXPRESSION.format(source=_SOURCE)},
    }


def check_language(language: str, kernel: str) -> None:
    """Unsupported if the kernel's language has no list of variables here."""
    if language.lower() != "python":
        raise Unsupported(
            f"The variables of kernel {kernel!r} cannot be listed: its language is "
            f"{plain(ends_of(language, 100)) or 'not known'}, and only Python's are known. "
            f"Run code that prints them."
        )


def variables_of(reply: Mapping[str, Any], kernel: str) -> tuple[list[Variable], int]:
    """The variables that an execute_reply's content tells, by name, and how many more there are.
    KernelError if it does not."""
    expressions = reply.get("user_expressions")
    told = expressions.get(_KEY) if isinstance(expressions, Mapping) else None
    data = told.get("data") if isinstance(told, Mapping) else None
    text = data.get("text/plain") if isinstance(data, Mapping) else None
    if not isinstance(text, str):
        reason = [told.get("ename"), told.get("evalue")] if isinstance(told, Mapping) else []
        why = ": ".join(plain(ends_of(word, 300)) for word in reason if isinstance(word, str))
        raise KernelError(
            f"The kernel {kernel!r} did not list its variables ({why or 'no answer'})."
        )
    found = _BASE64.fullmatch(text) if len(text) <= _LONGEST_ANSWER else None
    try:
        answer = json.loads(base64.b64decode(found.group(1))) if found else None
    except (ValueError, RecursionError):
        answer = None
    listed = answer.get("variables") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(listed, list):
        raise KernelError(f"The kernel {kernel!r} sent a list of variables that cannot be read.")
    made = [_variable(each) for each in listed[: list_variables.MOST]]
    more = answer.get("more")
    known = [variable for variable in made if variable is not None]
    return sorted(known, key=lambda variable: variable.name), _count(more) or 0


def _variable(facts: object) -> Variable | None:
    """A variable, or None if what was told is none."""
    if not isinstance(facts, dict) or not _word(facts.get("name")):
        return None
    shape = facts.get("shape")
    known = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    lengths = [_count(length) for length in shape] if known and isinstance(shape, list) else [None]
    return Variable(
        name=_word(facts.get("name")),
        type=_word(facts.get("type")),
        shape=None if None in lengths else tuple(each for each in lengths if each is not None),
        size=_count(facts.get("size")),
        text=_word(facts.get("text")),
    )


def _word(value: object) -> str:
    return plain(value[:_LONGEST_WORD]) if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    """A number that can be a size."""
    return value if type(value) is int and 0 <= value < 2**63 else None
