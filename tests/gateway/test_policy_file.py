"""Policy files, and the commands that use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_kernel.cli import main
from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway.policy_file import WatchedPolicy, read_policy_file
from sandbox_kernel.gateway.tls import extra


@pytest.mark.parametrize(
    "text",
    [
        '["a.example", "!b.example", {"host": "c.example", "ports": [22]}]',
        "# who may be reached\na.example\n\n!b.example  # not this one\nc.example:22\n",
        'a.example\n!b.example\n{"host": "c.example", "ports": [22]}\n',
    ],
)
def test_ways_to_write_a_policy(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rules"
    file.write_text(text)
    assert read_policy_file(file) == EgressPolicy.of("a.example", "!b.example", "c.example:22")


def test_an_empty_file_denies_everything(tmp_path: Path) -> None:
    file = tmp_path / "rules"
    for text in ("", "\n# nothing\n", "[]", "{}"):
        file.write_text(text)
        assert not read_policy_file(file)


@pytest.mark.parametrize(
    "content",
    [
        *(b'["a.example"', b"a b", b"\xff\xfe", b"https://a.example/", b"@pipp", b"x" * 2**21),
        *(b"[" * 2**19, b'{"within":' * 2**16),
    ],
    ids=range(8),
)
def test_what_cannot_be_understood_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rules"
    file.write_bytes(content)
    with pytest.raises(SpecError, match="policy"):
        read_policy_file(file)


def test_a_reload_fails_closed(tmp_path: Path) -> None:
    file = tmp_path / "rules"
    file.write_text("a.example")
    used: list[EgressPolicy] = []
    told: list[str] = []
    watched = WatchedPolicy(file, used.append, told.append)
    watched.check()
    assert used == []
    file.write_text("[" * 100_000)
    watched.check()
    assert not used.pop()
    assert "everything is denied" in told.pop()
    file.write_text("a.example\nb.example")
    watched.check()
    assert used[-1] == EgressPolicy.of("a.example", "b.example")
    file.write_text("a.example\n{")
    watched.check()
    assert used[-1] == EgressPolicy()
    assert "everything is denied" in told[-1]
    file.write_text("a.example")
    watched.check()
    assert used[-1] == EgressPolicy.of("a.example")
    file.unlink()
    watched.check()
    assert used[-1] == EgressPolicy()
    watched.reload()
    assert len(used) == 5


@pytest.mark.parametrize(
    ("url", "more", "code", "text"),
    [
        ("https://a.example/x", [], 0, "allow: a.example:443 (rule 1 allows a.example)"),
        ("https://b.example", [], 1, "deny: b.example:443 (no rule allows it; allow it with"),
        ("http://c.example/v1/x", [], 0, "allow: c.example:80 (rule 2 allows c.example)"),
        ("http://c.example/v1/x", ["--method", "post"], 1, "deny: c.example:80 (no rule"),
        ("http://c.example/v1/%2e%2e/x", [], 1, "look at paths"),
        ("https://c.example/v1/x", [], 0, "allow: c.example:443 (rule 2 allows c.example)"),
        ("https://c.example/v2/x", [], 1, "deny: c.example:443 (no rule"),
        ("c.example:443", [], 1, "needs the extra 'gateway'"),
        ("db.example:5432", [], 0, "allow: db.example:5432 (rule 3"),
        ("db.example:5433", [], 1, "deny: db.example:5433"),
        ("http://0177.0.0.1/", [], 1, "deny: bad host name '0177.0.0.1'"),
        ("https://1.1.1.1/", [], 1, "deny: 1.1.1.1:443 (no rule"),
    ],
)
def test_policy_check(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    url: str,
    more: list[str],
    code: int,
    text: str,
) -> None:
    file = tmp_path / "rules"
    rule = {"host": "c.example", "methods": ["GET"], "path": "/v1/*"}
    file.write_text(f"a.example\n{json.dumps(rule)}\ndb.example:5432\n")
    assert main(["policy", "check", str(file), url, *more]) == code
    assert text in capsys.readouterr().out


def test_policy_check_without_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the gateway would not read https either."""
    monkeypatch.setattr(extra, "installed", lambda: False)
    file = tmp_path / "rules.json"
    file.write_text(json.dumps([{"host": "c.example", "methods": ["GET"]}]))
    assert main(["policy", "check", str(file), "https://c.example/v1/x"]) == 1
    assert "needs the extra 'gateway'" in capsys.readouterr().out


def test_policy_check_of_a_file_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "check", str(tmp_path / "none"), "https://a.example/"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_the_gateway_by_itself(tmp_path: Path) -> None:
    """It says where it listens, reads its policy again, and ends with Ctrl-C."""
    policy, audit = tmp_path / "rules", tmp_path / "audit.jsonl"
    policy.write_text("a.example")
    command = [sys.executable, "-m", "sandbox_kernel", "gateway", "--policy", str(policy)]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1", "--audit", str(audit)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SANDBOX_KERNEL_DATA_DIR": str(tmp_path / "data")},
    ) as process:
        assert process.stdout
        assert process.stderr
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("127.0.0.1:")
            fetch = ["curl", "-sS", "-x", f"http://{address}", "http://b.example/"]
            denied = subprocess.run(fetch, capture_output=True, text=True, check=True).stdout
            assert denied.startswith("egress denied: b.example:80 (no rule allows it")
            policy.write_text("!b.example\n*")
            process.send_signal(signal.SIGHUP)
            assert "was read again" in process.stderr.readline()
            denied = subprocess.run(fetch, capture_output=True, text=True, check=True).stdout
            assert denied == "egress denied: b.example:80 (rule 1 denies b.example)\n"
            policy.write_text("{")
            assert "everything is denied" in process.stderr.readline()
            denied = subprocess.run(fetch, capture_output=True, text=True, check=True).stdout
            assert denied.startswith("egress denied: b.example:80 (no rule allows it")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert [json.loads(line)["action"] for line in audit.read_text().splitlines()] == ["deny"] * 3
