"""Which addresses are dialled, whatever the name said."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.egress import EgressPolicy, EgressRule
from sandbox_kernel.gateway.addresses import (
    Dialler,
    SystemResolver,
    is_own_address,
    kind_of,
    may_dial,
)
from sandbox_kernel.gateway.decisions import judge_connection
from sandbox_kernel.gateway.names import Address, Target, read_target
from sandbox_kernel.gateway.refusals import Refusal

from .origins import origin

NAME = Target("a.example", 443)
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101", "2002:101:101::1"]


def nobody(address: Address) -> bool:
    return False


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.0.9", "loopback"),
        ("::1", "loopback"),
        ("10.1.2.3", "private"),
        ("172.31.0.1", "private"),
        ("192.168.1.1", "private"),
        ("fd12::1", "private"),
        ("169.254.1.1", "link-local"),
        ("fe80::1", "link-local"),
        ("169.254.169.254", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("100.100.100.200", "metadata"),
        ("168.63.129.16", "metadata"),
        ("100.64.0.1", "shared"),
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("::", "unspecified"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("255.255.255.255", "broadcast"),
        ("240.0.0.1", "reserved"),
        ("198.18.0.1", "benchmarking"),
        ("192.0.2.1", "documentation"),
        ("2001:db8::1", "documentation"),
        ("192.0.0.8", "reserved"),
        ("4000::1", "reserved"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::127.0.0.1", "loopback"),
        ("::ffff:0:10.0.0.1", "private"),
        ("64:ff9b::10.0.0.1", "private"),
        ("64:ff9b::169.254.169.254", "metadata"),
        ("64:ff9b:1::1.1.1.1", "private"),
        ("2002:7f00:1::1", "loopback"),
        ("2002:a00:1::", "private"),
        ("2001:0:a00:1::", "private"),
        ("2001:0:101:101:0:0:80ff:fffe", "loopback"),
        ("2606:4700::5efe:7f00:1", "loopback"),
    ],
)
def test_kinds_that_are_not_for_sandboxes(text: str, kind: str) -> None:
    assert kind_of(ipaddress.ip_address(text), nobody) == kind


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_pass(text: str) -> None:
    assert kind_of(ipaddress.ip_address(text), nobody) is None
    assert may_dial(ipaddress.ip_address(text), NAME, EgressRule("*"), (), nobody) is None


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_alike_inside_ipv6(address: ipaddress.IPv4Address) -> None:
    kind = kind_of(address, nobody)
    mapped = ipaddress.ip_address(f"::ffff:{address}")
    assert kind_of(mapped, nobody) == kind
    nat64 = ipaddress.ip_address(int(ipaddress.ip_address("64:ff9b::")) + int(address))
    assert kind_of(nat64, nobody) == kind
    if address.is_private or address.is_multicast or address.is_loopback:
        assert kind is not None


def test_the_hosts_own_addresses_are_found() -> None:
    """By what the kernel lets a socket be bound to."""
    assert is_own_address(ipaddress.ip_address("127.0.0.1"))
    assert not is_own_address(ipaddress.ip_address("1.1.1.1"))
    own = ipaddress.ip_address("1.1.1.1")
    assert kind_of(own, own.__eq__) == "this machine's own"
    for trusted, passes in (((), False), (("a.example",), False), (("a.example:443",), True)):
        assert (may_dial(own, NAME, None, trusted, own.__eq__) is None) == passes


@pytest.mark.parametrize(
    ("rule", "address", "passes"),
    [
        ("10.0.0.0/8", "10.1.1.1", True),
        ("10.1.1.1", "10.1.1.1", True),
        ("10.1.1.1", "10.1.1.2", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0/0", "127.0.0.1", False),
        ("0.0.0.0/0", "10.1.1.1", False),
        ("0.0.0.0/0", "1.1.1.1", True),
        ("::/0", "::1", False),
        ("169.254.0.0/16", "169.254.1.1", True),
        ("169.254.0.0/16", "169.254.169.254", False),
        ("169.254.169.254", "169.254.169.254", True),
        ("*", "10.1.1.1", False),
        ("a.example", "10.1.1.1", False),
        ("fd00::/8", "fd00::1", True),
        ("fd00::/8", "fd00:ec2::254", False),
    ],
)
def test_a_rule_opens_only_what_it_names(rule: str, address: str, passes: bool) -> None:
    target = read_target(address, 443) if rule != "a.example" else NAME
    found = may_dial(ipaddress.ip_address(address), target, EgressRule(rule), (), nobody)
    assert (found is None) == passes


@pytest.mark.parametrize(
    ("trusted", "address", "passes"),
    [
        ("a.example", "10.1.1.1", True),
        ("a.example", "fd12::1", True),
        ("a.example", "100.64.1.1", True),
        ("a.example", "127.0.0.1", False),
        ("a.example", "169.254.169.254", False),
        ("a.example", "fe80::1", False),
        ("a.example:443", "127.0.0.1", True),
        ("a.example:80", "127.0.0.1", False),
        ("a.example:443", "169.254.169.254", False),
        ("b.example", "10.1.1.1", False),
    ],
)
def test_names_that_the_owner_trusts(trusted: str, address: str, passes: bool) -> None:
    found = may_dial(ipaddress.ip_address(address), NAME, EgressRule("*"), [trusted], nobody)
    assert (found is None) == passes


def dialler(*answers: Sequence[str], trusted: Sequence[str] = (), **options: float) -> Dialler:
    left = list(answers)

    async def resolve(name: str, port: int) -> Sequence[Address]:
        return [ipaddress.ip_address(text) for text in left.pop(0)]

    return Dialler(resolve=resolve, private_names=trusted, is_own=nobody, **options)


async def test_a_name_is_resolved_once_and_what_was_checked_is_dialled() -> None:
    """Rebinding: a second answer would be another address, but nobody asks for it."""
    async with origin() as served:
        target = Target("a.example", served.port)
        once = dialler(["127.0.0.1"], trusted=[str(target)])
        _, writer, address = await once.dial(target, None)
        assert str(address) == "127.0.0.1"
        assert writer.get_extra_info("peername")[0] == "127.0.0.1"
        writer.close()


async def test_forbidden_addresses_are_left_out() -> None:
    target = Target("a.example", 443)
    found = await dialler(["127.0.0.1", "1.1.1.1"]).checked_addresses(target, None)
    assert [str(address) for address in found] == ["1.1.1.1"]
    with pytest.raises(Refusal, match="a metadata address") as caught:
        await dialler(["169.254.169.254"]).dial(target, EgressRule("*"))
    assert caught.value.status == 403


async def test_the_next_address_is_tried() -> None:
    async with origin() as served:
        target = Target("a.example", served.port)
        both = dialler(["127.0.0.2", "127.0.0.1"], trusted=[str(target)])
        _, writer, _ = await both.dial(target, None)
        writer.close()
    with pytest.raises(Refusal, match="cannot be reached") as caught:
        await dialler(["127.0.0.1"], trusted=[str(target)]).dial(target, None)
    assert caught.value.status == 502


async def test_behind_a_proxy_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway dials itself: of a proxy's connections it could check no address."""
    target = Target("a.example", 1)
    monkeypatch.setenv("HTTPS_PROXY", "http://user:word@proxy.example:3128")
    why = "cannot be reached: .*the gateway does not use this machine's HTTPS_PROXY"
    with pytest.raises(Refusal, match=why) as caught:
        await dialler(["127.0.0.1"], trusted=[str(target)]).dial(target, None)
    assert "proxy.example" not in str(caught.value)


async def test_dns_that_fails_or_does_not_answer() -> None:
    async def fails(name: str, port: int) -> Sequence[Address]:
        raise OSError(-2, "Name or service not known")

    async def waits(name: str, port: int) -> Sequence[Address]:
        await asyncio.Event().wait()
        raise AssertionError

    for resolve, status in ((fails, 502), (waits, 504)):
        with pytest.raises(Refusal) as caught:
            await Dialler(resolve=resolve, resolve_timeout=0.05).dial(NAME, None)
        assert caught.value.status == status
    with pytest.raises(Refusal, match="no address"):
        await dialler([]).dial(NAME, None)


async def test_rules_within_others_open_no_address() -> None:
    """A notebook may name a private network; all sets of rules must, or it stays closed."""
    private = Target("10.1.2.3", 80, ipaddress.ip_address("10.1.2.3"))
    own, wide = EgressRule("10.0.0.0/8"), EgressRule("0.0.0.0/0")
    inside = EgressPolicy.of(own, within=EgressPolicy.of(wide))
    decision = judge_connection(inside, private)
    assert decision.allowed
    with pytest.raises(Refusal, match="private"):
        await dialler([]).checked_addresses(private, decision.rule, *decision.outer)
    named = judge_connection(replace(inside, within=EgressPolicy.of(own)), private)
    found = await dialler([]).checked_addresses(private, named.rule, *named.outer)
    assert found == [private.address]


async def test_the_systems_resolver() -> None:
    assert ipaddress.ip_address("127.0.0.1") in await SystemResolver()("localhost", 80)


async def test_a_rule_that_denies_addresses_holds_for_names() -> None:
    """Where it comes before the rule that allows the name; IPv4 inside IPv6 included."""
    found = {
        "in.example": ["1.2.3.4"],
        "mapped.example": ["::ffff:1.2.3.4"],
        "both.example": ["1.2.3.4", "1.1.1.1"],
    }

    async def resolve(name: str, port: int) -> Sequence[Address]:
        return [ipaddress.ip_address(text) for text in found[name]]

    async def dialled(name: str, *rules: str, default: str = "allow", port: int = 443) -> list[str]:
        target = read_target(name, port)
        policy = EgressPolicy.of(*rules, default=default, within=EgressPolicy.of("*"))
        decision = judge_connection(policy, target)
        assert decision.allowed
        dialler = Dialler(resolve=resolve, is_own=nobody)
        rule, outer = decision.rule, decision.outer
        addresses = await dialler.checked_addresses(target, rule, *outer, not_at=decision.not_at)
        return [str(address) for address in addresses]

    for name in ("in.example", "mapped.example"):
        for rules in (("!1.2.3.0/24",), ("!1.2.3.4", "*"), ("x.example", "!1.2.3.4", name)):
            with pytest.raises(Refusal, match=r"has the address .*, and a rule denies 1\.2\.3"):
                await dialled(name, *rules)
    assert await dialled("both.example", "!1.2.3.4") == ["1.1.1.1"]
    assert await dialled("in.example", "in.example", "!1.2.3.4") == ["1.2.3.4"]
    assert await dialled("in.example", "!1.2.3.4:80") == ["1.2.3.4"]
