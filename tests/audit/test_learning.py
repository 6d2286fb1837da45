"""`policy learn`: what a run reached becomes the smallest policy that lets it pass."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sandbox_kernel.cli import main
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.audit import egress_event
from sandbox_kernel.gateway.decisions import reads_requests
from sandbox_kernel.gateway.learning import KnownPreset, learn, policy_to_learn_under
from sandbox_kernel.gateway.names import read_target
from sandbox_kernel.gateway.policy_file import read_policy_file
from sandbox_kernel.sandboxes.local import LocalClient
from tests.helpers.coroutines import finish
from tests.helpers.names_here import stand_for, web_server
from tests.helpers.waiting import LIMIT, wait_until

PIP = KnownPreset(
    "@pip",
    frozenset([("index.example", 443), ("files.example", 443)]),
    frozenset(["index.example"]),
)


def allowed(host: str, port: int, **more: Any) -> dict[str, Any]:
    return egress_event("allow", host=host, port=port, **more)


def test_hosts_ports_and_presets() -> None:
    events = [
        allowed("data.example", 443),
        allowed("data.example", 80),
        allowed("db.example", 5432),
        allowed("both.example", 443),
        allowed("both.example", 22),
        allowed("files.example", 443),
        egress_event("error", host="broke.example", port=443, received=10),
        egress_event("error", host="never.example", port=443),
        {"kind": "exec", "host": "no.example", "port": 443, "action": "allow"},
    ]
    learned = learn(events, [PIP])
    assert learned.policy.to_json() == [
        "@pip",
        {"host": "both.example", "ports": [22, 443]},
        "broke.example",
        "data.example",
        {"host": "db.example", "ports": [5432]},
    ]
    assert learned.denied == learned.private == {}


def test_what_was_refused_is_apart() -> None:
    reason = 'egress denied: a.example:443 (no rule allows it; allow it with egress=["a.example"])'
    private = "egress denied: b.example:80 (b.example has the address 10.0.0.1, a private address)"
    events = [
        egress_event("deny", host="a.example", port=443, reason=reason),
        egress_event("deny", host="b.example", port=80, reason=private),
        egress_event("deny", host="c.example", reason="no rule can permit this name"),
        egress_event("deny", host="d.example", port=443, reason="for a moment"),
        allowed("d.example", 443),
    ]
    learned = learn(events, [])
    assert learned.policy.to_json() == ["d.example"]
    assert learned.denied == {
        "a.example:443": "no rule allows it",
        "b.example:80": "b.example has the address 10.0.0.1, a private address",
        "c.example": "no rule can permit this name",
    }


def test_a_private_network_is_never_opened_in_silence() -> None:
    """The index is private, and a preset opens it; what else listens there is no part of it."""
    learned = learn([allowed("index.example", 8080)], [PIP])
    assert learned.policy.to_json() == []
    assert learned.private == {"index.example:8080": "@pip"}


def test_paths_only_where_all_could_be_read() -> None:
    read = [
        allowed("api.example", 80, method="GET", path="/v1/a"),
        allowed("api.example", 80, method="POST", path="/v1/a"),
        allowed("api.example", 80, method="GET", path="/v1/b"),
        allowed("mixed.example", 80, method="GET", path="/x"),
        allowed("mixed.example", 443),
        allowed("odd.example", 80, method="GET", path="/%2e%2e/x"),
    ]
    assert learn(read, []).policy.to_json() == ["api.example", "mixed.example", "odd.example"]
    assert learn(read, [], paths=True).policy.to_json() == [
        {"host": "api.example", "methods": ["GET", "POST"], "path": "/v1/a"},
        {"host": "api.example", "methods": ["GET"], "path": "/v1/b"},
        "mixed.example",
        "odd.example",
    ]


@pytest.mark.parametrize(
    "host", ["", "a b", "a\nb", "#x", "@pip", "*", "300.1.1.1", "a..b", None, 5, "x" * 300]
)
def test_what_is_no_host_is_left_out(host: Any) -> None:
    """A guest may have written it."""
    assert learn([{**allowed("x", 1), "host": host}], []).policy == EgressPolicy()


def test_nothing_passes_while_learning_under_deny() -> None:
    policy = policy_to_learn_under("deny", [PIP])
    assert policy, "or there would be no gateway to see what is asked for"
    assert policy.decide("data.example", 443) == "deny"
    assert policy_to_learn_under("allow", [PIP]).decide("data.example", 5432) == "allow"


def test_paths_are_read_while_learning() -> None:
    """Inside TLS, too; but not what is no HTTP."""
    web, database = read_target("data.example", 443), read_target("data.example", 5432)
    for paths in (True, False):
        policy = policy_to_learn_under("allow", [], paths=paths)
        assert policy.decide("data.example", 443) == "allow"
        assert reads_requests(policy, web) == paths
        assert not reads_requests(policy, database)


# --- with real notebooks


@pytest.fixture(autouse=True)
def _own_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_WARM_SPARES", "false")


def notebook(folder: Path, *cells: str) -> Path:
    path = folder / "work.ipynb"
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(made, path)
    return path


FETCH = "import urllib.request as r; assert r.urlopen('http://{}/').read() == b'hello'"


@pytest.mark.slow
def test_what_was_learned_lets_the_notebook_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There and back: learn under allow, and run with the learned rules and a default of deny, once
    from the file and once from the text itself."""
    stand_for(monkeypatch, "data.example", "other.example")
    with web_server() as port:
        path = notebook(
            tmp_path,
            "%pip install --quiet --no-deps cowsay",
            FETCH.format(f"data.example:{port}"),
            "try: r.urlopen('http://inside.example/')\nexcept OSError: pass",
        )
        before = path.read_bytes()
        assert main(["policy", "learn", str(path)]) == 0
        text = capsys.readouterr().out
        rules = tmp_path / "rules.txt"
        rules.write_text(text)
        learned = read_policy_file(rules)
        assert learned.to_json() == ["@pip", {"host": "data.example", "ports": [port]}]
        assert "#   inside.example:80 (has the address 10.1.2.3, a private address; " in text
        assert EgressPolicy.read(text) == learned
        assert EgressPolicy.read([text]) == learned, "as --egress gets it"
        assert path.read_bytes() == before

        from sandbox_kernel.gateway import learning

        def as_learned(default: str, presets: object, *, paths: bool) -> EgressPolicy:
            return EgressPolicy.read(text)

        monkeypatch.setattr(learning, "policy_to_learn_under", as_learned)
        assert main(["policy", "learn", str(path), "--default", "deny", "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["failed_cells"] == {}
        assert again["egress"] == learned.to_json()


@pytest.mark.slow
def test_under_deny_nothing_passes_and_cells_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cells after a failed one run, too; the exit code and the output say that it is a part."""
    stand_for(monkeypatch, "data.example", "late.example")
    path = notebook(tmp_path, FETCH.format("data.example"), FETCH.format("late.example"), "1")
    assert main(["policy", "learn", str(path), "--default", "deny"]) == 1
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if not line.startswith("#")] == []
    assert "# Incomplete: cell 1 failed: HTTPError" in out
    assert "#   data.example:80 (no rule allows it)" in out
    assert "#   late.example:80 (no rule allows it)" in out
    assert "Cell 2 failed" in err


@pytest.mark.slow
def test_a_kernel_that_dies_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = notebook(tmp_path, "1", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "2")
    assert main(["policy", "learn", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed_cells"].keys() == {"2"}


@pytest.mark.slow
def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    """While a cell runs: no policy is printed, and nothing is left."""
    folder = tmp_path / "work"
    folder.mkdir()
    path = notebook(folder, "open('begun', 'w').close()\nimport time; time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-m", "sandbox_kernel", "policy", "learn", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SANDBOX_KERNEL_FILES": "mount"},
    ) as process:
        try:
            wait_until((folder / "begun").exists, "the cell runs")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=LIMIT)
            assert (out, process.returncode) == ("", 130), err
            assert "Traceback" not in err
        finally:
            process.kill()
    assert finish(LocalClient().list()) == []


def test_a_kernel_without_a_sandbox_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook(tmp_path, "1")
    assert main(["policy", "learn", str(path), "--kernel", "python3"]) == 2
    assert "does not run in a sandbox" in capsys.readouterr().err
    assert main(["policy", "learn", str(path), "--kernel", "none-such"]) == 2
    assert main(["policy", "learn", str(tmp_path / "missing.ipynb")]) == 2
