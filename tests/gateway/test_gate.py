"""What the gate answers: the policy's own words, where they can be held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.decisions import ambiguous
from sandbox_kernel.gateway.gate import Gate
from sandbox_kernel.gateway.names import read_target

from .generated_policies import HOSTS, METHODS, PATHS, policies


def by_an_address_rule(policy: EgressPolicy, host: str, port: int, *request: str) -> bool:
    """Whether the rule that decides is one for addresses."""
    for rule in policy.rules:
        if rule.matches(host, port, *(request or ("GET", "/"))):
            return rule.is_address
    return False


@given(policies(partial=False), st.sampled_from(HOSTS), st.sampled_from([80, 443, 5432, 22]))
def test_by_host_and_port_the_policy_decides(policy: EgressPolicy, host: str, port: int) -> None:
    """Addresses are the exception: only a rule for addresses lets them pass."""
    decision = Gate(policy).connection(host, port)
    expected = policy.decide(host, port)
    if read_target(host, port).address and not by_an_address_rule(policy, host, port):
        expected = "deny"
    assert decision.action == expected
    assert decision.action == Gate(policy).request(host, port, "GET", "/").action


@given(
    policies(partial=True),
    st.sampled_from(HOSTS),
    st.sampled_from([80, 443]),
    st.sampled_from(METHODS),
    st.sampled_from(PATHS),
)
def test_by_request_the_policy_decides(
    policy: EgressPolicy, host: str, port: int, method: str, path: str
) -> None:
    decision = Gate(policy).request(host, port, method, path)
    expected = policy.decide(host, port, method, path)
    if read_target(host, port).address and not by_an_address_rule(policy, host, port, method, path):
        expected = "deny"
    assert decision.action == expected
    if decision.number is not None:
        assert policy.rules[decision.number - 1] is decision.rule


@given(policies(partial=True), st.sampled_from(HOSTS), st.sampled_from([80, 443]))
def test_what_cannot_be_read_passes_only_if_every_request_would(
    policy: EgressPolicy, host: str, port: int
) -> None:
    if Gate(policy).connection(host, port).allowed:
        requests = [(method, path) for method in [*METHODS, "PUT"] for path in PATHS]
        assert all(policy.decide(host, port, *request) == "allow" for request in requests)


@given(policies(partial=True), st.sampled_from(HOSTS[:3]))
def test_ports_of_a_name(policy: EgressPolicy, host: str) -> None:
    """A port is listed if, and only if, some request on it could be allowed."""
    ports = Gate(policy).ports_for(f"{host.upper()}.")
    for port in (80, 443, 5432):
        requests = [(method, path) for method in [*METHODS, "PUT"] for path in PATHS]
        passes = any(policy.decide(host, port, *request) == "allow" for request in requests)
        if port in ports:
            # Two rules about methods and paths may cover all between them: then it is one too many.
            assert passes or any(rule.is_partial for rule in policy.rules)
        elif port != 5432:
            assert not passes


def test_ports_for_dns() -> None:
    gate = Gate(EgressPolicy.of("a.example", "db.example:5432", "!x.b.example", "*.b.example:22"))
    assert gate.ports_for("a.example") == (80, 443)
    assert gate.ports_for("db.example") == (5432,)
    assert gate.ports_for("y.b.example") == (22,)
    for name in ("x.b.example", "b.example", "no.test", "", "a b", "1.2.3.4", "127.1"):
        assert gate.ports_for(name) == ()
    assert Gate(EgressPolicy()).ports_for("a.example") == ()


NO_RULE = 'egress denied: example.org:443 (no rule allows it; allow it with egress=["example.org"])'


@pytest.mark.parametrize(
    ("rules", "target", "line"),
    [
        ([], "example.org:443", NO_RULE),
        (["@pip"], "example.org:443", NO_RULE),
        (
            [],
            "example.org:8443",
            "egress denied: example.org:8443 (no rule allows it; allow it with "
            'egress=["example.org:8443"])',
        ),
        (
            ["a.test", "!*.example.org"],
            "x.example.org:443",
            "egress denied: x.example.org:443 (rule 2 denies *.example.org)",
        ),
        (
            ["*"],
            "1.1.1.1:443",
            "egress denied: 1.1.1.1:443 (it is an address, and no rule for addresses allows it; "
            'allow it with egress=["1.1.1.1"])',
        ),
        (
            [{"host": "example.org", "path": "/v1/*"}],
            "example.org:443",
            "egress denied: example.org:443 (rule 1 allows only some requests to example.org; "
            "reading encrypted requests needs the extra 'gateway')",
        ),
        (
            [{"host": "example.org", "methods": "POST", "action": "deny"}, "example.org"],
            "example.org:443",
            "egress denied: example.org:443 (rule 1 denies some requests to example.org; "
            "reading encrypted requests needs the extra 'gateway')",
        ),
        (
            [{"host": "example.org", "path": "/v1/*", "rate_limit_rpm": 1}, "example.org"],
            "example.org:443",
            "egress denied: example.org:443 (rule 1 limits some requests to example.org; "
            "reading encrypted requests needs the extra 'gateway')",
        ),
    ],
)
def test_a_denial_is_one_line_that_says_why(rules: list[object], target: str, line: str) -> None:
    host, _, port = target.rpartition(":")
    decision = Gate(EgressPolicy.read(rules)).connection(host, int(port))
    assert not decision.allowed
    assert decision.denial(read_target(host, int(port))) == line


def test_a_rate_limit_is_a_sliding_minute() -> None:
    now = [0.0]
    rule = {"host": "a.example", "rate_limit_rpm": 2}
    gate = Gate(EgressPolicy.of(rule), clock=lambda: now[0])
    assert gate.connection("a.example", 443).allowed
    now[0] = 30.0
    assert gate.request("a.example", 80, "GET", "/").allowed
    now[0] = 59.0
    denied = gate.connection("a.example", 443)
    assert (denied.allowed, denied.status, denied.wait) == (False, 429, 1)
    assert denied.hint == "try again in 1 s"
    gate.set_policy(EgressPolicy.of("b.example", rule))
    assert not gate.connection("a.example", 443).allowed, "a reload is no way to start anew"
    now[0] = 60.0
    assert gate.connection("a.example", 443).allowed
    assert not gate.connection("a.example", 443).allowed
    assert gate.judge(read_target("a.example", 443)).allowed, "what is under way is not counted"


def test_watchers_are_told_of_changes() -> None:
    gate, calls = Gate(EgressPolicy()), []
    forget = gate.on_changed(lambda: calls.append(gate.policy))
    gate.set_policy(EgressPolicy.of("a.example"))
    forget()
    gate.set_policy(EgressPolicy())
    assert calls == [EgressPolicy.of("a.example")]


AMBIGUOUS = [
    *("/v1/%2e%2e/x", "/v1/%2E/x", "/v1%2fx", "/v1%5cx", "/v1\\x", "/v1//x", "/v1/./x"),
    *("/v1/../x", "/v1/..", "/v1/..;a=b/x", "/v1/%00", "/v1/%zz", "/v1/%u002e", "/v1/%61", "/%"),
    *("/v1/%252e", "/v1/\xe4", "/v1/%7f", "/v1/%0a"),
    *("/v1/%c0%ae%c0%ae/x", "/v1%c0%afx", "/v1/%ff", "/v1%EF%BC%8F..x", "/v1/%E2%80%A5/x"),
]


@pytest.mark.parametrize("path", AMBIGUOUS)
def test_paths_that_two_servers_read_in_two_ways(path: str) -> None:
    """Refused where a rule looks at the host's paths, and passed where none does."""
    policy = EgressPolicy.of({"host": "a.example", "path": "/v1/*"}, "a.example", "b.example")
    assert ambiguous(path)
    decision = Gate(policy).request("a.example", 80, "GET", path)
    assert not decision.allowed
    assert "look at paths" in decision.reason
    assert Gate(policy).request("b.example", 80, "GET", path).allowed


@pytest.mark.parametrize(
    "path", ["/", "/v1/x", "/v1/a%20b", "/v1/%C3%A4", "/a;b/c.d", "/..a", "*", "/%E2%82%AC%3F"]
)
def test_plain_paths(path: str) -> None:
    assert ambiguous(path) is None
