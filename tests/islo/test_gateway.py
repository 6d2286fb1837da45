"""Gateway profiles: made before the sandbox, deleted after it, and meaning what was asked for."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sandbox_kernel.egress import EgressPolicy, EgressRule
from sandbox_kernel.errors import SandboxError, SpecError
from sandbox_kernel.sandboxes.capabilities import EgressWay
from sandbox_kernel.sandboxes.islo import IsloClient
from sandbox_kernel.sandboxes.islo.gateway_profiles import Profile, beyond_own_rules
from sandbox_kernel.spec import SandboxSpec

from ..emulators.islo.state import decide
from ..emulators.running import Running
from ..hosted.sandboxes import sandbox
from .sandboxes import account

RULES: list[dict[str, Any]] = [
    {"host_pattern": "api.example", "action": "allow", "rate_limit_rpm": 120, "priority": 3},
    {"host_pattern": "*.data.example", "methods": ["GET"], "path_pattern": "/v1/*"},
    {"host_pattern": "evil.test", "action": "deny"},
]


async def test_nothing_gets_out_unless_it_is_asked_for(
    client: IsloClient, emulator: Running
) -> None:
    """Also without egress rules there is a profile: the account's default one may allow all."""
    async with sandbox(client):
        found = account(emulator)
        (profile,) = found["profiles"]
        assert profile["default_action"] == "deny"
        assert profile["internet_enabled"] is False
        assert profile["rules"] == []
        asked = found["sandboxes"][0]["request"]
        assert asked["gateway_profile"] == profile["id"]
        assert asked["internet_enabled"] is False


async def test_our_rules_become_a_profile(client: IsloClient, emulator: Running) -> None:
    """Host, methods, path and rate limit, in their order."""
    rules = [
        "files.example",
        {
            "host": "*.data.example",
            "methods": ["GET", "HEAD"],
            "path": "/v1/*",
            "rate_limit_rpm": 60,
        },
    ]
    async with sandbox(client, egress=rules):
        (profile,) = account(emulator)["profiles"]
        told = [
            {key: value for key, value in rule.items() if key != "id"} for rule in profile["rules"]
        ]
        nothing = {"path_pattern": None, "methods": None, "rate_limit_rpm": None}
        assert told == [
            {"host_pattern": "files.example", "action": "allow", "priority": 0, **nothing},
            {
                "host_pattern": "*.data.example",
                "action": "allow",
                "priority": 1,
                "path_pattern": "/v1/*",
                "methods": ["GET", "HEAD"],
                "rate_limit_rpm": 60,
            },
        ]


async def test_an_inline_profile_is_made_before_and_deleted_after_its_sandbox(
    client: IsloClient, emulator: Running
) -> None:
    """In Islo's own words, with priorities of the user's."""
    inline = {"default_action": "allow", "internet_enabled": True, "rules": RULES}
    async with sandbox(client, options={"gateway_profile": inline}) as handle:
        found = account(emulator)
        (profile,) = found["profiles"]
        assert (profile["default_action"], profile["internet_enabled"]) == ("allow", True)
        assert [rule["host_pattern"] for rule in profile["rules"]] == [
            rule["host_pattern"] for rule in RULES
        ]
        assert profile["rules"][0]["priority"] == 3
        assert (await handle.info()).detail["gateway_profile"] == profile["id"]
    kinds = [line.split()[0] for line in account(emulator)["order"]]
    assert kinds == ["+profile", "+sandbox", "-sandbox", "-profile"]


async def test_an_existing_profile_is_left_alone(client: IsloClient, emulator: Running) -> None:
    """By name or by id. One that is not there is an error before anything is made."""
    api = client.api()
    made = await api.call(api.profiles.create_gateway_profile, name="the-teams", doing="")
    try:
        for key in ("the-teams", made.id):
            async with sandbox(client, options={"gateway_profile": key}):
                found = account(emulator)
                assert found["sandboxes"][0]["request"]["gateway_profile"] == made.id
                assert len(found["profiles"]) == 1
            assert [p["id"] for p in account(emulator)["profiles"]] == [made.id]
        with pytest.raises(SpecError, match=r"no gateway profile 'another'.*the-teams"):
            await client.create(SandboxSpec(options={"gateway_profile": "another"}))
        assert account(emulator)["sandboxes"] == []
    finally:
        await api.call(api.profiles.delete_gateway_profile, made.id, doing="")


@pytest.mark.parametrize(
    ("match", "kind"),
    [
        *((r"/rules$", kind) for kind in ("drop", "lose", "status")),
        *((r"GET /gateway/profiles/", kind) for kind in ("drop", "status")),
        *((r"POST /sandboxes$", kind) for kind in ("drop", "status")),
    ],
)
async def test_gateway_profile_partial_failure(
    client: IsloClient, emulator: Running, match: str, kind: str
) -> None:
    """Whatever fails on the way, and however: no sandbox without its rules, and nothing left."""
    emulator.fault(match, kind, status=422, times=20)
    with pytest.raises(SandboxError):
        await client.create(
            SandboxSpec.from_mapping({"name": "failing", "egress": ["a.example", "b.example"]})
        )
    emulator.clear()
    found = account(emulator)
    assert found["sandboxes"] == []
    assert found["profiles"] == []
    assert await client.list() == []


async def test_a_profile_whose_creation_got_no_answer_is_found_again(
    client: IsloClient, emulator: Running
) -> None:
    emulator.fault("POST /gateway/profiles$", "lose")
    async with sandbox(client, egress=["a.example"]):
        (profile,) = account(emulator)["profiles"]
        assert len(profile["rules"]) == 1


@pytest.mark.parametrize(
    ("egress", "what"),
    [
        (["a.example:8443"], r"egress\[0\]\.ports=\[8443\]"),
        (["192.0.2.0/24"], r"egress\[0\]\.host='192.0.2.0/24'.*names of hosts"),
        (["!private.a.example", "*.a.example"], r"egress\[1\]\.action='allow' beside egress\[0\]"),
        (["a.example", {"host": "*", "rate_limit_rpm": 5}], r"egress\[1\].*which of two rules"),
    ],
)
def test_egress_beyond_a_profile_goes_through_the_gateway(egress: Any, what: str) -> None:
    """The sandbox's profile then lets nothing out, and it is said why."""
    spec = SandboxSpec.from_mapping({"egress": egress})
    assert IsloClient.capabilities.egress_way(spec.egress) is EgressWay.GATEWAY
    assert re.match(what, beyond_own_rules(spec.egress) or "")
    assert IsloClient().plan(spec).profile == Profile()


async def test_rules_and_a_profile_together_are_refused(client: IsloClient) -> None:
    with pytest.raises(SpecError, match="Give one of them"):
        await client.create(
            SandboxSpec.from_mapping(
                {"egress": ["a.example"], "options": {"gateway_profile": "the-teams"}}
            )
        )


_hosts = ["a.example", "b.a.example", "c.b.a.example", "c.test"]
_rules = st.builds(
    EgressRule,
    host=st.sampled_from([*_hosts, "*.a.example", "*.b.a.example", "*"]),
    action=st.sampled_from(["allow", "deny"]),
    methods=st.sampled_from([(), ("GET",), ("GET", "POST")]),
    path=st.sampled_from(["", "/", "/v1/*", "/v1/x", "/v2/*"]),
)


@given(
    st.lists(_rules, max_size=4),
    st.sampled_from(["allow", "deny"]),
    st.sampled_from(_hosts),
    st.sampled_from(["GET", "POST"]),
    st.sampled_from(["/", "/v1/x", "/v1/y/z", "/v2/x"]),
)
def test_a_translated_policy_means_the_same(
    rules: list[EgressRule], default: str, host: str, method: str, path: str
) -> None:
    """For every request, and whichever end of the priorities Islo begins with."""
    policy = EgressPolicy(tuple(rules), default)
    assume(beyond_own_rules(policy) is None)  # Hypothesis complains if that is so for few
    profile = asdict(Profile.of(policy))
    for low_first in (True, False):
        assert decide(profile, host, method, path, low_first=low_first) == policy.decide(
            host, 443, method, path
        )
