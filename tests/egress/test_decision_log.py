"""What is kept of a gateway's decisions, and what the person reads of it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.audit import AuditLog, egress_event
from sandbox_kernel.gateway.gate import Gate
from sandbox_kernel.gateway.names import read_target
from sandbox_kernel.jupyter.denial_lines import denial_lines
from sandbox_kernel.kernels.decision_log import DecisionLog, Denial, denied_in


def denied(host: str, port: int | None = 443, **more: Any) -> dict[str, Any]:
    reason = f"egress denied: {host} (no rule can permit this name)"
    return egress_event("deny", host=host, port=port, **{"reason": reason, **more})


def test_a_flood_of_denials_is_bounded() -> None:
    """In what is kept, in what is said, and in how often somebody is called."""
    told: list[Denial] = []
    log = DecisionLog(lambda event: None)
    log.on_denied = told.append
    for number in range(1000):
        log(denied(f"h{number}.example", path="/" + "x" * 10**5, reason="y" * 10**5))
        log(denied("again.example"))
    assert len(told) == 60
    assert [one.host for one in told].count("again.example") == 1
    assert len(log.unseen) == 100
    assert len(json.dumps(log.events())) < 300_000
    lines = denial_lines(log.unseen, "kernel-1", "the kernelspec 'x'")
    assert len(lines) == 4
    assert lines[-1].startswith("egress denied: 97 more hosts")
    assert max(map(len, lines)) < 1000


def test_what_was_seen_is_not_told() -> None:
    log = DecisionLog(lambda event: None)
    for host in ("a.example", "b.example"):
        log(denied(host))
    log.seen(["a.example"])
    assert [one.host for one in log.unseen] == ["b.example"]
    assert [one.host for one in log.denied_lately()] == ["a.example", "b.example"]


@pytest.mark.parametrize(
    ("rules", "host", "port", "line"),
    [
        (["a.example"], "b.example", 443, "(no rule allows it). To allow it: `{set} +b.example`"),
        (["!b.example"], "b.example", 22, "(rule 1 denies b.example). To allow it: `{set} +b.ex"),
        (["a.example"], "b.example", 22, "To allow it: `{set} +b.example:22`; for new sandboxes"),
        (["a.example"], "2001:db8::1", 22, "To allow it: `{set} '+[2001:db8::1]:22'`; for new"),
        (["default=allow"], "192.0.2.7", 443, "(it is an address, and no rule for addresses all"),
    ],
)
def test_the_line_names_the_rule_and_the_next_step(
    rules: list[str], host: str, port: int, line: str
) -> None:
    """As the gate has decided it."""
    log, target = DecisionLog(lambda event: None), read_target(host, port)
    decision = Gate(EgressPolicy.read(rules)).connection(target)
    log(denied(host, port, rule=decision.number, reason=decision.denial(target)))
    [said] = denial_lines(log.unseen, "kernel-1", "the kernelspec 'x'")
    assert said.startswith(f"egress denied: {target} (")
    assert line.format(set="sandbox-kernel policy set kernel-1") in said
    assert "egress=[" not in said
    word = said.partition("kernel-1 ")[2].partition("`")[0].strip("'")
    assert EgressPolicy.read([word[1:]]).decide(host, port) == "allow"


def test_what_no_rule_can_allow_has_no_command() -> None:
    log = DecisionLog(lambda event: None)
    log(denied("a.example", reason="egress denied: a.example:443 (the rules have changed)"))
    log(
        denied(
            "b.example", reason="egress denied: b.example:443 (rule 1 allows 5 requests a minute"
        )
    )
    assert not any("To allow it" in line for line in denial_lines(log.unseen, "kernel-1", "x"))


def test_an_audit_of_any_size_is_read_from_its_end(tmp_path: Path) -> None:
    """Only the last minute counts, and lines that are none are left out."""
    path, log = tmp_path / "audit.jsonl", AuditLog(tmp_path / "audit.jsonl")
    assert denied_in(path) == []
    old = datetime.now(timezone.utc) - timedelta(minutes=2)
    log({**denied("old.example"), "time": old.isoformat()})
    for _ in range(2000):
        log(egress_event("allow", host="fine.example", port=443))
    log(denied("a.example"))
    with path.open("ab") as file:
        file.write(b'[]\n{"time": 3}\nnothing\n')
    log(denied("b.example"))
    log(denied("b.example"))
    assert path.stat().st_size > 256 * 1024
    assert [(one.host, one.count) for one in denied_in(path)] == [
        ("a.example", 1),
        ("b.example", 2),
    ]
