"""The forms in which a value, or its placeholder, can stand in a message. No I/O."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable
from urllib.parse import quote, quote_plus

LONGEST_FORM = 6
"""Most bytes that one character of a value has in any form (``&quot;``, ``\\u0026``)."""
_ENTITIES: tuple[dict[str, str | int | None], ...] = (
    {"'": "&#39;", '"': "&#34;"},
    {"'": "&#39;", '"': "&#34;", "+": "&#43;"},
    {"'": "&#039;", '"': "&quot;"},
    {"'": "&#39;", '"': "&quot;"},
    {"'": "&#x27;", '"': "&quot;", "`": "&#x60;", "=": "&#x3D;"},
    {"'": "&#39;", '"': "&quot;", "`": "&#x60;", "=": "&#x3D;", "/": "&#x2F;"},
    {"'": "&#x27;", '"': "&quot;", "/": "&#x2F;"},
)
"""What templates write in HTML, beside ``&amp;``, ``&lt;`` and ``&gt;``: Jinja, Go, PHP, JavaScript
(Handlebars, Mustache, Underscore), OWASP's rule."""
Escape = Callable[[str], str]
_CORE = ((0, 0), (1, 2), (2, 3))
"""Bytes before a value, and the first character of their base64 that they do not touch."""


def in_url(text: str) -> str:
    return quote(text, safe="")


def in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def in_form(text: str) -> str:
    return quote_plus(text)


def in_markup(text: str) -> str:
    return html.escape(text)


def as_it_is(text: str) -> str:
    return text


def escape_for(content_type: str) -> Escape:
    """How a value is written in a body of this type."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind.endswith(("json", "json-seq")) or kind == "application/x-amz-json-1.1":
        return in_json
    if kind == "application/x-www-form-urlencoded":
        return in_form
    if kind.endswith(("xml", "/html")):
        return in_markup
    return as_it_is


def url_pattern(placeholder: str) -> re.Pattern[str]:
    """A placeholder in a URL, where any of its characters may be percent-encoded."""
    parts = (f"(?:{re.escape(one)}|(?i:%{ord(one):02x}))" for one in placeholder)
    return re.compile("".join(parts))


def shown_as(value: str, placeholder: str) -> dict[bytes, bytes]:
    """What an answer that echoes a value can look like -> what the sandbox gets, which is as long:
    nothing about the message changes but that."""
    stand_in = stretched(placeholder, len(value))
    pairs: dict[bytes, bytes] = {}
    for escaped in _texts(value):
        pairs[escaped.encode()] = stretched(placeholder, len(escaped)).encode()
    for mine, theirs in zip(_encoded(value), _encoded(stand_in), strict=True):
        pairs.setdefault(mine, theirs)
    return pairs


def stretched(placeholder: str, length: int) -> str:
    """A placeholder cut or repeated to a length."""
    return (placeholder * (length // len(placeholder) + 1))[:length]


def _texts(value: str) -> set[str]:
    percent = {in_url(value), quote(value), in_form(value), quote(value, safe="/:@!$&'()*+,;=")}
    plain_json = in_json(value)
    escaped = {
        *(plain_json, plain_json.replace("/", "\\/"), in_markup(value)),
        _with_numbers(plain_json, "<>&", "04x"),  # as Go does
        _with_numbers(plain_json, "<>&'", "04x"),  # as templates in Python do
        _with_numbers(value, "<>&'\"+`\\", "04X").replace("\\u005C", "\\\\"),  # as .NET does
    }
    lower = {re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), text) for text in percent}
    markup = html.escape(value, quote=False)
    escaped |= {markup, *(markup.translate(str.maketrans(written)) for written in _ENTITIES)}
    return {value, value.lower(), value.upper(), *percent, *lower, *escaped}


def _with_numbers(text: str, characters: str, form: str) -> str:
    """JSON text in which these characters are written as numbers."""
    return "".join(f"\\u{ord(one):{form}}" if one in characters else one for one in text)


def _encoded(value: str) -> list[bytes]:
    """In base64, also within longer text, of which nothing is known; and in hexadecimal."""
    data = value.encode()
    found = [data.hex().encode(), data.hex().upper().encode()]
    for before, first in _CORE:
        whole = base64.b64encode(bytes(before) + data)
        core = whole[first : (before + len(data)) * 8 // 6]
        found += [core, core.translate(bytes.maketrans(b"+/", b"-_"))]
    return found
