"""Policies and requests for tests that try any of them."""

from __future__ import annotations

from hypothesis import strategies as st

from sandbox_kernel.egress import EgressPolicy, EgressRule

HOSTS = ["a.example", "b.a.example", "c.test", "192.0.2.7", "2001:db8::1"]
PATTERNS = [*HOSTS, "*.a.example", "*.example", "*", "192.0.2.0/24", "2001:db8::/32"]
METHODS = ["GET", "POST"]
PATHS = ["/", "/v1/x", "/v2"]


def rules(*, partial: bool) -> st.SearchStrategy[EgressRule]:
    methods = st.lists(st.sampled_from(METHODS), max_size=1).map(tuple)
    return st.builds(
        EgressRule,
        host=st.sampled_from(PATTERNS),
        action=st.sampled_from(["allow", "deny"]),
        ports=st.lists(st.sampled_from([80, 443, 5432]), max_size=2).map(tuple),
        methods=methods if partial else st.just(()),
        path=st.sampled_from(["", "/v1/*"]) if partial else st.just(""),
    )


def policies(*, partial: bool) -> st.SearchStrategy[EgressPolicy]:
    some = st.lists(rules(partial=partial), max_size=5).map(tuple)
    return st.builds(EgressPolicy, some, st.sampled_from(["allow", "deny"]))
