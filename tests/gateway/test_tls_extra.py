"""Without the packages of the extra, everything else works; and what a sandbox is made to trust."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from sandbox_kernel.gateway.tls import roots
from sandbox_kernel.gateway.tls.authority import Authority
from sandbox_kernel.sandboxes.egress_environment import trust_script

HIDDEN = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cryptography", "h2", "hpack", "hyperframe"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
import importlib.util
found = importlib.util.find_spec
hidden = ("cryptography", "h2")
importlib.util.find_spec = lambda name, *more: None if name in hidden else found(name, *more)
"""


def run(script: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", HIDDEN + script], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_gateway_works_without_the_extra() -> None:
    """Hosts and ports as ever; what must be read is denied, and says what is missing."""
    script = (
        "import asyncio\n"
        "from sandbox_kernel.egress import EgressPolicy\n"
        "from sandbox_kernel.gateway.gate import Gate\n"
        "from sandbox_kernel.gateway.gateway import Gateway\n"
        "from sandbox_kernel.gateway.tls import extra\n"
        "import sandbox_kernel.kernels.way_out, sandbox_kernel.sandboxes.local\n"
        "gate = Gate(EgressPolicy.of('a.example', {'host': 'b.example', 'path': '/v1/*'}))\n"
        "async def main():\n"
        "    gateway = Gateway(gate, audit=print)\n"
        "    assert not gateway.ends_tls\n"
        "    gateway.close()\n"
        "asyncio.run(main())\n"
        "print(extra.installed(), gate.connection('a.example', 443).allowed)\n"
        "print(gate.connection('b.example', 443).reason)\n"
    )
    first, second = run(script).splitlines()
    assert first == "False True"
    assert second.endswith("reading encrypted requests needs the extra 'gateway'")


def test_nothing_of_the_extra_is_imported_before_it_is_needed() -> None:
    script = (
        "import sys\n"
        "import sandbox_kernel.kernels.way_out, sandbox_kernel.sandboxes.local\n"
        "import sandbox_kernel.jupyter.provisioner, sandbox_kernel.gateway.gateway\n"
        "print([name for name in ('cryptography', 'h2') if name in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


# --- what is trusted


def test_a_bundle_has_the_systems_and_the_named_certificates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second, third = (trustme.CA().cert_pem.bytes().strip() for _ in range(3))
    (tmp_path / "first.pem").write_bytes(b"text\n" + first.replace(b"\n", b"\r\n"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "0abc.0").write_bytes(second)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "first.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "folder"))
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "missing.pem"))
    (tmp_path / "third.pem").write_bytes(third + b"\n-----BEGIN PRIVATE KEY-----\nx\n")
    bundle = roots.for_sandbox({"REQUESTS_CA_BUNDLE": str(tmp_path / "third.pem")})
    for one in (first, second, third):
        assert bundle.count(one) == 1
    assert b"PRIVATE" not in bundle


def test_an_image_keeps_its_own_certificates(tmp_path: Path) -> None:
    """Also when the authority is replaced, by another process that takes the sandbox over."""
    system, bundle = tmp_path / "system.crt", tmp_path / "trust" / "bundle.pem"
    own = trustme.CA().cert_pem.bytes()
    system.write_bytes(own)
    script = trust_script([str(tmp_path / "none.crt"), str(system)], str(bundle))
    for _ in range(3):
        certificate = Authority("vm").certificate
        subprocess.run(["sh", "-c", script], input=certificate, check=True)
        assert bundle.read_bytes() == own + b"\n" + certificate
        assert system.read_bytes() == own + b"\n" + certificate
    alone = tmp_path / "alone" / "bundle.pem"
    subprocess.run(["sh", "-c", trust_script([], str(alone))], input=certificate, check=True)
    assert alone.read_bytes() == b"\n" + certificate
