"""Replacing in streams: any cut gives the same, and nothing of a value comes out."""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
from collections.abc import Callable, Sequence
from urllib.parse import quote, quote_plus

import markupsafe
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sandbox_kernel.gateway.framed_replacing import FramedReplacer, grpc_header, websocket_header
from sandbox_kernel.gateway.placeholders import is_placeholder, placeholder_for
from sandbox_kernel.gateway.refusals import Refusal
from sandbox_kernel.gateway.replacing import Replacements, Replacer
from sandbox_kernel.gateway.rewriting import Filter
from sandbox_kernel.gateway.secret_forms import LONGEST_FORM, shown_as, url_pattern

VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=8, max_size=40)
CUTS = st.lists(st.integers(0, 400), max_size=12)
VALUE = 'sk-r3al/"v&lue"+0123456789='
FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda v: v,
    "lower case": str.lower,
    "upper case": str.upper,
    "JSON": lambda v: json.dumps({"a": v}),
    "JSON with escaped slashes": lambda v: json.dumps(v).replace("/", "\\/"),
    "JSON, as Go writes it": lambda v: re.sub(
        "[<>&]", lambda c: f"\\u{ord(c[0]):04x}", json.dumps(v)
    ),
    "JSON, as .NET writes it": lambda v: "".join(
        "\\\\" if c == "\\" else f"\\u{ord(c):04X}" if c in "<>&'\"+`" else c for c in v
    ),
    "URL": lambda v: quote(v, safe=""),
    "URL, lower case": lambda v: re.sub("%..", lambda e: e[0].lower(), quote(v, safe="")),
    "path": quote,
    "form": quote_plus,
    "markup": html.escape,
    "markup, as Jinja writes it": markupsafe.escape,
    "markup, as Handlebars writes it": lambda v: (
        html.escape(v).replace("=", "&#x3D;").replace("`", "&#x60;")
    ),
    "markup, as Go writes it": lambda v: str(markupsafe.escape(v)).replace("+", "&#43;"),
    "base64": lambda v: base64.b64encode(v.encode()).decode(),
    "basic": lambda v: base64.b64encode(f"user:{v}".encode()).decode(),
    "base64, one byte later": lambda v: base64.b64encode(f"u:{v}:".encode()).decode(),
    "base64 for URLs": lambda v: base64.urlsafe_b64encode(v.encode()).decode(),
    "hexadecimal": lambda v: v.encode().hex(),
}


def passed(filter_: Filter, data: bytes, cuts: Sequence[int]) -> bytes:
    """What a filter makes of data that is cut there."""
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = (data[a:b] for a, b in itertools.pairwise(ends))
    return b"".join([*map(filter_.feed, pieces), filter_.end()])


def scrubbing(value: str, placeholder: str) -> Replacements:
    return Replacements(shown_as(value, placeholder), hold=len(value) * LONGEST_FORM)


SMALL = st.text("ab", min_size=1, max_size=4).map(str.encode)


@given(st.dictionaries(SMALL, st.binary(max_size=4), max_size=4), st.text("abc").map(str.encode))
def test_any_cut_gives_the_same(pairs: dict[bytes, bytes], data: bytes) -> None:
    """Whether a beginning of a match waits, or so many bytes: as if the data had come at once."""
    for hold in (0, 4, 9):
        replacements = Replacements(pairs, hold=hold)
        whole = replacements.in_whole(data)
        for cut in range(len(data) + 1):
            assert passed(Replacer(replacements), data, [cut]) == whole
        assert passed(Replacer(replacements), data, range(len(data))) == whole


@given(VALUES, st.text(max_size=60), st.text(max_size=60), CUTS, st.sampled_from(sorted(FORMS)))
def test_a_value_does_not_come_out(
    value: str, before: str, after: str, cuts: list[int], form: str
) -> None:
    placeholder = placeholder_for(value)
    shown = FORMS[form](value)
    assume(shown not in placeholder)
    data = f"{before}{shown}{after}{shown}".encode()
    clean = passed(Replacer(scrubbing(value, placeholder)), data, cuts)
    assert len(clean) == len(data), "nothing else tells that something was replaced"
    assert value.encode() not in clean
    if "base64" not in form and form != "basic":
        assert shown.encode() not in clean


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_value(form: str) -> None:
    """Also in base64 of longer text, of which the characters that it shares with others stay."""
    shown = FORMS[form](VALUE).encode()
    clean = scrubbing(VALUE, placeholder_for(VALUE)).in_whole(shown)
    assert len(clean) == len(shown)
    same = sum(a == b for a, b in zip(clean, shown, strict=True))
    assert same < len(shown) / 2 or "markup" in form
    assert VALUE[4:].encode() not in clean
    if "base64" in form or form == "basic":
        assert b"r3al" not in base64.urlsafe_b64decode(clean.replace(b"+", b"-"))


def test_what_waits_does_not_depend_on_the_value() -> None:
    """Whoever has guesses echoed in pieces learns nothing from what comes at once."""
    scrub = scrubbing("sk-secret-value", placeholder_for("sk-secret-value"))
    for guess in (b"sk-s", b"sk-x", b"....", b"   "):
        assert Replacer(scrub).feed(guess) == b""
        assert Replacer(scrub).feed(guess + b"\n") == guess + b"\n"
    assert len(Replacer(scrub).feed(b"x" * 1000)) == len(Replacer(scrub).feed(b"sk-s" * 250))


@given(VALUES)
def test_placeholders(value: str) -> None:
    """As long as the value unless that is short, never twice the same, and of the same form."""
    one, other = placeholder_for(value), placeholder_for(value)
    assert one != other
    assert is_placeholder(one)
    assert len(one) == len(value) or len(value) < 24
    assert quote(one, safe="") == one


@pytest.mark.parametrize(
    ("value", "like"),
    [
        ("sk-proj-abcdefgh0123456789ABCDEF", r"sk-proj-[A-Za-z0-9]{24}"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", r"ghp_[A-Za-z0-9]{36}"),
        ("AKIAIOSFODNN7EXAMPLE", r"AKIA[A-Z0-9]{16}"),
        ("0123456789abcdef0123456789abcdef", r"[0-9a-f]{32}"),
        ("31415926", r"[0-9]{16}"),
        ("12345678-1234-1234-1234-123456789abc", r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        ("correct horse battery staple", r"[A-Za-z0-9]{28}"),
    ],
)
def test_a_placeholder_looks_like_its_value(value: str, like: str) -> None:
    """Programs that check the form accept it; only how all of a kind begin is taken from it."""
    found = placeholder_for(value)
    assert re.fullmatch(like, found)
    prefix = like.partition("[")[0]
    assert value[len(prefix) :][:6] not in found


def test_a_placeholder_in_a_url_may_be_encoded() -> None:
    pattern = url_pattern("sk-Ab1")
    for text in ("sk-Ab1", "sk%2DAb1", "%73%6b%2d%41%62%31", "%73%6B%2Dab1"):
        assert bool(pattern.search(text)) == (text != "%73%6B%2Dab1")


# --- messages with a length


def websocket(payload: bytes) -> bytes:
    size = len(payload)
    return b"\x81" + (bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big")) + payload


def grpc(payload: bytes) -> bytes:
    return b"\0" + len(payload).to_bytes(4, "big") + payload


@given(VALUES, st.lists(st.text(max_size=90), max_size=4), CUTS, st.booleans())
def test_messages_with_a_length(
    value: str, texts: list[str], cuts: list[int], is_grpc: bool
) -> None:
    """WebSocket frames and gRPC: the value is replaced in each, and headers are left alone."""
    message, take = (grpc, grpc_header) if is_grpc else (websocket, websocket_header)
    scrub = scrubbing(value, placeholder_for(value))
    payloads = [f"{text}{value}{text}".encode() for text in texts]
    data = b"".join(map(message, payloads))
    clean = passed(FramedReplacer(scrub, take), data, cuts)
    assert clean == b"".join(message(scrub.in_whole(payload)) for payload in payloads)
    assert value.encode() not in clean


PING = b"\x89\x04ping"


@given(VALUES, st.lists(st.integers(0, 40), max_size=6), CUTS, st.booleans())
def test_a_value_in_fragments(value: str, sizes: list[int], cuts: list[int], pings: bool) -> None:
    """A message in many frames of WebSocket, with control frames between them."""
    scrub = scrubbing(value, placeholder_for(value))

    def framed(payload: bytes) -> bytes:
        frames = []
        for number, size in enumerate(sizes):
            opcode = 0 if number else 1
            frames.append(bytes([opcode, len(payload[:size])]) + payload[:size])
            frames.append(PING if pings else b"")
            payload = payload[size:]
        return b"".join(frames) + websocket(payload)

    payload = f"a{value}, {value[:-1]}{value}\n".encode()
    given_, clean = framed(payload), framed(scrub.in_whole(payload))
    assert passed(FramedReplacer(scrub, websocket_header), given_ + PING, cuts) == clean + PING
    assert FramedReplacer(scrub, websocket_header).feed(given_) == clean


def test_what_waits_in_a_message_is_bounded() -> None:
    """A server that begins what may be a value, and goes on with frames that have nothing."""
    scrub = scrubbing("sk-secret-value", placeholder_for("sk-secret-value"))
    replacer = FramedReplacer(scrub, websocket_header)
    assert replacer.feed(b"\x01\4sk-s") == b"\x01\4"
    with pytest.raises(Refusal, match="too many frames"):
        replacer.feed(b"\0\0" * 100)


def test_the_end_of_a_message_waits_for_nothing() -> None:
    scrub = scrubbing("sk-secret-value", placeholder_for("sk-secret-value"))
    for message, take in ((websocket, websocket_header), (grpc, grpc_header)):
        data = message(b"your turn: sk-s")
        assert FramedReplacer(scrub, take).feed(data) == data


@pytest.mark.parametrize(
    ("data", "take"),
    [
        (b"\x01\0\0\0\1x", grpc_header),
        (b"\xc1\1x", websocket_header),
        (b"\x81\x81k", websocket_header),
        (b"\x09\1x", websocket_header),
        (b"\x89\x7e\0\x7e" + b"x" * 126, websocket_header),
    ],
)
def test_messages_that_cannot_be_read_end_the_stream(data: bytes, take: object) -> None:
    """Compressed ones, for example, in which a value could hide."""
    with pytest.raises(Refusal):
        FramedReplacer(scrubbing("x" * 8, "y" * 16), take).feed(data)  # type: ignore[arg-type]
