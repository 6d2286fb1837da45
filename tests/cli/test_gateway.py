"""``sandbox-kernel gateway``: the certificate for its clients, and nothing else, in a file; what
it cannot use."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_kernel.cli import main
from sandbox_kernel.cli.commands import gateway
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.gateway.tls import extra


def test_the_certificate_is_written_without_the_key(tmp_path: Path) -> None:
    rules, authority = tmp_path / "rules.txt", tmp_path / "authority.pem"
    rules.write_text('{"host": "a.example", "path": "/v1/*"}\n')
    command = ["gateway", "--policy", str(rules), "--ca", str(authority)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sandbox_kernel", *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SANDBOX_KERNEL_DATA_DIR": str(tmp_path / "data")},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("127.0.0.1:")
        text = authority.read_text()
        assert text.count("BEGIN CERTIFICATE") == 1
        assert "PRIVATE" not in text
        trusts = ssl.create_default_context(cadata=text)
        assert trusts.cert_store_stats()["x509_ca"] == 1
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extra, "installed", lambda: False)
    with pytest.raises(SandboxError, match=r"pip install 'sandbox-kernel\[gateway\]'"):
        gateway._end_tls(None, str(tmp_path / "x.pem"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--audit", "{tmp}/none/a.jsonl"],
            "--audit: {tmp}/none/a.jsonl cannot be written: No such",
        ),
        (["--audit", "{tmp}"], "--audit: {tmp} cannot be written: Is a directory"),
        (["--ca", "{tmp}/none/a.pem"], "--ca: {tmp}/none/a.pem cannot be written: No such"),
        (["--listen", "192.0.2.1:80"], "--listen: 192.0.2.1:80 cannot be used: "),
        (["--listen", "nowhere.invalid"], "--listen: nowhere.invalid cannot be used: "),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Before anything is served: an audit that was asked for is not left out in silence."""
    rules = tmp_path / "rules.txt"
    rules.write_text("a.example\n")
    given = [word.format(tmp=tmp_path) for word in arguments]
    assert main(["gateway", "--policy", str(rules), *given]) == 1
    captured = capsys.readouterr()
    assert words.format(tmp=tmp_path) in captured.err
    assert not captured.out
