"""How secrets are declared: by name, source and host, and never by value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecError
from sandbox_kernel.secret_declarations import SecretDeclaration, read_secrets, unreachable
from sandbox_kernel.spec import SandboxSpec

FULL = {
    "name": "KEY",
    "from": "command:pass show 'my key'",
    "hosts": ["api.example", "*.data.example:8443"],
    "in": ["header", "query"],
    "insecure": True,
}


@pytest.mark.parametrize(
    ("given", "source", "hosts"),
    [
        ("KEY@api.example", "env:KEY", ("api.example",)),
        ("KEY=env:OTHER@api.example:8443", "env:OTHER", ("api.example:8443",)),
        ("KEY=file:/run/key@*.api.example", "file:/run/key", ("*.api.example",)),
        ("KEY=keyring:service/user@api.example", "keyring:service/user", ("api.example",)),
        ('{"name": "KEY", "hosts": "api.example"}', "env:KEY", ("api.example",)),
        (["KEY@api.example"], "env:KEY", ("api.example",)),
        (
            {"name": "KEY", "from": ["pass", "x"], "hosts": ["a.example"]},
            ("pass", "x"),
            ("a.example",),
        ),
        ("KEY", "", ()),
        ("KEY=stored-elsewhere", "stored-elsewhere", ()),
    ],
)
def test_forms(given: Any, source: object, hosts: tuple[str, ...]) -> None:
    """Words, JSON text and objects mean the same, and are written as the shortest of them."""
    [one] = read_secrets(given)
    assert (one.name, one.source, one.hosts) == ("KEY", source, hosts)
    assert read_secrets([one.to_json()]) == (one,)
    assert read_secrets(json.dumps([one.to_json()])) == (one,)
    spec = SandboxSpec(secrets=given)
    assert SandboxSpec.from_mapping(json.loads(json.dumps(spec.to_dict()))) == spec


def test_the_whole_form() -> None:
    [one] = read_secrets(FULL)
    assert one.to_json() == FULL
    assert one.is_bound_to("api.example", 443)
    assert one.is_bound_to("api.example", 80)
    assert one.is_bound_to("x.data.example", 8443)
    for host, port in (("api.example", 8443), ("data.example", 8443), ("x.api.example", 443)):
        assert not one.is_bound_to(host, port)
    assert not read_secrets("KEY@api.example")[0].is_bound_to("api.example", 80)


VALUE = "sk-live-0123456789abcdef"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (f"KEY={VALUE}", "hosts of the secret 'KEY' is missing"),
        (f"KEY={VALUE}@api.example", "from of the secret 'KEY' says where the value is"),
        ({"name": "KEY", "from": VALUE, "hosts": ["a.example"]}, "The value itself is never given"),
        ({"name": "KEY", "value": VALUE, "hosts": ["a.example"]}, "a key that is unknown"),
        ({"name": VALUE, "hosts": ["a.example"]}, "a name is an environment variable's"),
        ({"hosts": ["a.example"]}, "a name is an environment variable's"),
        ({"name": "KEY", "from": "file:relative", "hosts": ["a.example"]}, "from of the secret"),
        ({"name": "KEY", "from": "vault:x", "hosts": ["a.example"]}, "from of the secret"),
        ({"name": "KEY", "from": "env:X"}, "hosts of the secret 'KEY' is missing"),
        ({"name": "KEY", "hosts": ["https://a.example"]}, "not HOST"),
        ({"name": "KEY", "hosts": ["*"]}, "takes names"),
        ({"name": "KEY", "hosts": ["192.0.2.1"]}, "takes names"),
        ({"name": "KEY", "hosts": ["@pip"]}, "takes names"),
        ({"name": "KEY", "hosts": ["!a.example"]}, "takes names"),
        ({"name": "KEY", "hosts": ["a.example"], "in": ["trailer"]}, "in of the secret 'KEY'"),
        ({"name": "KEY", "hosts": ["a.example"], "in": []}, "in of the secret 'KEY'"),
        ({"name": "KEY", "hosts": ["a.example"], "expose": True}, "leave hosts out"),
        ({"name": "KEY", "hosts": ["a.example"], "insecure": "yes"}, "insecure of the secret"),
        ({"name": "KEY", "hosts": ["a.example"], "sigv4": "OTHER"}, "names no other secret"),
        ({"name": "KEY", "hosts": ["a.example"], "sigv4": "ID", "in": ["body"]}, "never sent"),
        (["KEY@a.example", "KEY@b.example"], "twice"),
        ([f"K{n}@a.example" for n in range(33)], "the limit is 32"),
        ("[nonsense", "not valid JSON"),
        ([VALUE], "NAME@HOST"),
        (7, "takes a list"),
    ],
)
def test_mistakes(given: Any, why: str) -> None:
    """Each names the field, and repeats nothing that could be a value."""
    with pytest.raises(SpecError, match=f"^the spec: secrets.*{why}") as raised:
        SandboxSpec.from_mapping({"secrets": given})
    assert VALUE not in str(raised.value)


@pytest.mark.parametrize(
    ("rules", "host", "reachable"),
    [
        (["api.example"], "api.example", True),
        (["*.example"], "api.example", True),
        (["api.example:443"], "api.example", True),
        (["api.example:8443"], "api.example", False),
        (["!api.example", "*"], "api.example", False),
        (["other.example"], "api.example", False),
        (["x.api.example"], "*.api.example", True),
        (["*.example"], "*.api.example", True),
        (["*.x.api.example"], "*.api.example", True),
        (["api.example"], "*.api.example", False),
        (["!*.api.example", "*"], "*.api.example", False),
        (["default=allow"], "api.example", True),
        (["@pip"], "index.example", True),
        ([], "api.example", False),
    ],
)
def test_a_secret_opens_no_way_out(rules: list[str], host: str, reachable: bool) -> None:
    """A host that no rule can permit is a mistake. (Presets are known on the host only.)"""
    secrets = [SecretDeclaration("KEY", hosts=(host,))]
    policy = EgressPolicy.read(rules)
    assert (unreachable(secrets, policy) is None) == reachable
    narrowed = EgressPolicy.of("elsewhere.example", within=policy)
    assert (unreachable(secrets, narrowed) is None) == reachable, "a notebook may leave it out"
