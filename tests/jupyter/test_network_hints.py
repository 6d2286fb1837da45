"""Hints for a sandbox without a network, after texts that may be anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.jupyter.network_hints import hint, text_of

_REQUESTS = (
    "HTTPSConnectionPool(host='data.example', port=443): Max retries exceeded with url: / (Caused "
    "by NameResolutionError(\"Failed to resolve 'data.example' ([Errno -3] Temporary failure in "
    'name resolution)"))'
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (_REQUESTS, "data.example"),
        ("curl: (6) Could not resolve host: files.example", "files.example"),
        ("psycopg: failed to resolve host 'db.example': [Errno -3] ...", "db.example"),
        ("gaierror: [Errno -3] Temporary failure in name resolution", "HOST"),
        ("OSError: [Errno 101] Network is unreachable", "HOST"),
        ("Failed to resolve '$(reboot).example'", "HOST"),
        ("Failed to resolve 'a`b`.example'", "HOST"),
        ("Failed to resolve '--help.example'", "HOST"),
        (_REQUESTS.replace("url: /", "url: /simple/cowsay/"), "@pip"),
    ],
)
def test_the_host_is_named_if_it_is_a_plain_name(text: str, word: str) -> None:
    assert f"SANDBOX_KERNEL_EGRESS={word};" in hint(text, "local", "SANDBOX_KERNEL_EGRESS")


def test_other_errors_have_no_hint() -> None:
    for text in ("ZeroDivisionError: division by zero", "ConnectionRefusedError: refused", ""):
        assert hint(text, "local", "SANDBOX_KERNEL_EGRESS") == ""


@given(st.text(alphabet="a.-'\"/ \n:", max_size=300))
def test_the_hint_is_one_safe_line(text: str) -> None:
    said = hint(f"Failed to resolve {text}", "local", "VARIABLE")
    assert said.isprintable()
    assert len(said) < 900


def test_the_content_may_be_anything() -> None:
    assert text_of({"ename": None, "evalue": 3}) == "None: 3"
    assert text_of({"text": ["Failed to resolve"]})
    assert len(text_of({"text": "x" * 10**6})) < 10**5
