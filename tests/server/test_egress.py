"""What a sandbox may not reach is said in the cell, in an event, and in the REST API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.jupyter.server.egress import DENIAL_EVENTS
from tests.cli.running import Cli
from tests.helpers.waiting import wait_until

from .conftest import StartServer
from .running import Events, JupyterServer, open_notebook, the_sandbox

pytestmark = pytest.mark.slow

BY_NAME = """
import socket
for host in ("one.test", "one.test", "two.test", "three.test", "four.test", "five.test"):
    try: socket.getaddrinfo(host, 443)
    except socket.gaierror: print("no", host)
"""
THROUGH_THE_PROXY = """
import urllib.request
try: urllib.request.urlopen("https://elsewhere.example/")
except OSError as error: print({shown})
"""


@pytest.fixture
def server(make_server: StartServer) -> JupyterServer:
    server = make_server("--SandboxProvisioner.egress=data.example")
    server.start()
    return server


@pytest.fixture
def events(server: JupyterServer) -> Iterator[Events]:
    made = Events(server)
    yield made
    made.close()


def test_a_denial_is_said_where_the_person_looks(server: JupyterServer, events: Events) -> None:
    """Below the cell, in a few lines; in the event; in the REST API; in ``ps``."""
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    said = tab.run(BY_NAME).splitlines()
    name = the_sandbox()
    told = " ".join(line for line in said if not line.startswith("no "))
    assert (
        f"egress denied: one.test (no rule can permit this name). To allow it: "
        f"`sandbox-kernel policy set {name} +one.test` (for a port other than 80 and 443: "
        f"+one.test:PORT); for new sandboxes: egress in c.SandboxProvisioner.egress."
    ) in told
    assert told.count("To allow it") == 3
    assert f"egress denied: 2 more hosts; see `sandbox-kernel audit {name} --denied`." in told

    event = events.next(DENIAL_EVENTS)
    assert (event["kernel_id"], event["host"]) == (tab.kernel_id, "one.test")
    assert event["command"] == f"sandbox-kernel policy set {name} +one.test"
    assert events.next(DENIAL_EVENTS)["host"] == "two.test"

    [facts] = server.get("/sandbox-kernel/api/egress")["kernels"]
    assert (facts["kernel_id"], facts["sandbox"]) == (tab.kernel_id, name)
    assert (facts["egress"], facts["enforced_by"]) == (["data.example"], "gateway")
    assert facts["notebooks"] == ["n.ipynb"]
    assert [one["host"] for one in facts["denied"]][:2] == ["one.test", "two.test"]
    assert facts["denied"][0]["count"] == 4
    assert [one["action"] for one in facts["decisions"]] == ["deny"] * 12
    assert server.get(f"/sandbox-kernel/api/egress?kernel={tab.kernel_id}")["kernels"] == [facts]
    assert server.refused("GET", "/sandbox-kernel/api/egress?kernel=no")[0] == 404

    cli = Cli(Path())
    # An event waits for the word which cell it belongs to.
    wait_until(lambda: "running, 5 denied: five.test and 4 more" in cli("ps").stdout, "ps")
    [row] = json.loads(cli("ps", "--json").stdout)
    assert [one["host"] for one in row["denied"]][:2] == ["one.test", "two.test"]


def test_what_the_output_says_already_is_not_said_again(server: JupyterServer) -> None:
    """The reason phrase is what requests shows; a program that hides it gets the line."""
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    shown = tab.run(THROUGH_THE_PROXY.format(shown="error"))
    assert shown.count("egress denied: elsewhere.example:443") == 1
    hidden = tab.run(THROUGH_THE_PROXY.format(shown="'no'"))
    assert hidden.startswith("no\negress denied: elsewhere.example:443 (no rule allows it).")
    assert tab.run("print('fine')") == "fine\n"


def test_a_change_of_rules_in_a_running_server(server: JupyterServer) -> None:
    """The command and the server are two processes. The next server goes on with the change."""
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    ask = "import socket\ntry: print(socket.gethostbyname('one.test')[:4])\nexcept OSError: print()"
    assert "egress denied: one.test" in tab.run(ask)
    ran = Cli(Path())("policy", "set", the_sandbox(), "+one.test")
    assert ran.returncode == 0, ran.stderr
    assert tab.run(ask) == "127.\n"
    [facts] = server.get("/sandbox-kernel/api/egress")["kernels"]
    assert (facts["egress"], facts["changed"]) == (["one.test", "data.example"], True)
    server.end()
    server.start()
    tab.connect()
    assert tab.run(ask) == "127.\n"
    ran = Cli(Path())("policy", "set", the_sandbox(), "--reset")
    assert ran.returncode == 0, ran.stderr
    [facts] = server.get("/sandbox-kernel/api/egress")["kernels"]
    assert (facts["egress"], facts["changed"]) == (["data.example"], False)


def test_a_sandbox_without_a_network_says_so(make_server: StartServer) -> None:
    """What new users meet first: an error of name resolution, and pip's."""
    server = make_server()
    server.start()
    server.notebook("n.ipynb")
    _, tab = open_notebook(server, "n.ipynb")
    request = tab.begin("import urllib.request; urllib.request.urlopen('https://data.example/')")
    assert tab.until_done(request)["status"] == "error"
    said = " ".join(tab.text(request).split())
    assert said.startswith(
        "This kernel runs in a sandbox without a network. To let it reach a host"
    )
    assert "`sandbox-kernel install local --name NAME --egress HOST`" in said
    assert said.endswith("then shut this kernel down, and start it again.")
    named = tab.run("print(\"Failed to resolve 'data.example'\")")
    assert "SANDBOX_KERNEL_EGRESS=data.example" in named
    assert "To let" not in tab.run("print('fine')")
    installing = tab.run("%pip install --retries 1 cowsay")
    assert "name resolution" in installing
    assert installing.count("without a network") + installing.count("has no network") == 1
    assert server.get("/sandbox-kernel/api/egress")["kernels"][0]["enforced_by"] is None


def test_a_notebook_asks_for_less(server: JupyterServer) -> None:
    """Its own metadata narrows the rules, and the cell says where the denial comes from. What is
    more than granted is left out, and the notebook says so. What is wrong is an error."""
    model = server.notebook("n.ipynb")

    def ask_for(asked: object) -> None:
        metadata = {"sandbox_kernel": asked}
        content = {"cells": [], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
        body = {"type": "notebook", "format": "json", "content": content}
        server.request("PUT", f"/api/contents/{model['path']}", body)

    ask_for({"egress": ["other.example"], "memory_mib": 256, "readable": ["/root"]})
    session, tab = open_notebook(server, "n.ipynb")
    said = tab.run("import socket\ntry: socket.gethostbyname('data.example')\nexcept OSError: pass")
    told = " ".join(said.split())
    assert "asks for more than its kernel grants" in told
    assert "readable (no notebook can set it)" in told
    assert "egress other.example" in told
    assert "egress denied: data.example" in told
    assert " 256 MiB" in Cli(Path())("ps").stdout.replace("/256", " 256")
    assert "only within" in Cli(Path())("policy", "show", the_sandbox()).stdout
    server.request("DELETE", f"/api/sessions/{session}")

    ask_for({"egress": ["no host!"]})
    status, why = server.refused(
        "POST",
        "/api/sessions",
        {"path": "n.ipynb", "name": "n.ipynb", "type": "notebook", "kernel": {"name": "sandbox"}},
    )
    assert status == 500
    assert "wrong setting in its metadata" in " ".join(why.split())
