"""A notebook's own metadata narrows what its kernel grants, and never widens it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway.gate import Gate
from sandbox_kernel.jupyter import notebook_settings
from sandbox_kernel.jupyter.configuration import read_configuration
from sandbox_kernel.jupyter.notebook_settings import with_notebook_settings
from sandbox_kernel.spec import KernelConfiguration
from tests.gateway.generated_policies import HOSTS, METHODS, PATHS, policies


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return tmp_path / "n.ipynb"


def write(notebook: Path, asked: Any) -> str:
    notebook.write_text(json.dumps({"cells": [], "metadata": {"sandbox_kernel": asked}}))
    return str(notebook)


def kernel(**config: Any) -> KernelConfiguration:
    return read_configuration(config, default_name="k", environ={})


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policies(partial=True),
    policies(partial=True),
    st.sampled_from(HOSTS),
    st.sampled_from([80, 443, 5432]),
    st.sampled_from(METHODS),
    st.sampled_from(PATHS),
)
def test_a_request_passes_only_if_both_allow_it(
    tmp_path: Path,
    granted: EgressPolicy,
    asked: EgressPolicy,
    host: str,
    port: int,
    method: str,
    path: str,
) -> None:
    """For any rules of the kernel and of the notebook. The gate holds it, too."""
    name = write(tmp_path / "n.ipynb", {"egress": asked.to_json()})
    found, _ = with_notebook_settings(kernel(egress=granted.to_json()), name)
    request = (host, port, method, path)
    both = {granted.decide(*request), asked.decide(*request)} == {"allow"}
    assert (found.spec.egress.decide(*request) == "allow") == both
    gate = Gate(found.spec.egress).request(*request)
    if gate.allowed:
        assert both
        assert Gate(granted).request(*request).allowed
    if Gate(found.spec.egress).connection(host, port).allowed:
        assert Gate(granted).connection(host, port).allowed


def test_limits_of_both_are_counted() -> None:
    """A rate limit of the kernel is not stretched by the notebook's rules, nor doubled by them."""
    limited = {"host": "a.example", "rate_limit_rpm": 2}
    for inner in ([limited], ["default=allow"], ["a.example:443", "a.example:80"]):
        policy = EgressPolicy.of(
            *EgressPolicy.read(inner).rules,
            default=EgressPolicy.read(inner).default,
            within=EgressPolicy.read([limited]),
        )
        gate = Gate(policy, clock=lambda: 0.0)
        found = [gate.connection("a.example", port).action for port in (443, 80, 443)]
        assert found == ["allow", "allow", "deny"]


def test_less_of_everything(notebook: Path) -> None:
    asked = {"memory_mib": 256, "cpus": 1, "processes": 50, "disk_mib": 100, "files": "none"}
    name = write(notebook, {**asked, "egress": ["a.example"]})
    granted = kernel(memory_mib=512, files="mount-ro", egress=["a.example", "b.example"])
    found, notices = with_notebook_settings(granted, name)
    assert notices == []
    assert found.spec.egress.to_json() == {
        "default": "deny",
        "rules": ["a.example"],
        "within": ["a.example", "b.example"],
    }
    spec = found.spec
    assert (spec.memory_mib, spec.cpus, spec.processes, spec.disk_mib) == (256, 1, 50, 100)
    assert (found.files, found.warm_spares) == ("none", False)


@pytest.mark.parametrize(
    ("asked", "left_out"),
    [
        ({"memory_mib": 1024}, "memory_mib=1024 (its kernel has 512)"),
        ({"processes": 10**9}, "processes=1e+09 (its kernel has 1024)"),
        ({"files": "mount"}, "files=mount (its kernel has mount-ro)"),
        ({"files": "copy"}, "files=copy (its kernel has mount-ro)"),
        ({"egress": ["x.example"]}, "egress x.example"),
        ({"egress": ["@npm", "a.example"]}, "egress @npm"),
        ({"readable": ["/root"]}, "readable (no notebook can set it)"),
        ({"notebook_may_widen": ["egress"]}, "notebook_may_widen (no notebook can set it)"),
        ({"a\x1b[2J\n": 1}, "a\\x1b[2J\\n (no notebook can set it)"),
    ],
)
def test_what_is_more_than_granted_is_left_out_and_said(
    notebook: Path, asked: dict[str, Any], left_out: str
) -> None:
    granted = kernel(memory_mib=512, files="mount-ro", egress=["a.example"])
    found, [notice] = with_notebook_settings(granted, write(notebook, asked))
    assert left_out in notice
    for host in ("a.example", "x.example"):
        if found.spec.egress.decide(host, 443) == "allow":
            assert granted.spec.egress.decide(host, 443) == "allow"
    assert (found.spec.memory_mib, found.files) == (512, "mount-ro")
    assert not any(rule.host == "@npm" for rule in found.spec.egress.all_rules)


@pytest.mark.parametrize(
    ("egress", "left_out"),
    [
        (["*"], "egress *"),
        (["*.a.example", "!b.example"], "egress *.a.example"),
        (["192.0.2.1"], "egress 192.0.2.1"),
        (["default=allow"], "egress default=allow"),
    ],
)
def test_a_kernel_without_a_way_out_grants_none(
    notebook: Path, egress: list[str], left_out: str
) -> None:
    """However the notebook asks for one, it is told."""
    found, [notice] = with_notebook_settings(kernel(), write(notebook, {"egress": egress}))
    assert not found.spec.egress
    assert f"does not get it: {left_out}. Who runs" in notice


def test_what_may_be_widened_is(notebook: Path) -> None:
    """Only if the configuration of the kernel says so, by name."""
    name = write(notebook, {"egress": ["x.example"], "memory_mib": 1024, "files": "mount"})
    granted = kernel(memory_mib=512, notebook_may_widen=["egress", "files"])
    found, [notice] = with_notebook_settings(granted, name)
    assert found.spec.egress.to_json() == ["x.example"]
    assert (found.files, found.spec.memory_mib) == ("mount", 512)
    assert "memory_mib" in notice
    with pytest.raises(SpecError, match=r"notebook_may_widen takes egress, .* not 'readable'"):
        kernel(notebook_may_widen=["readable"])


@pytest.mark.parametrize(
    "asked",
    [
        [],
        "egress",
        {"egress": ["not a host!"]},
        {"egress": {"rules": ["a.example"], "within": ["b.example"]}},
        {"egress": ["!@npm", "default=allow"]},
        {"memory_mib": "much"},
        {"memory_mib": -1},
        {"files": "everything"},
    ],
)
def test_what_cannot_be_understood_is_an_error(notebook: Path, asked: Any) -> None:
    """Nobody knows which restriction was meant."""
    with pytest.raises(SpecError, match=r"n\.ipynb"):
        with_notebook_settings(kernel(egress=["a.example"]), write(notebook, asked))


def test_files_that_are_no_notebooks(
    notebook: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """None blocks, none is read without end, and one without our key is not parsed."""
    granted = kernel(egress=["a.example"])
    assert with_notebook_settings(granted, str(notebook)) == (granted, [])
    notebook.write_text("{ no JSON")
    assert with_notebook_settings(granted, str(notebook)) == (granted, [])
    for text in ('{"sandbox_kernel"', '["sandbox_kernel"]', "[" * 10**6 + '"sandbox_kernel"'):
        notebook.write_text(text)
        with pytest.raises(SpecError, match="no notebook that can be read"):
            with_notebook_settings(granted, str(notebook))
    notebook.write_text('{"cells": ["sandbox_kernel"], "metadata": {}}')
    assert with_notebook_settings(granted, str(notebook)) == (granted, [])
    os.mkfifo(tmp_path / "pipe.ipynb")
    assert with_notebook_settings(granted, str(tmp_path / "pipe.ipynb")) == (granted, [])
    assert with_notebook_settings(granted, str(tmp_path)) == (granted, [])
    monkeypatch.setattr(notebook_settings, "MOST_BYTES", 10)
    assert "larger than" in with_notebook_settings(granted, str(notebook))[1][0]
