"""Describes a namespace's variables, for ``agents/variables.py``. Runs in an IPython kernel, as the
text of an expression, with nothing but the builtins in scope.

No code of the variables' classes is run: only exact types that are known here are asked for their
length or value, within limits; of any other there is its type. Types are compared by identity:
``==`` and ``in`` would ask their metaclass.
"""

import base64
import json
import sys
from typing import Any, Dict, Iterable, List, Optional, Tuple

MOST = 500
_MOST_TEXT = 120
_MOST_ITEMS = 6
_MOST_DEPTH = 2
_MOST_BITS = 400
_TEXTS = (str, bytes, bytearray)
_BRACKETS = ((list, "[]"), (tuple, "()"), (set, "{}"), (frozenset, "{}"), (dict, "{}"))
_SIZED = (str, bytes, bytearray, list, tuple, set, frozenset, dict, range)
_SIMPLE = (bool, float, complex, type(None), range)
_SCALARS = ("float64", "float32", "int64", "int32", "bool_", "str_")
_OURS = frozenset(["In", "Out", "get_ipython", "exit", "quit", "open"])
_MODULE = type(sys)


def among(cls: type, kinds: "Iterable[type]") -> bool:
    return any(cls is kind for kind in kinds)


def name_of(cls: type) -> str:
    """A class's name with its module, not asking its metaclass."""
    names: Dict[str, Any] = dict(type.__dict__)
    name = names["__qualname__"].__get__(cls)
    try:
        module = names["__module__"].__get__(cls)
    except AttributeError:
        module = ""
    if type(module) is str and module not in ("builtins", "__main__", ""):
        name = module + "." + name
    return str(name)[:_MOST_TEXT]


def short(value: Any, depth: int = 0) -> str:
    """A value in few words."""
    cls = type(value)
    if among(cls, _TEXTS):
        cut = value[:_MOST_TEXT]
        return repr(cut) + ("..." if len(value) > _MOST_TEXT else "")
    if cls is int:
        bits = value.bit_length()
        return repr(value) if bits <= _MOST_BITS else "int of %d bits" % bits
    if among(cls, _SIMPLE):
        return repr(value)[:_MOST_TEXT]
    for kind, brackets in _BRACKETS:
        if cls is kind:
            return _items(value, kind, brackets, depth)
    if among(cls, (_known("numpy", name) for name in _SCALARS)):
        return short(value.item(), depth)
    if cls is type(short):
        code = value.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        return ("def %s(%s)" % (code.co_name, ", ".join(code.co_varnames[:count])))[:_MOST_TEXT]
    if isinstance(cls, type) and issubclass(cls, type):
        return ("class " + name_of(value))[:_MOST_TEXT]
    return "<" + name_of(cls) + ">"


def _items(value: Any, cls: type, brackets: str, depth: int) -> str:
    if not value:
        return cls.__name__ + "()" if among(cls, (set, frozenset)) else brackets
    if depth >= _MOST_DEPTH:
        return brackets[0] + "..." + brackets[1]
    words: List[str] = []
    try:
        for item in value.items() if cls is dict else value:
            if len(words) == _MOST_ITEMS:
                words.append("...")
                break
            pair = item if cls is dict else (item,)
            words.append(": ".join([short(each, depth + 1) for each in pair]))
    except RuntimeError:
        words.append("...")  # another thread changes it
    if cls is tuple and len(value) == 1:
        words.append("")
    return (brackets[0] + ", ".join(words).rstrip(" ") + brackets[1])[: 2 * _MOST_TEXT]


def array(value: Any) -> "Optional[Tuple[List[int], Optional[int], str]]":
    """Shape, bytes and a few words of what numpy, pandas, polars and torch make; else None."""
    cls = type(value)
    if cls is _known("numpy", "ndarray"):
        return list(value.shape), int(value.nbytes), str(value.dtype)[:_MOST_TEXT]
    if cls is _known("pandas", "DataFrame"):
        size = int(value.memory_usage(deep=False).sum())
        return list(value.shape), size, _columns(value.columns, value.dtypes)
    if cls is _known("pandas", "Series"):
        return list(value.shape), int(value.memory_usage(deep=False)), str(value.dtype)[:_MOST_TEXT]
    if cls is _known("polars", "DataFrame"):
        return list(value.shape), None, _columns(value.columns, value.dtypes)
    if cls is _known("polars", "Series"):
        return [len(value)], None, str(value.dtype)[:_MOST_TEXT]
    if cls is _known("torch", "Tensor"):
        size = int(value.element_size()) * int(value.nelement())
        words = "%s on %s" % (value.dtype, value.device)
        return [int(length) for length in value.shape], size, words[:_MOST_TEXT]
    return None


def _known(module: str, name: str) -> Any:
    """A class of a package that has been imported; never the type of anything else."""
    return getattr(sys.modules.get(module), name, among)


def _columns(names: Any, types: Any) -> str:
    """Names of columns that are strings, with their types."""
    words = []
    for name, kind in zip(names[: 2 * _MOST_ITEMS], types[: 2 * _MOST_ITEMS]):
        word = name if type(name) is str else short(name)
        words.append("%s %s" % (word[:40], str(kind)[:40]))
    more = ", ..." if len(names) > 2 * _MOST_ITEMS else ""
    return (", ".join(words) + more)[: 3 * _MOST_TEXT]


def described(name: str, value: Any) -> "Dict[str, Any]":
    """One variable."""
    cls = type(value)
    facts: Dict[str, Any] = {"name": name[:_MOST_TEXT], "type": name_of(cls), "text": ""}
    try:
        found = array(value)
        if found is not None:
            facts["shape"], facts["size"], facts["text"] = found
            return facts
        facts["text"] = short(value)
        if among(cls, (*_SIZED, *_SIMPLE, int)):
            facts["size"] = sys.getsizeof(value)
        if among(cls, _SIZED):
            facts["shape"] = [len(value)]
    except Exception as error:  # noqa: BLE001  one odd value must not hide the others
        facts["text"] = facts["text"] or "cannot be described (%s)" % name_of(type(error))
    return facts


def answer(namespace: "Dict[str, Any]", hidden: "Dict[str, Any]") -> str:
    """All variables of a user, as JSON in base64: plain characters that any kernel's display of a
    string leaves as they are."""
    shown: List[Dict[str, Any]] = []
    more = 0
    for name, value in list(namespace.items()):
        if type(name) is not str or name[:1] == "_" or name in _OURS or type(value) is _MODULE:
            continue
        if name in hidden and hidden[name] is value:
            continue
        if len(shown) < MOST:
            shown.append(described(name, value))
        else:
            more += 1
    return base64.b64encode(json.dumps({"variables": shown, "more": more}).encode()).decode()
