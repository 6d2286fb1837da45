"""Variables of a real kernel, listed without running any code of theirs; and false lists."""

from __future__ import annotations

import base64
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

from sandbox_kernel.agents.variables import Variable, check_language, request, variables_of
from sandbox_kernel.errors import KernelError, Unsupported
from sandbox_kernel.guest import list_variables
from tests.helpers.waiting import LIMIT


@pytest.fixture(scope="module")
def kernel() -> Iterator[BlockingKernelClient]:
    """A plain IPython kernel: what is listed does not depend on where it runs."""
    manager, client = start_new_kernel(startup_timeout=LIMIT)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def execute(kernel: BlockingKernelClient, content: dict[str, Any]) -> dict[str, Any]:
    message = kernel.session.msg("execute_request", content)
    kernel.shell_channel.send(message)
    while True:
        reply = kernel.get_shell_msg(timeout=LIMIT)
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            found: dict[str, Any] = reply["content"]
            return found


def listed(kernel: BlockingKernelClient, code: str) -> dict[str, Variable]:
    """What is listed after a cell."""
    reply = kernel.execute(code, reply=True, timeout=LIMIT)
    assert reply["content"]["status"] == "ok", reply
    variables, more = variables_of(execute(kernel, request()), "python3")
    assert more == 0
    return {variable.name: variable for variable in variables}


VALUES = """
import math, sys
from math import pi
small, text, nothing = 7, "a" * 1000, None
nested = [1, [2, [3, [4]]], {"k": (5,)}]
many = {n: str(n) for n in range(100)}
huge, endless = 10**100_000, range(10**30)
raw, empty = b"\\0x", set()
def function(a, *, b=object()): ...
class Thing: ...
_private = 1
"""


def test_what_is_listed(kernel: BlockingKernelClient) -> None:
    """Names that a user gave, with types, lengths and the beginning of values."""
    found = listed(kernel, VALUES)
    assert set(found) == {
        *("pi", "small", "text", "nothing", "nested", "many", "huge", "endless"),
        *("raw", "empty", "function", "Thing"),
    }
    assert found["small"] == Variable("small", "int", None, sys.getsizeof(7), "7")
    assert (found["text"].shape, found["text"].text) == ((1000,), repr("a" * 120) + "...")
    assert found["nothing"].text == "None"
    assert found["nested"].text == "[1, [2, [...]], {'k': (...)}]"
    assert found["many"].text.endswith("5: '5', ...}")
    assert found["many"].shape == (100,)
    assert found["huge"].text == "int of 332193 bits"
    assert found["endless"].text == f"range(0, {10**30})"
    assert (found["raw"].text, found["empty"].text) == (repr(b"\0x"), "set()")
    assert found["function"].text == "def function(a, b)"
    assert (found["Thing"].type, found["Thing"].text) == ("type", "class Thing")


def test_listing_leaves_no_trace(kernel: BlockingKernelClient) -> None:
    """No name, no number, no history, no output; asked twice, the same answer."""
    names = "sorted(get_ipython().user_ns), get_ipython().execution_count, len(In)"
    execute(kernel, {**request(), "user_expressions": {}})
    before = execute(kernel, {**request(), "user_expressions": {"n": names}})
    first = variables_of(execute(kernel, request()), "python3")
    assert first == variables_of(execute(kernel, request()), "python3")
    after = execute(kernel, {**request(), "user_expressions": {"n": names}})
    assert after["user_expressions"] == before["user_expressions"]


EVIL = """
class Meta(type):
    def __getattribute__(cls, name): raise SystemExit
    def __instancecheck__(cls, other): raise SystemExit
    def __subclasscheck__(cls, other): raise SystemExit
    def __repr__(cls): raise SystemExit
    def __eq__(cls, other): raise SystemExit
    __hash__ = type.__hash__
class Evil(metaclass=Meta):
    def __hash__(self): return 1
    def _exit(self, *_): raise SystemExit
    __repr__ = __str__ = __len__ = __eq__ = __getattribute__ = __sizeof__ = __bool__ = _exit
    __iter__ = __format__ = __reduce__ = __class_getitem__ = __dir__ = _exit
    __class__ = property(_exit)
class Longer(list):
    def __len__(self): raise SystemExit
    __repr__ = __iter__ = __len__
e = Evil()
inside = [e, {e: e}, {e}, (e,)]
longer = Longer([1])
exec = eval = type = list = repr = len = sorted = get_ipython = None
"""


def test_no_code_of_the_variables_runs(kernel: BlockingKernelClient) -> None:
    """Classes that end the kernel if they are asked anything, and builtins with other meanings."""
    found = listed(kernel, EVIL)
    assert (found["e"].type, found["e"].text) == ("Evil", "<Evil>")
    assert found["inside"].text == "[<Evil>, {<Evil>: <Evil>}, {<Evil>}, (<Evil>,)]"
    assert (found["longer"].shape, found["longer"].text) == (None, "<Longer>")
    assert (found["Evil"].type, found["Evil"].text) == ("Meta", "class Evil")
    assert kernel.execute("assert e is not None", reply=True, timeout=LIMIT)


def test_arrays_and_tables_tell_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of these packages only: any others that look like them are not asked."""

    class ndarray:  # noqa: N801
        shape, nbytes, dtype = (3, 4), 96, "float64"

    class DataFrame:
        shape, columns, dtypes = (9, 2), ["a", object()], ["Int64", "String"]

    class float64:  # noqa: N801
        @staticmethod
        def item() -> float:
            return 0.5

    numpy = types.SimpleNamespace(ndarray=ndarray, float64=float64)
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    monkeypatch.setitem(sys.modules, "polars", types.SimpleNamespace(DataFrame=DataFrame))
    array = list_variables.described("a", ndarray())
    assert (array["shape"], array["size"], array["text"]) == ([3, 4], 96, "float64")
    assert list_variables.described("n", float64())["text"] == "0.5"
    table = list_variables.described("t", DataFrame())
    assert (table["shape"], table["text"]) == ([9, 2], "a Int64, <object> String")
    monkeypatch.delitem(sys.modules, "numpy")
    assert "shape" not in list_variables.described("a", ndarray())


def test_many_variables_are_bounded() -> None:
    """How many more there are is told."""
    names: dict[str, Any] = {f"n{number}": number for number in range(700)}
    answer = list_variables.answer({**names, "_x": 1, "sys": sys}, {"n0": 0})
    variables, more = variables_of(told(answer), "k")
    assert (len(variables), more) == (list_variables.MOST, 700 - 1 - list_variables.MOST)


@pytest.mark.parametrize("language", ["R", "julia", "", "\x1b[2J"])
def test_other_languages_are_refused_by_name(language: str) -> None:
    """What to do instead is said."""
    with pytest.raises(Unsupported, match="kernel 'ir' cannot be listed") as refused:
        check_language(language, "ir")
    assert "\x1b" not in str(refused.value)
    check_language("python", "python3")


def told(text: object) -> dict[str, Any]:
    """A reply whose expression has this text."""
    plain = {"text/plain": repr(text) if isinstance(text, str) else text}
    return {"user_expressions": {"variables": {"status": "ok", "data": plain}}}


def as_base64(value: object) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


LIES = [
    {},
    {"user_expressions": []},
    {"user_expressions": {"variables": {"status": "error", "evalue": "\x1b[2Jno"}}},
    told(None),
    told("not base64!"),
    told("AAA"),
    told(base64.b64encode(b"[" * 10**5).decode()),
    told(as_base64([])),
    told(as_base64({"variables": {}})),
    told("A" * 2**22),
]


@pytest.mark.parametrize("reply", LIES, ids=range(len(LIES)))
def test_a_false_list_is_an_error(reply: dict[str, Any]) -> None:
    """Whatever the kernel sends."""
    with pytest.raises(KernelError, match="'k'") as refused:
        variables_of(reply, "k")
    assert "\x1b" not in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=500),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=10,
)
FACTS = st.dictionaries(st.sampled_from(["name", "type", "shape", "size", "text"]), JSON)


@given(st.lists(FACTS | JSON, max_size=5), JSON)
def test_false_facts_are_left_out(facts: list[Any], more: Any) -> None:
    """What remains is of the type that it should be, short, and fit to be printed."""
    reply = told(as_base64({"variables": facts, "more": more}))
    variables, count = variables_of(reply, "k")
    assert count >= 0
    for each in variables:
        for word in (each.name, each.type, each.text):
            assert len(word) <= 400 * 10
            assert "\x1b" not in word
        assert each.size is None or each.size >= 0
        assert each.shape is None or all(length >= 0 for length in each.shape)
