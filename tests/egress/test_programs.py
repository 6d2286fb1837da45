"""Real programs in a real jail reach named hosts through the gateway: those that know of proxies,
and those that do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from sandbox_kernel.gateway.tls.roots import BUNDLE_VARIABLES
from tests.egress import servers
from tests.egress.jail import Jail, running_jail
from tests.helpers.named_hosts import NamedHosts
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

RULES = ("web.example", "h2.example:8443", "grpc.example:50051", "ws.example")
ADDRESS = "[2606:4700::1111]"
READ = (
    {"host": "web.example", "methods": ["GET", "POST"]},
    {"host": "h2.example", "ports": [8443], "methods": ["GET"]},
    {"host": "grpc.example", "ports": [50051], "path": "/test.Echo/*"},
    {"host": "ws.example", "path": "/"},
)
"""The same hosts, by rules for which the gateway ends TLS."""
OTHERS = ("db.example:5432", "ssh.example:22", "2606:4700::/32")


@dataclass(frozen=True)
class Program:
    """What is run, and what it prints; ``HOST`` becomes the host."""

    script: str
    prints: str
    host: str = "web.example"
    is_python: bool = True

    def run(self, jail: Jail, host: str = "") -> str:
        script = self.script.replace("HOST", host or self.host)
        if self.is_python:
            return jail.python(script)
        return jail.run(["sh", "-c", script]).output


def aiohttp_client(**options: str) -> str:
    given = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"""
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession({given}) as session:
        async with session.get("https://HOST/some/path") as answer:
            print(await answer.text(), end="")
asyncio.run(main())
"""


GRPC = """
import grpc, sys
channel = grpc.secure_channel("HOST:50051", grpc.ssl_channel_credentials())
say, each = (kind("/test.Echo/" + name) for kind, name in
             ((channel.unary_unary, "Say"), (channel.stream_stream, "Each")))
try:
    print(say(b"hello", timeout=60), list(each(iter([b"1", b"2", b"3"]), timeout=60)))
except grpc.RpcError as error:
    print(error.code(), error.details())
"""
POSTGRESQL = """
import psycopg
with psycopg.connect("host=HOST user=tester dbname=postgres", connect_timeout=60) as connection:
    rows = connection.execute("select generate_series(1, 3), repeat('x', 100000)").fetchall()
    print([row[0] for row in rows], len(rows[2][1]))
    try:
        connection.execute("select 1/0")
    except psycopg.Error as error:
        print(error.sqlstate)
"""
JAVA = """
cat > /tmp/Get.java <<'END'
import java.net.URI;
import java.net.http.*;
public class Get {
  public static void main(String[] names) throws Exception {
    var request = HttpRequest.newBuilder(URI.create("http://HOST/some/path")).build();
    var answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
    System.out.print(answer.body());
  }
}
END
java -Xshare:auto -XX:TieredStopAtLevel=1 /tmp/Get.java 2>&1
"""
GOT = "GET web.example /some/path 0\n"
PROGRAMS = {
    "urllib": Program(
        "from urllib.request import urlopen\n"
        "print(urlopen('https://HOST/some/path').read().decode(), end='')",
        GOT,
    ),
    "requests": Program(
        "import requests\n"
        "with requests.Session() as session:\n"
        "    print(session.get('https://HOST/some/path').text, end='')\n"
        "    print(session.post('https://HOST/form', data=b'x' * 3_000_000).text, end='')\n",
        GOT + "POST web.example /form 3000000\n",
    ),
    "requests without TLS": Program(
        "import requests; print(requests.get('http://HOST/some/path').text, end='')", GOT
    ),
    "httpx": Program("import httpx; print(httpx.get('https://HOST/some/path').text, end='')", GOT),
    "httpx over HTTP/2": Program(
        "import httpx\n"
        "with httpx.Client(http2=True) as client:\n"
        "    answers = [client.get('https://HOST:8443/%d' % n) for n in range(3)]\n"
        "    print(*[a.http_version + ' ' + a.text for a in answers], sep='', end='')\n",
        "".join(f"HTTP/2 h2 GET /{number}\n" for number in range(3)),
        host="h2.example",
    ),
    "aiohttp": Program(aiohttp_client(), GOT),
    "aiohttp that looks for proxies": Program(aiohttp_client(trust_env="True"), GOT),
    "curl": Program("curl -sS https://HOST/some/path 2>&1", GOT, is_python=False),
    "curl over SOCKS": Program(
        "curl -sS -x socks5h://127.0.0.1:3128 https://HOST/some/path 2>&1", GOT, is_python=False
    ),
    "git": Program(
        "cd /tmp && rm -rf thing && git clone -q https://HOST/git/thing.git 2>&1 && "
        "git -C thing log --format=%s",
        "the first commit\n",
        is_python=False,
    ),
    "node": Program(
        "node -e \"fetch('https://HOST/some/path').then(a => a.text())"
        '.then(t => process.stdout.write(t)).catch(e => console.log(e.cause.code))" 2>&1',
        GOT,
        is_python=False,
    ),
    "java": Program(JAVA, GOT, is_python=False),
    "grpc": Program(GRPC, "b'hello' [b'1', b'2', b'3']\n", host="grpc.example"),
    "grpc without a proxy": Program(
        GRPC.replace("dentials())", "dentials(), [('grpc.enable_http_proxy', 0)])"),
        "b'hello' [b'1', b'2', b'3']\n",
        host="grpc.example",
    ),
    "websockets": Program(
        "from websockets.sync.client import connect\n"
        "with connect('wss://HOST/', open_timeout=60) as socket:\n"
        "    socket.send('hello'); print(socket.recv())\n"
        "    socket.send(b'x' * 300_000); print(len(socket.recv()))\n",
        "hello\n300000\n",
        host="ws.example",
    ),
    "psycopg": Program(POSTGRESQL, "[1, 2, 3] 100000\n22012\n", host="db.example"),
    "a plain socket": Program(
        "import socket\n"
        "with socket.create_connection(('HOST', 22), timeout=60) as sock:\n"
        "    print(sock.recv(100)); sock.sendall(b'hello'); print(sock.recv(100))\n",
        "b'SSH-2.0-test\\r\\n'\nb'hello'\n",
        host="ssh.example",
    ),
}


@contextlib.contextmanager
def all_servers(hosts: NamedHosts, authority: trustme.CA, folder: Path) -> Iterator[None]:
    servers.repository(folder)
    tls = servers.server_context(authority, "web.example")
    with contextlib.ExitStack() as stack:
        for name, port, server in (
            ("web.example", 443, servers.web(folder, tls)),
            ("web.example", 80, servers.web(folder)),
            ("h2.example", 8443, servers.web_h2(authority, "h2.example")),
            ("grpc.example", 50051, servers.grpc_echo(authority, "grpc.example")),
            ("ws.example", 443, servers.websocket_echo(authority, "ws.example")),
            ("db.example", 5432, servers.postgresql()),
            ("ssh.example", 22, servers.banner(b"SSH-2.0-test\r\n")),
        ):
            hosts.add(name, port, stack.enter_context(server))
        hosts.add_address(ADDRESS.strip("[]"), 80, stack.enter_context(servers.web(folder)))
        yield


@pytest.fixture(scope="module", params=["passed through", "read"])
def jail(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jail]:
    """All tests of this module share it: one that passes TLS through, and one that ends it. What
    this machine trusts, the sandbox trusts, too."""
    authority = trustme.CA()
    bundle = tmp_path_factory.mktemp("trusted") / "ca.pem"
    bundle.write_bytes(authority.cert_pem.bytes())
    rules = RULES if request.param == "passed through" else READ
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in BUNDLE_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        hosts = NamedHosts(monkeypatch)
        with (
            all_servers(hosts, authority, tmp_path_factory.mktemp("servers")),
            running_jail(*rules, *OTHERS, monkeypatch=monkeypatch, hosts=hosts) as jail,
        ):
            assert jail.gateway.ends_tls == (request.param == "read")
            yield jail


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_reaches_its_host(jail: Jail, name: str) -> None:
    """As it would on a machine with a network, and nothing is set up for it."""
    program = PROGRAMS[name]
    before = len(jail.events())
    assert program.run(jail) == program.prints
    events = wait_until(lambda: jail.events()[before:], "the connection is over")
    assert {event["host"] for event in events} == {program.host}
    # "error": a program may hang up as it likes once it has what it wants.
    assert {event["action"] for event in events} <= {"allow", "error"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_a_rule_it_is_refused_at_once(jail: Jail, name: str) -> None:
    """With the reason, where the program shows what a proxy says, and never by a timeout."""
    program = PROGRAMS[name]
    before, looked_up = len(jail.events()), list(jail.hosts.looked_up)
    output = program.run(jail, "denied.example")
    assert any(text in output for text in REFUSED), output
    events = jail.events()[before:]
    assert events
    assert {(event["action"], event["host"]) for event in events} == {("deny", "denied.example")}
    assert jail.hosts.looked_up == looked_up, "a denied name left this machine"


REFUSED = (
    "egress denied: denied.example:",
    "response 403",
    "returned response code 403",
    "rejected connection: HTTP 403",
    "Name or service not known",
    "connection to denied.example. (2)",  # SOCKS: not allowed
    "ENOTFOUND",
    "UnresolvedAddressException",
    "Domain name not found",
)


def test_many_connections_at_once(jail: Jail) -> None:
    script = """
import asyncio, aiohttp
async def main():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=150)) as session:
        async def get(number):
            async with session.get("https://web.example/%d" % number) as answer:
                return await answer.text() == "GET web.example /%d 0\\n" % number
        print(sum(await asyncio.gather(*(get(number) for number in range(150)))))
asyncio.run(main())
"""
    assert jail.python(script) == "150\n"


@pytest.mark.parametrize("scheme", ["http", "socks5h"])
def test_addresses_need_a_rule_for_addresses(jail: Jail, scheme: str) -> None:
    def get(host: str) -> str:
        proxy = f"{scheme}://127.0.0.1:3128"
        return jail.run(["curl", "-sS", "-x", proxy, f"http://{host}/some/path"]).output

    assert get(ADDRESS) == f"GET {ADDRESS} /some/path 0\n"
    for host in ("[2606:4801::1111]", jail.hosts.address_of("web.example")):
        assert "GET" not in get(host)
        assert jail.events()[-1]["action"] == "deny"
