"""Secrets in real kernels: they arrive where they are meant to, and are nowhere else."""

from __future__ import annotations

import base64
import json
import logging
import secrets as random
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from sandbox_kernel.audit.reading import read
from sandbox_kernel.audit.trail import audit_path
from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.gateway.tls import extra
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.sandboxes.local.client import LocalClient
from sandbox_kernel.spec import SandboxSpec
from tests.conformance.kernels import execute, kernel, sandboxed
from tests.helpers.coroutines import finish
from tests.helpers.named_hosts import NamedHosts
from tests.kernels.live import provisioner_of

pytestmark = pytest.mark.slow
LOG = logging.getLogger(__name__)


class Echo(BaseHTTPRequestHandler):
    """Remembers what it got, and answers with it."""

    seen: list[str]

    def do_GET(self) -> None:
        text = f"{self.requestline}\n{self.headers}"
        self.seen.append(text)
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None: ...


@dataclass
class Server:
    """Stands for api.example and other.example, for every gateway of this process."""

    scheme: str
    port: int
    seen: list[str] = field(default_factory=list)

    @property
    def insecure(self) -> bool:
        return self.scheme == "http"


@pytest.fixture(params=["https", "http"])
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Server]:
    found = Server(request.param, 443 if request.param == "https" else 80)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Echo,), {"seen": found.seen}))
    if found.scheme == "https":
        root = trustme.CA()
        root.cert_pem.write_to_path(str(tmp_path / "roots.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots.pem"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        root.issue_cert("api.example", "other.example").configure_cert(context)
        http.socket = context.wrap_socket(
            http.socket, server_side=True, do_handshake_on_connect=False
        )
    hosts = NamedHosts(monkeypatch)
    for name in ("api.example", "other.example"):
        hosts.add(name, found.port, http.server_port)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield found
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A secret that is in a file of the user's, and nowhere else."""
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    made = f"sk-{random.token_hex(20)}"
    (tmp_path / "the-secret").write_text(f"{made}\n")
    return made


def declared(tmp_path: Path, server: Server) -> str:
    secret = {"name": "API_KEY", "from": f"file:{tmp_path}/the-secret", "hosts": ["api.example"]}
    return json.dumps([{**secret, "insecure": server.insecure}])


USE = """
import os, subprocess, requests
url, key = "%s://{}/v1", os.environ["API_KEY"]
print(requests.get(url.format("api.example"), headers={"Authorization": "Bearer " + key}).text)
print(requests.get(url.format("api.example"), auth=("user", key)).text)
print(requests.get(url.format("other.example"), headers={"Authorization": "Bearer " + key}).text)
command = ["curl", "-s", url.format("api.example"), "-H", "Authorization: Bearer " + key]
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
print(key)
"""
DUMP = """
import os
def dump(pid, folder):
    '''What a debugger would find: every part of a process that can be read.'''
    with open(f"{folder}/core-{pid}", "wb") as core, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in open(f"/proc/{pid}/maps"):
            where, rights = line.split()[:2]
            start, end = (int(part, 16) for part in where.split("-"))
            if "r" in rights and end < 2**63:
                try:
                    memory.seek(start)
                    core.write(memory.read(end - start))
                except (OSError, ValueError):
                    pass
with open("/workspace/found", "w") as found:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline", "status"):
            try:
                found.write(open(f"/proc/{pid}/{name}", errors="replace").read())
            except OSError:
                pass
        try:
            dump(pid, "/workspace")
        except OSError:
            pass
print(len([name for name in os.listdir("/workspace") if name.startswith("core-")]))
"""


def holds(needle: str, *roots: Path) -> list[Path]:
    """Files below folders that hold a text, also in the encodings of a record or a dump."""
    files = [path for root in roots for path in root.rglob("*") if path.is_file()]
    forms = [needle.encode(), needle.encode("utf-16-le"), needle.encode("utf-32-le")]
    return [path for path in files if any(form in _bytes(path) for form in forms)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def processes() -> Iterator[tuple[int, bytes]]:
    """Environment and command line of every process on this machine that may be looked into."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            yield int(folder.name), _bytes(folder / "environ") + _bytes(folder / "cmdline")


def command(*words: str) -> tuple[int, str]:
    """How ``sandbox-kernel`` ends, and what it says."""
    argv = [sys.executable, "-m", "sandbox_kernel", *words]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def test_a_value_is_used_and_nowhere_to_be_found(
    server: Server,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """requests and curl use it. The cell, its variables, /proc, files, memory and dumps of the
    guest, and everything that this host writes down, have at most the placeholder."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SANDBOX_KERNEL_EGRESS", "api.example other.example")
    monkeypatch.setenv("SANDBOX_KERNEL_SECRETS", declared(tmp_path, server))
    with kernel() as (manager, client):
        reply, printed = execute(client, USE % server.scheme)
        assert reply["status"] == "ok", reply
        placeholder = printed.split()[-1]
        assert placeholder.startswith("sk-")
        assert len(placeholder) == len(value)
        seen = server.seen
        assert [value in text for text in seen] == [True, False, False, True]
        assert base64.b64encode(f"user:{value}".encode()).decode() in seen[1]
        assert placeholder in seen[2]
        assert value not in printed
        assert printed.count(placeholder) == 4
        reply, count = execute(client, DUMP)
        assert reply["status"] == "ok", reply
        assert int(count) >= 1
        handle = sandboxed(manager).handle
        names = [path.name for path in holds(placeholder, data_dir(), runtime_dir())]
        assert "found" in names, "the search itself works"
        assert any(name.startswith("core-") for name in names)
        assert holds(value, data_dir(), runtime_dir()) == []
        assert [pid for pid, text in processes() if value.encode() in text] == []
        info = finish(provisioner_of(manager).get_provisioner_info())
        for shown in (info, handle, handle.spec, vars(sandboxed(manager)), manager.kernel_spec):
            assert value not in repr(shown)
            assert value not in json.dumps(shown, default=repr)
        place = ("--unchecked", "--prefix", str(tmp_path / "kernels"))
        needs = ("--egress", "api.example", "--secrets", declared(tmp_path, server)[1:-1])
        for words in (
            *(("ps", "--json"), ("audit", "--json"), ("logs", handle.name)),
            *(("policy", "show", handle.name), ("install", "local", *place, *needs)),
        ):
            code, said = command(*words)
            assert code == 0, said
            assert value not in said
        # An error that is about the secret.
        code, said = command("run", "--egress", "x.example", "--", "true")
        assert code != 0
        assert "API_KEY" in said
        assert value not in said
        events = list(read(audit_path("local", handle.name)))
    (spec,) = (tmp_path / "kernels").rglob("kernel.json")
    assert "API_KEY" in spec.read_text()
    assert holds(value, tmp_path / "kernels") == []
    assert holds(value, data_dir(), runtime_dir()) == []
    assert value not in json.dumps(events)
    assert value not in caplog.text
    assert value not in "".join(capfd.readouterr())
    used = [event.get("secrets") for event in events if event["kind"] == "egress"]
    assert used == [["API_KEY"], ["API_KEY"], None, ["API_KEY"]]
    kept = [event for event in events if event["kind"] == "secret"]
    facts = [(event["action"], event["secret"], event["host"]) for event in kept]
    # Nobody reads what goes to other.example over TLS.
    assert facts == ([("kept", "API_KEY", "other.example")] if server.insecure else [])


def test_another_process_takes_the_sandbox_over(
    server: Server, value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The placeholder stays, and is replaced by the value of now, of whatever length; if there is
    none, requests that need it are refused, and the log says why."""
    seen = server.seen
    secret_file = tmp_path / "the-secret"
    spec = SandboxSpec.from_mapping(
        {"egress": "api.example", "secrets": declared(tmp_path, server)}
    )
    script = (
        "import os, urllib.request as u\n"
        f"url, headers = '{server.scheme}://api.example/', dict(Key=os.environ['API_KEY'])\n"
        "try: u.urlopen(u.Request(url, headers=headers))\n"
        "except u.HTTPError as error: print(error.reason)\n"
        "print(os.environ['API_KEY'])\n"
    )

    async def main() -> list[str]:
        client, said = LocalClient(), []
        kernel = await SandboxedKernel.create(client, spec, LOG)
        for found in (None, "sk-a-much-longer-value-of-another-length" * 3, ""):
            if found is not None:
                secret_file.write_text(found)
                await kernel.detach()
                kernel = await SandboxedKernel.attach(client, kernel.handle.name, LOG)
            said.append((await kernel.handle.exec("python3", ["-c", script], timeout=60)).output)
        await kernel.remove()
        return said

    first, second, third = finish(main())
    assert first == second
    assert f"Key: {value}" in seen[0]
    assert "Key: sk-a-much-longer" in seen[1]
    assert len(seen) == 2
    why = "The secret 'API_KEY' has no value on this host: what was found is empty."
    assert third == f"egress failed: {why}\n{first}"
    assert why in caplog.text
    assert value not in caplog.text


def test_an_exposed_value(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has it in its environment, also after a restart; nothing writes it down."""
    secret = {"name": "API_KEY", "from": f"file:{tmp_path}/the-secret", "expose": True}
    monkeypatch.setenv("SANDBOX_KERNEL_SECRETS", json.dumps(secret))
    with kernel() as (manager, client):
        for _ in range(2):
            _, printed = execute(client, "import os; print(os.environ['API_KEY'][::-1])")
            assert printed.strip()[::-1] == value
            manager.restart_kernel()
            client.wait_for_ready(timeout=60)
        handle = sandboxed(manager).handle
        assert holds(value, data_dir() / "records", data_dir() / "audit") == []
        events = list(read(audit_path("local", handle.name)))
    exposed = [event["secret"] for event in events if event["kind"] == "secret"]
    assert exposed == ["API_KEY"] * 3


def test_commands_of_their_own(value: str, tmp_path: Path) -> None:
    """`sandbox-kernel run` takes secrets as options. A command's output is a source, too."""
    cat = {"name": "MINE", "from": f"command:cat {tmp_path}/the-secret", "expose": True}
    arguments = ["run", "--secrets", json.dumps(cat), "--", "sh", "-c", "echo $MINE | rev"]
    ran = subprocess.run(
        [sys.executable, "-m", "sandbox_kernel", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert ran.stdout.strip()[::-1] == value


@pytest.mark.parametrize(
    ("secret", "why"),
    [
        ("API_KEY@elsewhere.example", "'API_KEY' is bound to elsewhere.example, which no egress"),
        ("API_KEY", "keeps no secrets itself. Bind the secret to a host: API_KEY@HOST"),
    ],
)
def test_what_is_refused(secret: str, why: str) -> None:
    """Before anything is made: a secret opens no way out, and is bound to hosts."""
    with pytest.raises(SpecRefused, match=why):
        LocalClient().check(SandboxSpec.from_mapping({"egress": "a.example", "secrets": secret}))


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "installed", lambda: False)
    spec = SandboxSpec.from_mapping({"egress": "a.example", "secrets": "API_KEY@a.example"})
    with pytest.raises(SpecRefused, match=r"pip install 'sandbox-kernel\[gateway\]'"):
        LocalClient().check(spec)
