"""TLS that is ended for programs in a real jail, whose certificates are the host's and one more."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.errors import SpecError, SpecRefused
from sandbox_kernel.gateway.tls import extra
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.kernels.spare_plan import SparePlan, make_spare
from sandbox_kernel.paths import data_dir
from sandbox_kernel.sandboxes.local import trusted_bundle
from sandbox_kernel.sandboxes.local.client import LocalClient
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.coroutines import finish
from tests.helpers.named_hosts import NamedHosts

from .jail import LOG, running_jail
from .secure_server import serve_https

ROOT = trustme.CA()
RULE = {"host": "data.example", "methods": ["GET"], "path": "/v1/*"}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[NamedHosts]:
    """``data.example`` and ``other.example``, with certificates that this host trusts."""
    ROOT.cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots.pem"))
    found = NamedHosts(monkeypatch)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ROOT.issue_cert("data.example", "other.example").configure_cert(context)
    with serve_https(context) as port:
        found.add("data.example", 443, port)
        found.add("other.example", 443, port)
        yield found


FETCH = """
import sys, urllib.error, urllib.request
def fetch(url, **options):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, **options), timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code, error.reason
    except urllib.error.URLError as error:
        return type(error.reason).__name__
"""


def test_methods_and_paths_hold_in_a_jail(
    monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts
) -> None:
    script = FETCH + (
        "print(fetch('https://data.example/v1/x'))\n"
        "print(fetch('https://data.example/v2'))\n"
        "print(fetch('https://data.example/v1/x', method='DELETE'))\n"
        "print(fetch('https://other.example/anything'))\n"
    )
    with running_jail(RULE, "other.example", monkeypatch=monkeypatch, hosts=hosts) as jail:
        lines = jail.python(script).splitlines()
        assert [lines[0], lines[3]] == ["200", "200"]
        assert lines[1].startswith("(403, 'egress denied: data.example:443 (no rule allows it")
        assert lines[2].startswith("(403, ")
        said = [
            (event["action"], event["method"], event["path"])
            for event in jail.events()
            if event["host"] == "data.example"
        ]
        assert said == [
            *(("allow", "GET", "/v1/x"), ("deny", "GET", "/v2"), ("deny", "DELETE", "/v1/x")),
        ]


@pytest.mark.parametrize("way", ["proxy", "by name"])
def test_usual_programs_trust_the_authority(
    monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts, way: str
) -> None:
    """With the jail's variables, without any of them (the system's bundle), and certifi's own."""
    names = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")
    env = {} if way == "proxy" else dict.fromkeys(names, "")
    curl = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "https://data.example/v1/x"]
    certifi = (
        "import certifi, ssl, urllib.request\n"
        "context = ssl.create_default_context(cafile=certifi.where())\n"
        "print(urllib.request.urlopen('https://data.example/v1/x', context=context).status)\n"
    )
    requests = "import requests; print(requests.get('https://data.example/v1/x').status_code)"
    with running_jail(RULE, monkeypatch=monkeypatch, hosts=hosts) as jail:
        assert jail.run(curl, env).output == "200"
        bare = dict.fromkeys(("CURL_CA_BUNDLE", "SSL_CERT_FILE"), "")
        assert jail.run(["env", *(f"-u{name}" for name in bare), *curl], env).output == "200"
        python = "/home/sandbox/.venv/bin/python"
        for script in (certifi, requests):
            assert jail.run([python, "-c", script], env).output == "200\n"
        node = "fetch('https://data.example/v1/x').then(r => console.log(r.status))"
        if way == "by name" and jail.run(["sh", "-c", "command -v node"]).ok:
            assert jail.run(["node", "-e", node], env).output == "200\n"


def test_a_program_with_its_own_roots_fails_closed(
    monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts
) -> None:
    script = FETCH + (
        "import ssl\n"
        f"context = ssl.create_default_context(cadata={ROOT.cert_pem.bytes().decode()!r})\n"
        "for host in ('data.example/v1/x', 'other.example/'):\n"
        "    try: print(urllib.request.urlopen('https://' + host, context=context).status)\n"
        "    except urllib.error.URLError as error: print(type(error.reason).__name__)\n"
    )
    with running_jail(RULE, "other.example", monkeypatch=monkeypatch, hosts=hosts) as jail:
        lines = jail.python(script).splitlines()
        assert lines == ["SSLCertVerificationError", "200"]


def test_the_bundle_cannot_be_written_from_inside_and_has_no_key(
    monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts
) -> None:
    script = (
        f"path = {trusted_bundle.BUNDLE!r}\n"
        "print(open(path).read().count('BEGIN CERTIFICATE') > 1)\n"
        "for mode in ('a', 'w', 'r+'):\n"
        "    try: open(path, mode)\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    with running_jail(RULE, monkeypatch=monkeypatch, hosts=hosts) as jail:
        assert jail.python(script).splitlines() == ["True", *3 * ["Read-only file system"]]
        for file in data_dir().rglob("*"):
            if file.is_file():
                assert b"PRIVATE KEY" not in file.read_bytes(), file


def test_who_takes_a_sandbox_over_makes_an_authority_of_its_own(
    monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts
) -> None:
    script = f"print(open({trusted_bundle.BUNDLE!r}).read().rsplit('-----BEGIN', 1)[1])"
    fetch = FETCH + "print(fetch('https://data.example/v1/x'))\n"
    with running_jail(RULE, monkeypatch=monkeypatch, hosts=hosts) as jail:
        before = jail.python(script)
        name = jail.kernel.handle.name
        finish(jail.kernel.detach())
        jail.kernel = finish(SandboxedKernel.attach(LocalClient(), name, LOG))
        try:
            after = jail.python(script)
            assert before != after
            assert jail.python(fetch) == "200\n"
        finally:
            finish(jail.kernel.remove())


def test_a_spare_gets_the_authority_of_who_takes_it(
    monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts
) -> None:
    plan = SparePlan.of("local", SandboxSpec(egress=EgressPolicy.of(RULE)), ())
    spare = finish(make_spare(LocalClient(), plan, LOG)).kernel
    name, sandbox_id = spare.handle.name, spare.handle.id
    before = finish(spare.handle.exec("cat", [trusted_bundle.BUNDLE])).output
    finish(spare.release())
    taken = finish(SandboxedKernel.take_spare(LocalClient(), name, LOG, sandbox_id=sandbox_id))
    try:
        after = finish(taken.handle.exec("cat", [trusted_bundle.BUNDLE])).output
        assert after.count("BEGIN") == before.count("BEGIN")
        assert after != before
        script = FETCH + "print(fetch('https://data.example/v1/x'))\n"
        assert finish(taken.handle.exec("python3", ["-c", script])).output == "200\n"
    finally:
        finish(taken.remove())


def test_a_rule_that_needs_reading_may_come_later(
    monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts
) -> None:
    """A sandbox is made so that it can trust an authority, also if there is none yet."""
    fetch = FETCH + "print(fetch('https://data.example/v2'))\n"
    bundle = f"print(open({trusted_bundle.BUNDLE!r}).read().count('BEGIN CERT'))"
    with running_jail("data.example", monkeypatch=monkeypatch, hosts=hosts) as jail:
        before = int(jail.python(bundle))
        assert jail.python(fetch) == "200\n"
        way_out = jail.kernel.way_out
        assert way_out is not None
        finish(way_out._use(EgressPolicy.of(RULE)))
        assert int(jail.python(bundle)) == before + 1
        assert jail.python(fetch).startswith("(403, 'egress denied")


def test_without_the_extra_such_rules_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extra, "installed", lambda: False)
    spec = SandboxSpec(egress=EgressPolicy.of(RULE))
    with pytest.raises(SpecRefused, match=r"egress\[0\]\.methods=\['GET'\].*pip install 'sandbox"):
        finish(SandboxedKernel.create(LocalClient(), spec, LOG))
    plain = SandboxSpec(egress=EgressPolicy.of("data.example"))
    kernel = finish(SandboxedKernel.create(LocalClient(), plain, LOG))
    try:
        found = finish(kernel.handle.exec("cat", [trusted_bundle.BUNDLE]))
        assert not found.ok
        assert kernel.way_out is not None
        with pytest.raises(SpecError, match="extra 'gateway'"):
            finish(kernel.way_out._use(EgressPolicy.of(RULE)))
    finally:
        finish(kernel.remove())


def test_sandboxes_without_rules_have_no_bundle() -> None:
    kernel = finish(SandboxedKernel.create(LocalClient(), SandboxSpec(), LOG))
    try:
        shown = finish(kernel.handle.exec("env")).output
        assert "SSL_CERT_FILE" not in shown
        assert not finish(kernel.handle.exec("cat", [trusted_bundle.BUNDLE])).ok
    finally:
        finish(kernel.remove())


def test_the_users_own_variables_win(monkeypatch: pytest.MonkeyPatch, hosts: NamedHosts) -> None:
    env = {"SSL_CERT_FILE": "/mine.pem"}
    with running_jail(RULE, monkeypatch=monkeypatch, hosts=hosts, env=env) as jail:
        shown = jail.python(
            "import json, os; print(json.dumps([os.environ.get(n) for n in "
            "('SSL_CERT_FILE', 'PIP_CERT', 'GRPC_DEFAULT_SSL_ROOTS_FILE_PATH')]))"
        )
        assert json.loads(shown) == ["/mine.pem", *2 * [trusted_bundle.BUNDLE]]


def test_a_spare_is_stale_when_the_host_trusts_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = SandboxSpec(name="spare", egress=EgressPolicy.of("data.example"))
    before = finish(LocalClient().likeness(spec))
    assert finish(LocalClient().likeness(spec)) == before
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots.pem"))
    assert finish(LocalClient().likeness(spec)) != before
    monkeypatch.setattr(extra, "installed", lambda: False)
    assert finish(LocalClient().likeness(spec)) != before
