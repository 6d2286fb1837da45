"""What passes a connection whose TLS was ended is what the policy says: for generated rules and
requests, over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_kernel.egress import EgressPolicy, EgressRule
from sandbox_kernel.gateway.decisions import ambiguous

from .secure import H2Client, H2Server, securing

METHODS = ["GET", "POST", "DELETE"]
PATHS = ["/", "/v1/x", "/v1/", "/v2", "/v1/%2e%2e/v2", "/v1//x", "/v1/a%20b", "/v2/v1/x"]

RULES = st.lists(
    st.builds(
        EgressRule,
        host=st.sampled_from(["a.example", "*.example", "*", "b.example"]),
        action=st.sampled_from(["allow", "deny"]),
        methods=st.lists(st.sampled_from(METHODS), max_size=2).map(tuple),
        path=st.sampled_from(["", "/v1/*", "/v2", "/*"]),
    ),
    max_size=4,
)
REQUESTS = st.lists(
    st.tuples(st.sampled_from(METHODS), st.sampled_from(PATHS)), min_size=1, max_size=4
)
FIRST = EgressRule("a.example", methods=("PATCH",))
"""So that there is always something to read."""


def expected(policy: EgressPolicy, method: str, path: str) -> int:
    looks = any(rule.path and rule.concerns("a.example", 1) for rule in policy.rules)
    if looks and ambiguous(path):
        return 403
    return 200 if policy.decide("a.example", 1, method, path) == "allow" else 403


@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
def test_the_policy_decides(protocol: str) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(RULES, st.sampled_from(["allow", "deny"]), REQUESTS)
    def check(rules: list[EgressRule], default: str, requests: list[tuple[str, str]]) -> None:
        policy = EgressPolicy((FIRST, *rules), default)
        with TemporaryDirectory() as folder:
            ask = _over_h2 if protocol == "h2" else _over_http_1
            found = asyncio.run(ask(Path(folder), policy, requests))
        assert found == [expected(policy, *request) for request in requests]

    check()


async def _over_http_1(
    folder: Path, policy: EgressPolicy, requests: list[tuple[str, str]]
) -> list[int]:
    async with securing(folder, *policy.rules, default=policy.default) as at:
        reader, writer = await at.connect("http/1.1")
        found = []
        for method, path in requests:
            writer.write(f"{method} {path} HTTP/1.1\r\nHost: {at.host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
            found.append(int(head.split()[1]))
        writer.transport.abort()
        return found


async def _over_h2(
    folder: Path, policy: EgressPolicy, requests: list[tuple[str, str]]
) -> list[int]:
    server, both = H2Server(), ("h2", "http/1.1")
    rules = policy.rules
    async with securing(
        folder, *rules, default=policy.default, handle=server, protocols=both
    ) as at:
        client = H2Client(*await at.connect("h2"))
        streams = [client.get(path, method=m, authority=at.host) for m, path in requests]
        found = [(await client.response(stream))[0] for stream in streams]
        client._writer.transport.abort()
        passed = [(request[":method"], request[":path"]) for request in server.requests]
        allowed = [r for r, status in zip(requests, found, strict=True) if status == 200]
        assert sorted(passed) == sorted(allowed), "what is denied reaches nobody"
        return found
