"""Logins of package indexes are added where the package manager would send them, nowhere else."""

from __future__ import annotations

import pytest

from sandbox_kernel.gateway.index_logins import IndexLogins, Login
from sandbox_kernel.gateway.names import Target

INDEX = Target("index.example", 443)
PLAIN = Target("plain.example", 8080)
HEADERS = (("accept", "*/*"), ("authorization", "Basic bWluZTptaW5l"))


@pytest.fixture
def logins() -> IndexLogins:
    made = IndexLogins()
    made.logins = {INDEX: Login("me", "p:w"), PLAIN: Login("me", "", over_tls=False)}
    return made


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_fetches_gets_the_login(logins: IndexLogins, method: str) -> None:
    """In place of what the sandbox has sent."""
    sent = logins.request(INDEX, method, "/simple/", HEADERS, secure=True)
    assert sent.headers == (("accept", "*/*"), ("authorization", "Basic bWU6cDp3"))
    assert sent.path_and_query == "/simple/"
    sent = logins.request(PLAIN, method, "/", (), secure=False)
    assert sent.headers == (("authorization", "Basic bWU6"),)


@pytest.mark.parametrize(
    ("target", "method", "secure"),
    [
        (INDEX, "POST", True),
        (INDEX, "PUT", True),
        (INDEX, "DELETE", True),
        (INDEX, "GET", False),
        (Target("index.example", 80), "GET", False),
        (Target("index.example", 8443), "GET", True),
        (Target("other.example", 443), "GET", True),
        (Target("sub.index.example", 443), "GET", True),
    ],
)
def test_nothing_else_does(logins: IndexLogins, target: Target, method: str, secure: bool) -> None:
    """Not what writes, not another port or host, and not in the open where it was meant for TLS."""
    assert logins.request(target, method, "/", HEADERS, secure=secure).headers == HEADERS


def test_which_hosts_must_be_read(logins: IndexLogins) -> None:
    assert logins.concerns(INDEX)
    assert not logins.concerns(Target("index.example", 80))
    logins.logins = {}
    assert not logins.concerns(INDEX)


def test_a_password_is_not_shown() -> None:
    assert "p:w" not in repr(Login("me", "p:w"))
