"""Parameters of a notebook, by papermill's conventions: how they are given, and the cell that sets
them.

For ``sandbox-kernel run`` and its API. Python is translated here; for other languages papermill's
own translators are used, if it is installed.
"""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SpecError

PARAMETERS, INJECTED = "parameters", "injected-parameters"
"""Tags: of the cell with the defaults, and of the one that is added below it."""
_WORDS = {"True": True, "False": False, "None": None}
_INSTALL = "pip install 'sandbox-kernel[pipelines]'"
_DEEPEST = 100


def read_parameters(
    *,
    files: Sequence[str] = (),
    yaml: Sequence[str] = (),
    pairs: Iterable[tuple[str, str]] = (),
    raw: Iterable[tuple[str, str]] = (),
) -> dict[str, Any]:
    """All parameters, of the weakest source first: files, YAML, ``-p`` (whose values are numbers,
    True, False and None where they look like it), and ``-r``, which are text. SpecError."""
    found: dict[str, Any] = {}
    for name in files:
        found |= _read(_text_of(name), f"the parameters file {name!r}")
    for text in yaml:
        found |= _read(text, "-y")
    found |= {name: typed(value) for name, value in pairs}
    found |= dict(raw)
    return found


def typed(text: str) -> Any:
    """The value of ``-p NAME VALUE``, as papermill reads it."""
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parameters_cell(parameters: Mapping[str, Any], language: str, kernel: str) -> str:
    """The source of the cell that sets them. SpecError if that cannot be said in the language."""
    if language.lower() in ("python", "python3", "ipython"):
        return python_cell(parameters)
    try:
        from papermill.exceptions import PapermillException
        from papermill.translators import translate_parameters
    except ImportError:
        raise SpecError(
            f"Parameters were not set: the notebook's language is {language!r}, and without "
            f"papermill only those of Python notebooks can be written. Install it "
            f"(pip install papermill), or leave the parameters out."
        ) from None
    try:
        return str(translate_parameters(kernel, language, dict(parameters), "Parameters"))
    except (PapermillException, NotImplementedError) as error:
        raise SpecError(
            f"Parameters were not set: papermill cannot write them in {language!r} ({error})."
        ) from None


def python_cell(parameters: Mapping[str, Any]) -> str:
    """The same, in Python. Nothing in a value is ever code."""
    lines = ["# Parameters"]
    for name, value in parameters.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise SpecError(f"{name!r} cannot be a parameter: it is no name of a Python variable.")
        try:
            lines.append(f"{name} = {_python(value)}")
        except ValueError as error:
            raise SpecError(f"The parameter {name!r} cannot be set: {error}.") from None
    return "\n".join(lines) + "\n"


def _python(value: Any, depth: int = 0) -> str:
    if depth > _DEEPEST:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if isinstance(value, Mapping):
        pairs = (f"{_python(k, depth + 1)}: {_python(v, depth + 1)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(_python(one, depth + 1) for one in value)}]"
    return repr(str(value))  # a date in YAML, for example


def inject(
    content: dict[str, Any], parameters: Mapping[str, Any], source: str, cell_id: str
) -> None:
    """Put the cell into a notebook: in place of an earlier one, else below the cell with the tag
    ``parameters``, else at the top. As papermill does, the values are in the metadata, too."""
    cell: dict[str, Any] = {
        "cell_type": "code",
        "execution_count": None,
        "id": cell_id,
        "metadata": {"tags": [INJECTED]},
        "outputs": [],
        "source": source,
    }
    cells: list[dict[str, Any]] = content["cells"]
    earlier, defaults = (_first(cells, tag) for tag in (INJECTED, PARAMETERS))
    if earlier is not None:
        cells[earlier] = cell
    else:
        cells.insert(0 if defaults is None else defaults + 1, cell)
    metadata = content["metadata"]
    before = metadata.get("papermill")
    plain = json.loads(json.dumps(dict(parameters), default=str))
    metadata["papermill"] = {**(before if isinstance(before, dict) else {}), "parameters": plain}


def tags_of(cell: Mapping[str, Any]) -> list[str]:
    """The tags of a cell; whatever else stands there is none."""
    tags = cell["metadata"].get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def has_defaults(content: Mapping[str, Any]) -> bool:
    """Whether the notebook says where its parameters are."""
    return any(_first(content["cells"], tag) is not None for tag in (INJECTED, PARAMETERS))


def _first(cells: Sequence[Mapping[str, Any]], tag: str) -> int | None:
    return next((i for i, cell in enumerate(cells) if tag in tags_of(cell)), None)


def _text_of(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError(f"The parameters file {name!r} cannot be read: {error}") from None


def _read(text: str, where: str) -> dict[str, Any]:
    """JSON needs nothing; everything else is YAML."""
    try:
        found = json.loads(text)
    except ValueError:
        found = _yaml(where)(text)
    if found is None:
        return {}  # an empty file
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise SpecError(f"{where} has to be names with values, such as 'alpha: 0.5'.")
    return found


def _yaml(where: str) -> Callable[[str], Any]:
    try:
        import yaml
    except ImportError:
        raise SpecError(
            f"{where} is no JSON, and to read YAML takes PyYAML: {_INSTALL}. Or write it as JSON."
        ) from None

    def load(text: str) -> Any:
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise SpecError(f"{where} is neither JSON nor YAML: {error}") from None

    return load
