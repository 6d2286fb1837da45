"""Egress rules: how they are written, what they mean, and who refuses them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.cli.options import given_settings
from sandbox_kernel.cli.parser import parse
from sandbox_kernel.egress import PARTS, EgressPolicy, EgressRule
from sandbox_kernel.errors import SpecError, SpecRefused
from sandbox_kernel.sandboxes.capabilities import Capabilities, EgressWay
from sandbox_kernel.settings import settings_of, values_from_environment
from sandbox_kernel.spec import SandboxSpec

FULL = {
    "host": "*.data.example",
    "action": "allow",
    "ports": [443, 8443],
    "methods": ["get", "HEAD"],
    "path": "/v1/*",
    "rate_limit_rpm": 60,
}


def test_nothing_given_is_deny_all() -> None:
    """A sandbox without egress rules reaches nobody."""
    assert not SandboxSpec().egress
    assert EgressPolicy().decide("data.example", 443) == "deny"
    assert not EgressPolicy.of("!data.example"), "denying more does not open anything"


def test_a_plain_host_is_short_for_allow_that_host() -> None:
    policy = EgressPolicy.read(["Data.Example."])
    assert policy.rules == (EgressRule("data.example"),)
    assert policy.decide("DATA.example.", 443, "POST", "/any") == "allow"
    assert policy.decide("www.data.example", 443) == "deny"
    assert policy.decide("data.example.evil.test", 443) == "deny"


def test_a_rule_has_all_that_a_gateway_looks_at() -> None:
    policy = EgressPolicy.read([FULL])
    assert policy.decide("a.b.data.example", 8443, "get", "/v1/x/y") == "allow"
    for request in (
        ("data.example", 443, "GET", "/v1/x"),
        ("a.data.example", 80, "GET", "/v1/x"),
        ("a.data.example", 443, "POST", "/v1/x"),
        ("a.data.example", 443, "GET", "/v2/x"),
    ):
        assert policy.decide(*request) == "deny"


def test_the_first_match_decides() -> None:
    policy = EgressPolicy.of("!private.data.example", "*.data.example", default="deny")
    assert policy.decide("private.data.example", 443) == "deny"
    assert policy.decide("public.data.example", 443) == "allow"
    open_policy = EgressPolicy.of("!*.evil.test", default="allow")
    assert open_policy.decide("www.evil.test", 443) == "deny"
    assert open_policy.decide("else.example", 443) == "allow"


def test_addresses_and_networks_match_addresses_only() -> None:
    policy = EgressPolicy.of("192.0.2.0/24", "[2001:db8::1]:443", "*.example")
    assert policy.decide("192.0.2.7", 22) == "allow"
    assert policy.decide("192.0.3.7", 22) == "deny"
    assert policy.decide("2001:db8::1", 443) == "allow"
    assert policy.decide("2001:db8::1", 80) == "deny"
    assert EgressRule("192.0.2.7/32").host == "192.0.2.7"


@pytest.mark.parametrize(
    "written",
    [
        "a.example, b.example:8443 !c.example default=allow",
        ["a.example", "b.example:8443", "!c.example", "default=allow"],
        {
            "default": "allow",
            "rules": [
                "a.example",
                {"host": "b.example", "ports": 8443},
                {"host": "c.example", "action": "deny"},
            ],
        },
        '{"default": "allow", "rules": ["a.example", "b.example:8443", "!c.example"]}',
        ["a.example", '{"host": "b.example", "ports": [8443]}', "!c.example", "default=allow"],
    ],
)
def test_one_policy_can_be_written_in_many_ways(written: object) -> None:
    """Words, lists, objects and JSON text mean the same."""
    expected = EgressPolicy(
        (
            EgressRule("a.example"),
            EgressRule("b.example", ports=(8443,)),
            EgressRule("c.example", action="deny"),
        ),
        "allow",
    )
    assert EgressPolicy.read(written) == expected


def test_environment_and_command_line_take_rules() -> None:
    """The two places where everything is text."""
    variables = {"SANDBOX_KERNEL_EGRESS": json.dumps([FULL, "b.example"])}
    spec = SandboxSpec(**values_from_environment(settings_of(SandboxSpec), variables))
    assert spec.egress == EgressPolicy.of(FULL, "b.example")
    arguments = parse(["install", "local", "--egress", json.dumps(FULL), "--egress", "b.example"])
    assert SandboxSpec.from_mapping(given_settings(arguments)).egress == spec.egress


def test_records_keep_the_policy() -> None:
    """What is stored is plain JSON, short where it can be, and is read back as it was."""
    spec = SandboxSpec(name="a", egress=["b.example", FULL])  # type: ignore[arg-type]
    stored = json.loads(json.dumps(spec.to_dict()))
    assert stored["egress"][0] == "b.example"
    assert SandboxSpec.from_mapping(stored) == spec
    open_spec = SandboxSpec(name="a", egress=EgressPolicy(default="allow"))
    assert SandboxSpec.from_mapping(open_spec.to_dict()) == open_spec


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (5, "egress takes a list of hosts and rules"),
        ([5], "5 is neither"),
        (["https://data.example/"], "not a host"),
        (["data example"], "not a host"),
        (["data.example/path"], "no scheme, no path"),
        (["a.*.example"], "not a host"),
        (["*example"], "not a host"),
        (["300.1.1.1"], "not a host"),
        (["192.0.2.1/24"], "not a host"),
        (["täst.example"], "in ASCII"),
        ([""], "not a host"),
        (["x" * 64 + ".example"], "not a host"),
        (["@pipp"], "no preset '@pipp'. Did you mean '@pip'"),
        (["@zzzz"], "no preset '@zzzz'. Known: @pip"),
        (["a.example:0"], "ports of the rule for 'a.example' are whole numbers"),
        ([{"host": "a.example", "port": 1}], "unknown key 'port'. Did you mean 'ports'"),
        ([{"zzz": 1, "host": "a"}], "unknown key 'zzz'. Known: host"),
        ([{"action": "allow"}], "needs a host"),
        ([{"host": 5}], "a host is a string"),
        ([{"host": "a", "action": "maybe"}], "action of the rule for 'a' is 'allow' or 'deny'"),
        ([{"host": "a", "ports": ["443"]}], "ports of"),
        ([{"host": "a", "ports": [True]}], "ports of"),
        ([{"host": "a", "methods": [1]}], "methods of"),
        ([{"host": "a", "methods": ["G T"]}], "methods of"),
        ([{"host": "a", "path": "v1"}], "path of"),
        ([{"host": "a", "path": "/a b"}], "path of"),
        ([{"host": "a", "rate_limit_rpm": 0}], "rate_limit_rpm of"),
        ([{"host": "a", "rate_limit_rpm": 1.5}], "rate_limit_rpm of"),
        ([{"host": "a", "action": "deny", "rate_limit_rpm": 1}], "is for rules that allow"),
        ({"default": "maybe"}, "default is 'allow' or 'deny'"),
        ({"rules": "a.example"}, "the keys default and rules"),
        ({"default": "deny", "rule": []}, "the keys default and rules"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not a host"),
        ('["' + "[" * 100_000, "not valid JSON"),
        ('{"within":' * 100_000, "not valid JSON"),
        (["a.example"] * 300, "the limit is 256"),
    ],
)
def test_nonsense_is_refused_when_it_is_read(written: Any, message: str) -> None:
    """The error names what is wrong and where it was read."""
    with pytest.raises(SpecError, match=message) as caught:
        SandboxSpec.from_mapping({"egress": written}, where="the test")
    assert "the test" in str(caught.value)
    assert len(str(caught.value)) < 2000


_EVERY_PART: dict[str, tuple[object, str]] = {
    "preset": ("@pip", r"egress\[1\]\.host='@pip'"),
    "wildcard": ("*.data.example", r"egress\[1\]\.host='\*\.data\.example'"),
    "address": ("192.0.2.0/24", r"egress\[1\]\.host='192\.0\.2\.0/24'"),
    "ports": ("data.example:8443", r"egress\[1\]\.ports=\[8443\]"),
    "methods": ({"host": "a.example", "methods": ["GET"]}, r"egress\[1\]\.methods=\['GET'\]"),
    "path": ({"host": "a.example", "path": "/v1/*"}, r"egress\[1\]\.path='/v1/\*'"),
    "rate_limit_rpm": (
        {"host": "a.example", "rate_limit_rpm": 6},
        r"egress\[1\]\.rate_limit_rpm=6",
    ),
    "deny": ("!a.example", r"egress\[1\]\.action='deny'"),
    "default": ("default=allow", r"egress\.default='allow'"),
    "within": (
        {"rules": ["data.example"], "within": ["*.example"]},
        r"egress\.within=\['\*\.example'\]",
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_backend_cannot_enforce_is_refused_by_the_rules_field(part: str) -> None:
    """A backend that enforces every other part refuses the one that it lacks, by name."""
    item, named = _EVERY_PART[part]
    egress = item if part == "within" else ["plain.example", item]
    spec = SandboxSpec(egress=egress)  # type: ignore[arg-type]
    full = Capabilities(egress=True, egress_parts=frozenset(PARTS))
    full.check(spec, "able")
    lacking = Capabilities(
        egress=True,
        egress_parts=frozenset(PARTS) - {part},
        notes={"egress.ports": "Use another port."},
    )
    with pytest.raises(SpecRefused, match=rf"'unable' cannot enforce {named}") as caught:
        lacking.check(spec, "unable")
    assert ("Use another port." in str(caught.value)) == (part == "ports")


def _no_ports(policy: EgressPolicy) -> str | None:
    return policy.unenforceable(set(PARTS) - {"ports"})


@pytest.mark.parametrize(
    ("capabilities", "rules", "way"),
    [
        (Capabilities("egress", "gateway"), [], EgressWay.CLOSED),
        (Capabilities("egress", "gateway"), ["!a.example"], EgressWay.CLOSED),
        (Capabilities("egress"), ["a.example"], EgressWay.BACKEND),
        (Capabilities("egress", "gateway"), ["a.example"], EgressWay.GATEWAY),
        (
            Capabilities("egress", "gateway", beyond_own_rules=_no_ports),
            ["a.example"],
            EgressWay.BACKEND,
        ),
        (
            Capabilities("egress", "gateway", beyond_own_rules=_no_ports),
            ["a.example", "a.example:8443"],
            EgressWay.GATEWAY,
        ),
    ],
)
def test_all_rules_take_one_way(
    capabilities: Capabilities, rules: list[str], way: EgressWay
) -> None:
    """The backend's own rules, if they hold every one exactly; else the gateway."""
    assert capabilities.egress_way(EgressPolicy.of(*rules)) is way


def test_what_neither_own_rules_nor_the_gateway_hold_is_refused() -> None:
    """With the reason of each. What own rules hold, the gateway need not."""
    both = Capabilities("egress", "gateway", beyond_own_rules=_no_ports)
    rule = {"host": "a.example", "methods": ["GET"]}
    both.check(SandboxSpec(egress=[rule]), "able")  # type: ignore[arg-type]
    spec = SandboxSpec(egress=[{**rule, "ports": [8443]}])  # type: ignore[arg-type]
    why = r"egress\[0\]\.ports=\[8443\].*own rules cannot hold egress\[0\]\.ports"
    with pytest.raises(SpecRefused, match=why):
        both.check(spec, "able")


def test_a_backend_without_network_takes_a_policy_that_lets_nothing_out() -> None:
    """Only what would have to be let through needs enforcing."""
    Capabilities().check(SandboxSpec(egress=["!a.example"]), "closed")  # type: ignore[arg-type]
    with pytest.raises(SpecRefused, match=r"egress=\['a.example'\]"):
        Capabilities().check(SandboxSpec(egress=["a.example"]), "closed")  # type: ignore[arg-type]


def test_a_preset_keeps_its_place_and_matches_nothing_by_itself() -> None:
    """Only the gateway knows which hosts it stands for."""
    policy = EgressPolicy.read("!a.example, @pip, b.example")
    assert policy.rules[1] == EgressRule("@pip")
    assert policy.to_json()[1] == "@pip"  # type: ignore[index]
    assert EgressPolicy.of("@pip").decide("@pip", 443) == "deny"
    assert EgressPolicy.of("@pip"), "something may pass, so a network is needed"


_names = st.sampled_from(
    ["a.example", "b.a.example", "c.test", "*.a.example", "*", "192.0.2.0/24", "@pip"]
)
rules = st.builds(
    EgressRule,
    host=_names,
    action=st.just("allow"),
    ports=st.lists(st.integers(1, 65535), max_size=2).map(tuple),
    methods=st.lists(st.sampled_from(["GET", "POST"]), max_size=2).map(tuple),
    path=st.sampled_from(["", "/", "/v1/*"]),
    rate_limit_rpm=st.none() | st.integers(1, 100),
) | st.builds(EgressRule, host=_names, action=st.just("deny"))
policies = st.builds(
    EgressPolicy, st.lists(rules, max_size=4).map(tuple), st.sampled_from(["allow", "deny"])
)


@given(policies)
def test_any_policy_survives_being_written_and_read(policy: EgressPolicy) -> None:
    assert EgressPolicy.read(json.loads(json.dumps(policy.to_json()))) == policy


@given(st.text("/ab*", max_size=12), st.text("/ab\n", max_size=12))
def test_a_star_stands_for_any_characters(pattern: str, path: str) -> None:
    rule = EgressRule("a.example", path=f"/{pattern}")
    glob = ".*".join(map(re.escape, rule.path.split("*")))
    fits = re.fullmatch(glob, f"/{path}", re.DOTALL) is not None
    assert rule.matches("a.example", 443, "GET", f"/{path}") == fits


def test_a_long_path_is_decided_as_fast_as_a_short_one() -> None:
    """With stars in the rule, too: whoever asks could keep the gateway busy for hours."""
    rule = EgressRule("a.example", path="/a/*/b/*/b/*/b/*/b/*/c")
    assert not rule.matches("a.example", 443, "GET", "/a/" + "/b/" * 20_000)
    assert rule.matches("a.example", 443, "GET", "/a/" + "/b/" * 20_000 + "/c")
