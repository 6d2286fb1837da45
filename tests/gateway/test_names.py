"""What a hostile client may name, and what not."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.names import (
    NameRefused,
    Target,
    read_authority,
    read_target,
    read_url,
)

BAD_HOSTS = [
    "",
    ".",
    "a..example",
    ".a.example",
    "a.example..",
    "a\0.example",
    "a.example\0.evil.test",
    "a example",
    "a.example ",
    "\ta.example",
    "a.example\r\nX: y",
    "t\xe4st.example",
    "a\u3002example",
    "a.example\u200b",
    "-a.example",
    "a-.example",
    "x" * 64 + ".example",
    ".".join(["x" * 50] * 6),
    "user@a.example",
    "a%2eexample",
    "a/b",
    "a\\b",
    "a*b.example",
    "2130706433",
    "0177.0.0.1",
    "0x7f.1",
    "0x7f000001",
    "0x",
    "127.1",
    "127.0.0.1.",
    "127.0.0.256",
    "1.2.3.4.5",
    "a.example.123",
    "fe80::1%eth0",
    "[::1]",
    "::1]",
    "1::2::3",
]


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_what_could_be_read_in_two_ways_is_refused(host: str) -> None:
    for form in (host, host.encode("latin-1", "replace")):
        with pytest.raises(NameRefused) as caught:
            read_target(form, 443)
        assert str(caught.value).isascii()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "read"),
    [
        ("Data.Example", "data.example"),
        ("data.example.", "data.example"),
        ("xn--tst-qla.example", "xn--tst-qla.example"),
        ("_dmarc.a-b.example", "_dmarc.a-b.example"),
        ("localhost", "localhost"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
    ],
)
def test_names_and_addresses_have_one_form(host: str, read: str) -> None:
    assert read_target(host, 1).host == read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.example:8443", Target("a.example", 8443)),
        ("a.example", Target("a.example", 80)),
        ("[2001:db8::1]:443", Target("2001:db8::1", 443, ipaddress.ip_address("2001:db8::1"))),
        ("192.0.2.1", Target("192.0.2.1", 80, ipaddress.ip_address("192.0.2.1"))),
    ],
)
def test_authorities(text: str, expected: Target) -> None:
    assert read_authority(text, 80) == expected
    assert read_authority(str(expected), None) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("a.example:", "a.example:0", "a.example:65536", "a.example:+1", "a.example:1e1"),
        *("a.example:443:443", "2001:db8::1", "[2001:db8::1", "[a.example]:1", "[192.0.2.1]:1"),
        *("[fe80::1%25eth0]:1", "u:p@a.example:1", "a.example:\u0661", "a.example:99999999999"),
    ],
)
def test_bad_authorities(text: str) -> None:
    with pytest.raises(NameRefused):
        read_authority(text, 80)


@pytest.mark.parametrize(
    ("url", "host", "rest"),
    [
        ("http://a.example", "a.example:80", "/"),
        ("HTTP://a.example?q=/", "a.example:80", "/?q=/"),
        ("https://a.example:8443/x?y", "a.example:8443", "/x?y"),
        ("http://[2001:db8::1]/", "[2001:db8::1]:80", "/"),
    ],
)
def test_urls(url: str, host: str, rest: str) -> None:
    _, target, path = read_url(url)
    assert (str(target), path) == (host, rest)


@pytest.mark.parametrize(
    "url",
    [
        *("a.example/x", "http:/a.example", "http:///x", "http://u@a.example/", "http://a\\@b/"),
        *("http://a.example#f", "ftp://a.example/", "http://a b/", "http://%61.example/", "://a/"),
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(NameRefused):
        read_url(url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:pass-word@a.example/", "http://a.example/?k=pass-word#x", "pass-word"),
        *("x/http://u:pass-word@a.example/", "http://pass-word@@a.example", "http:pass-word"),
    ],
)
def test_errors_show_no_login_and_no_query(url: str) -> None:
    """They are in the audit, and a sandbox may have been given a value itself."""
    with pytest.raises(NameRefused) as caught:
        read_url(url)
    assert "pass-word" not in str(caught.value)


@given(st.text(max_size=40) | st.binary(max_size=40))
def test_whatever_is_read_is_plain_and_stays_the_same(host: str | bytes) -> None:
    """Anything that passes is a name that rules can be compared with, byte for byte."""
    try:
        target = read_target(host, 443)
    except NameRefused:
        return
    assert target.host == target.host.lower()
    assert target.host.isascii()
    assert not set(target.host) & set("\0 @%/\\[]")
    assert read_target(target.host, 443) == target
    assert read_authority(str(target), None) == target
    EgressPolicy.of({"host": target.host})  # a rule can name it
    assert EgressPolicy.of({"host": target.host}).decide(target.host, 443) == "allow"


@given(st.text(alphabet="0123456789abcdefx.:[]%@", max_size=24))
def test_what_looks_like_an_address_is_one_or_refused(text: str) -> None:
    try:
        target = read_authority(text, 80)
    except NameRefused:
        return
    if target.address is None:
        assert not target.host.rsplit(".", 1)[-1].isdigit()
    else:
        assert str(ipaddress.ip_address(target.host)) == target.host
