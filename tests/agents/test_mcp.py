"""``sandbox-kernel mcp`` with the official client: real servers, real kernels in local jails."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import nbformat
import pytest
from mcp import MCPError

from tests.agents.mcp_servers import Refused, Servers, png, servers_of_a_test
from tests.helpers.coroutines import finish
from tests.helpers.own_folders import own_folders
from tests.helpers.waiting import wait_until

TOOLS = {
    *("open", "run", "poll", "cancel", "input", "interrupt", "restart", "install", "list_files"),
    *("read_file", "write_file", "notebook", "save", "fork", "close"),
}
SHOW = "from IPython.display import Image, display\ndisplay(Image({data!r}))"
LINES = """import time
for n in range({count}):
    print('line', n, flush=True)
    time.sleep(0.1)"""


@pytest.fixture
def servers() -> Iterator[Servers]:
    with own_folders() as folder:
        yield from servers_of_a_test(folder)


@pytest.mark.parametrize(("mode", "revision"), [("legacy", "2025-11-25"), ("auto", "2026-07-28")])
async def test_tools_are_listed(servers: Servers, mode: str, revision: str) -> None:
    """To clients of both kinds of protocol; a sandbox is an argument, and nothing else is taken."""
    async with servers.agent(mode=mode) as agent:
        assert agent.client.protocol_version == revision
        assert "4 sandboxes at once (local)" in (agent.client.instructions or "")
        tools = {tool.name: tool for tool in (await agent.client.list_tools()).tools}
        assert set(tools) == TOOLS
        for name, tool in tools.items():
            assert tool.description
            assert tool.input_schema["additionalProperties"] is False
            assert (name == "open") != ("sandbox" in tool.input_schema["properties"])
        templates = (await agent.client.list_resource_templates()).resource_templates
        assert "sandbox://{sandbox}/jobs/{job}/text" in {one.uri_template for one in templates}
    async with servers.agent("--no-install", mode=mode) as agent:
        names = {tool.name for tool in (await agent.client.list_tools()).tools}
        assert names == TOOLS - {"install"}


async def test_cells_run_and_are_recorded(servers: Servers, tmp_path: Path) -> None:
    """Variables stay, an error is a result with its traceback, and the notebook is a real one."""
    async with servers.agent("--notebooks", str(tmp_path)) as agent:
        box = await agent.open(notebook="analysis.ipynb")
        first = await agent.call("run", sandbox=box, code="x = 6 * 7\nprint('hello')\nx")
        assert first.facts["status"] == "ok"
        assert first.facts["execution_count"] == 1
        assert "hello" in first.text
        assert "42" in first.text
        second = await agent.call("run", sandbox=box, code="x / 0")
        assert second.facts["status"] == "error"
        assert "ZeroDivisionError" in second.text
        assert "\x1b" not in second.text
        listed = await agent.call("notebook", sandbox=box)
        assert listed.facts["notebook"] == str(tmp_path / "analysis.ipynb")
        assert "x / 0" in listed.text
        closed = await agent.call("close", sandbox=box)
        assert closed.facts["status"] == "closed"
        with pytest.raises(Refused, match="There is no sandbox"):
            await agent.call("run", sandbox=box, code="x")
    notebook = nbformat.read(tmp_path / "analysis.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert [cell.source for cell in notebook.cells][-1] == "x / 0"
    assert await servers.sandboxes() == []


async def test_a_plot_is_an_image(servers: Servers) -> None:
    """A small picture is in the answer, a large one a resource."""
    small, large = png(20, 10), png(200, 100, os.urandom(60_000))
    async with servers.agent("--image-bytes", "5000") as agent:
        box = await agent.open()
        shown = await agent.call("run", sandbox=box, code=SHOW.format(data=small))
        (image,) = shown.images
        assert image.mime_type == "image/png"
        assert base64.b64decode(image.data) == small
        await agent.call(
            "write_file", sandbox=box, path="p/plot.png", base64=base64.b64encode(large).decode()
        )
        code = "from IPython.display import Image\nImage('p/plot.png')"
        linked = await agent.call("run", sandbox=box, code=code)
        assert not linked.images
        (link,) = linked.links
        assert link.size == len(large)
        contents = (await agent.client.read_resource(link.uri)).contents[0]
        assert contents.mime_type == "image/png"
        assert base64.b64decode(contents.blob) == large  # type: ignore[union-attr]


async def test_a_long_cell_is_polled_and_cancelled(servers: Servers) -> None:
    """The call answers before the cell ends, tells of progress, and the job goes on until it is
    cancelled; the kernel stays."""
    async with servers.agent("--call-seconds", "2") as agent:
        box = await agent.open()
        code = "x = 1\n" + LINES.format(count=10_000)
        answer = await agent.call("run", sandbox=box, code=code)
        assert answer.facts["status"] == "running"
        assert "line 0" in answer.text
        assert any("running" in words for words in agent.told)
        job = {"sandbox": box, "job": answer.facts["job"]}
        more = await agent.call("poll", **job, after=answer.facts["cursor"], wait=1)
        assert "line 0\n" not in more.text
        assert "line" in more.text
        queued = await agent.call("run", sandbox=box, code="x + 1", wait=0)
        assert queued.facts["status"] == "queued"
        cancelled = await agent.call("cancel", **job)
        assert cancelled.facts["status"] == "cancelled"
        assert "2" in (await agent.until_over(queued)).text


async def test_a_slow_start_has_a_name_at_once(servers: Servers) -> None:
    """The calls after it are told to come again, and then find the sandbox."""
    async with servers.agent("--call-seconds", "0.01") as agent:
        opened = await agent.call("open")
        assert opened.facts["status"] == "starting"
        box = opened.facts["sandbox"]
        early = await agent.once("run", sandbox=box, code="1")
        assert early.facts == {
            "sandbox": box,
            "status": "starting",
            "next": "Nothing was done yet. Call run again.",
        }
        answer = await agent.until_over(await agent.call("run", sandbox=box, code="6 * 7"))
        assert "42" in answer.text
        assert len((await agent.call("notebook", sandbox=box)).text.splitlines()) == 1


async def test_a_cell_that_asks_for_input_gets_it(servers: Servers) -> None:
    async with servers.agent() as agent:
        box = await agent.open()
        asked = await agent.call(
            "run", sandbox=box, code="name = input('Who? ')\nprint('Hi', name)"
        )
        assert asked.facts["status"] == "waiting for input"
        assert asked.facts["prompt"] == "Who? "
        job = asked.facts["job"]
        answered = await agent.call("input", sandbox=box, job=job, text="Ada")
        assert answered.facts["status"] == "ok"
        assert "Hi Ada" in answered.text
        with pytest.raises(Refused, match="does not wait for input"):
            await agent.call("input", sandbox=box, job=job, text="Ada")


async def test_restart_and_interrupt(servers: Servers) -> None:
    """An interrupted cell ends with KeyboardInterrupt; a restart loses variables, not files."""
    async with servers.agent() as agent:
        box = await agent.open()
        job = await agent.call("run", sandbox=box, code=LINES.format(count=10_000), wait=0.5)
        await agent.call("interrupt", sandbox=box)
        ended = await agent.until_over(job)
        assert "KeyboardInterrupt" in ended.text
        await agent.call("write_file", sandbox=box, path="kept.txt", text="kept")
        await agent.call("run", sandbox=box, code="x = 1")
        await agent.call("restart", sandbox=box)
        after = await agent.call("run", sandbox=box, code="print(open('kept.txt').read())\nx")
        assert "kept" in after.text
        assert "NameError" in after.text


async def test_files(servers: Servers) -> None:
    """Text in parts, pictures as such, other data as a resource; a folder as JSON lines."""
    async with servers.agent("--output-chars", "1000") as agent:
        box = await agent.open()
        text = "".join(f"{n}\n" for n in range(500))
        await agent.call("write_file", sandbox=box, path="deep/er/text.txt", text=text)
        await agent.call(
            "write_file",
            sandbox=box,
            path="deep/data.bin",
            base64=base64.b64encode(b"\xff\0").decode(),
        )
        listed = await agent.call("list_files", sandbox=box, path="deep")
        found = {one["path"]: one for one in map(json.loads, listed.text.splitlines())}
        assert found["deep/data.bin"]["size"] == 2
        assert found["deep/er"]["kind"] == "folder"
        parts: str = ""
        offset: int | None = 0
        while offset is not None:
            part = await agent.call(
                "read_file", sandbox=box, path="deep/er/text.txt", offset=offset
            )
            parts, offset = parts + part.text, part.facts.get("next_offset")
        assert parts == text
        (link,) = (await agent.call("read_file", sandbox=box, path="deep/data.bin")).links
        contents = (await agent.client.read_resource(link.uri)).contents[0]
        assert base64.b64decode(contents.blob) == b"\xff\0"  # type: ignore[union-attr]
        saved = await agent.call("save", sandbox=box)
        assert saved.facts["status"] == "saved"


async def test_long_output_is_cut_and_readable_in_parts(servers: Servers) -> None:
    """The middle is left out of the answer; a resource and ``offset`` have all of it."""
    async with servers.agent("--output-chars", "2000") as agent:
        box = await agent.open()
        answer = await agent.call("run", sandbox=box, code="for n in range(5000): print('row', n)")
        assert len(answer.text) <= 2000
        assert "row 4999" in answer.text
        (link,) = answer.links
        whole = "".join(f"row {n}\n" for n in range(5000)).strip()
        contents = (await agent.client.read_resource(link.uri)).contents[0]
        assert contents.text.strip() == whole  # type: ignore[union-attr]
        job, offset, parts = answer.facts["job"], 0, []
        for _ in range(3):
            part = await agent.call("poll", sandbox=box, job=job, offset=offset)
            parts.append(part.text)
            offset = part.facts["next_offset"]
        assert whole.startswith("".join(parts))


async def test_install_says_why_it_cannot(servers: Servers) -> None:
    """As a job, like any cell; without a way out, pip says so."""
    async with servers.agent() as agent:
        box = await agent.open()
        answer = await agent.until_over(
            await agent.call("install", sandbox=box, packages=["cowsay"])
        )
        assert "egress" in answer.text
        with pytest.raises(Refused, match="is not installed: a package is a name"):
            await agent.call("install", sandbox=box, packages=["--index-url=http://evil.example"])


# --- limits


async def test_calls_beyond_the_limits_are_refused(servers: Servers, tmp_path: Path) -> None:
    """Each with what is allowed, and the session goes on."""
    limits = ["--max-sandboxes", "1", "--max-queue", "2", "--code-chars", "1000"]
    limits += ["--file-bytes", "1000", "--notebooks", str(tmp_path)]
    async with servers.agent(*limits) as agent:
        box = await agent.open()
        refused = [
            ("open", {}, "1 sandboxes already, and 1 are allowed"),
            ("open", {"backend": "superserve"}, "'superserve' is not allowed here"),
            ("open", {"notebook": "../other.ipynb"}, "outside of the folders"),
            ("run", {"sandbox": box, "code": "#" * 1001}, "1000 are allowed"),
            ("write_file", {"sandbox": box, "path": "a", "text": "x" * 1001}, "1000 are allowed"),
            ("fork", {"sandbox": box}, "1 are allowed"),
        ]
        for tool, arguments, words in refused:
            with pytest.raises(Refused, match=words):
                await agent.call(tool, **arguments)
        sleep = {"sandbox": box, "code": "import time; time.sleep(1000)", "wait": 0}
        jobs = [await agent.call("run", **sleep) for _ in range(2)]
        with pytest.raises(Refused, match="2 cells run or wait"):
            await agent.call("run", **sleep)
        for job in reversed(jobs):
            await agent.call("cancel", sandbox=box, job=job.facts["job"])
        big = await agent.call("run", sandbox=box, code="open('big', 'w').write('x' * 1001)")
        assert big.facts["status"] == "ok"
        with pytest.raises(Refused, match="big"):
            await agent.call("read_file", sandbox=box, path="big")
        await agent.call("close", sandbox=box)
        await agent.open()


async def test_a_cell_beyond_its_time_is_interrupted(servers: Servers) -> None:
    async with servers.agent("--cell-seconds", "1") as agent:
        box = await agent.open()
        answer = await agent.call("run", sandbox=box, code=LINES.format(count=10_000))
        assert answer.facts["status"] == "cancelled"
        assert "line 0" in answer.text


async def test_a_sandbox_that_nobody_uses_is_ended(servers: Servers) -> None:
    """Not while a cell runs in it."""
    async with servers.agent("--idle-seconds", "1") as agent:
        box = await agent.open()
        answer = await agent.call("run", sandbox=box, code=LINES.format(count=30))
        assert answer.facts["status"] == "ok"
        await servers.no_sandbox_is_left()
        with pytest.raises(Refused, match=r"There is no sandbox|has ended"):
            await agent.call("run", sandbox=box, code="1")


async def test_what_a_backend_cannot_do_is_said(servers: Servers) -> None:
    async with servers.agent() as agent:
        with pytest.raises(Refused, match="local"):
            await agent.call("fork", sandbox=await agent.open())


# --- ends of servers and clients


@pytest.mark.slow
async def test_a_server_that_is_killed_loses_nothing(servers: Servers) -> None:
    """SIGKILL in the middle of a cell: the next server is given the sandbox's and the job's names,
    and reads every line once."""
    async with servers.agent("--call-seconds", "2") as agent:
        box = await agent.open()
        answer = await agent.call("run", sandbox=box, code=LINES.format(count=100))
        assert answer.facts["status"] == "running"
        job = answer.facts["job"]
        os.kill(servers.pid, signal.SIGKILL)
        with pytest.raises((MCPError, TimeoutError)):
            await agent.client.call_tool("poll", {"sandbox": box, "job": job}, 10)
    async with servers.agent("--call-seconds", "2") as agent:
        ended = await agent.until_over(await agent.call("poll", sandbox=box, job=job))
        assert ended.facts["status"] == "ok"
        lines = [line for line in ended.text.splitlines() if line.startswith("line")]
        assert lines == [f"line {n}" for n in range(100)]
        assert "99" in (await agent.call("run", sandbox=box, code="n")).text


async def test_two_servers_of_one_policy_take_turns(servers: Servers) -> None:
    """A client that starts a second server before the first has ended, or two that share a
    sandbox: each call finds it."""
    async with servers.agent() as first, servers.agent() as second:
        box = await first.open()
        await first.call("run", sandbox=box, code="x = 1")
        assert "2" in (await second.call("run", sandbox=box, code="x + 1")).text
        assert "3" in (await first.call("run", sandbox=box, code="x + 2")).text
        await second.call("close", sandbox=box)
        with pytest.raises(Refused, match=r"There is no sandbox|has ended"):
            await first.call("run", sandbox=box, code="x")


CLIENT = """
import asyncio, sys
from mcp import Client
from tests.agents.mcp_servers import Agent, Servers
from pathlib import Path

async def main():
    async with Servers(Path(sys.argv[1])).agent("--lease-seconds", "3") as agent:
        box = await agent.open()
        await agent.call("run", sandbox=box, code="import time; time.sleep(1000)", wait=0)
        print(box, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("whom", ["the client", "both"])
def test_no_sandbox_outlives_its_lease(servers: Servers, whom: str) -> None:
    """The client is killed, alone or with its server: the sandbox ends although a cell runs."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(servers.folder)], stdout=subprocess.PIPE
    )
    with client:
        try:
            assert client.stdout is not None
            box = client.stdout.readline().decode().strip()
            assert finish(servers.sandboxes()) == [box]
            if whom == "both":
                os.kill(servers.pid, signal.SIGKILL)
        finally:
            client.kill()
    finish(servers.no_sandbox_is_left())
    wait_until(lambda: not Path(f"/proc/{servers.pid}").exists(), "the server ends")


async def test_a_server_can_close_what_its_client_leaves(servers: Servers) -> None:
    async with servers.agent("--on-disconnect", "close") as agent:
        await agent.open()
        assert len(await servers.sandboxes()) == 1
    await servers.no_sandbox_is_left()


# --- hostile calls


async def test_another_sandbox_is_out_of_reach(servers: Servers) -> None:
    """Of another policy, of no MCP server, of nobody: the same words."""
    async with servers.agent("--memory-mib", "600") as other:
        theirs = await other.open()
        async with servers.agent() as agent:
            mine = await agent.open()
            job = (await agent.call("run", sandbox=mine, code="1")).facts["job"]
            for name in (theirs, theirs[:8], "mcp-0123456789abcdef", "../data", "x" * 63):
                for tool, rest in [("run", {"code": "1"}), ("close", {}), ("poll", {"job": job})]:
                    with pytest.raises(Refused, match="There is no sandbox"):
                        await agent.call(tool, sandbox=name, **rest)
                with pytest.raises(MCPError):
                    await agent.client.read_resource(f"sandbox://{name}/jobs/{job}/text")
            assert (await agent.call("run", sandbox=mine, code="2")).facts["status"] == "ok"
        assert (await other.call("run", sandbox=theirs, code="3")).facts["status"] == "ok"


async def test_hostile_calls_get_an_error_and_the_session_goes_on(servers: Servers) -> None:
    """Wrong types, sizes and names, paths that lead out, unknown tools and jobs."""
    async with servers.agent("--file-bytes", "100000", "--code-chars", "100000") as agent:
        box = await agent.open()
        own: dict[str, object] = {"sandbox": box}
        calls: list[tuple[str, dict[str, object]]] = [
            ("run", {}),
            ("run", own),
            ("run", {**own, "code": None}),
            ("run", {**own, "code": 3}),
            ("run", {**own, "code": ["1"]}),
            ("run", {**own, "code": {"a": {}}}),
            ("run", {**own, "code": "1", "wait": -1}),
            ("run", {**own, "code": "1", "wait": 1e300}),
            ("run", {**own, "code": "1", "wait": "soon"}),
            ("run", {**own, "code": "1", "egress": ["*"]}),
            ("run", {**own, "code": "1" * 2_000_000}),
            ("run", {"sandbox": 1, "code": "1"}),
            ("run", {"sandbox": box * 100, "code": "1"}),
            ("open", {"backend": "local; rm -rf /"}),
            ("open", {"memory_mib": 10**6}),
            ("open", {"notebook": "/etc/passwd"}),
            ("open", {"notebook": "\0"}),
            ("poll", {**own, "job": "nobody's"}),
            ("poll", {**own, "job": "../../x", "after": 0}),
            ("poll", {**own, "job": "x", "after": -1}),
            ("poll", {**own, "job": "x" * 10_000}),
            ("cancel", {**own, "job": ""}),
            ("input", {**own, "job": "x", "text": "y" * 1_000_000}),
            ("read_file", {**own, "path": "/etc/passwd"}),
            ("read_file", {**own, "path": "../../etc/passwd"}),
            ("read_file", {**own, "path": "a\0b"}),
            ("read_file", {**own, "path": "none"}),
            ("read_file", {**own, "path": "x" * 5000}),
            ("list_files", {**own, "path": ".."}),
            ("write_file", {**own, "path": "../out", "text": "x"}),
            ("write_file", {**own, "path": "/tmp/out", "text": "x"}),
            ("write_file", {**own, "path": "a"}),
            ("write_file", {**own, "path": "a", "text": "x", "base64": "eA=="}),
            ("write_file", {**own, "path": "a", "base64": "***"}),
            ("write_file", {**own, "path": "a", "text": "x" * 1_000_000}),
            ("install", {**own, "packages": []}),
            ("install", {**own, "packages": ["$(id)"]}),
            ("install", {**own, "packages": ["-r/etc/passwd"]}),
            ("install", {**own, "packages": ["x"] * 1000}),
            ("nothing", own),
            ("__init__", {}),
        ]
        for tool, arguments in calls:
            with pytest.raises(Refused) as refused:
                await agent.call(tool, **arguments)
            assert 0 < len(str(refused.value)) < 5000
            assert "Traceback" not in str(refused.value)
        for uri in (
            "sandbox://x/files/../../etc/passwd",
            f"sandbox://{box}/files//etc/passwd",
            "file:///etc/passwd",
            f"sandbox://{box}/jobs/x/pictures/y",
            "x" * 10_000,
        ):
            with pytest.raises(MCPError):
                await agent.client.read_resource(uri)
        assert "4" in (await agent.call("run", **own, code="2 + 2")).text


NOISY = """
import os, sys
from sandbox_kernel.agents.mcp.sandboxes import Sandboxes
from sandbox_kernel.cli import main

use = Sandboxes.use

def noisy(self, *rest):
    print("noise of Python", flush=True)
    os.system("echo noise of a child")
    return use(self, *rest)

Sandboxes.use = noisy
sys.exit(main())
"""


def test_stdout_carries_frames_only(servers: Servers) -> None:
    """Whatever is printed, warned about or sent: each line is an answer, and junk is survived."""
    box = "mcp-0123456789abcdef"
    lines = [
        "this is no JSON",
        "[]",
        '{"jsonrpc": "2.0"}',
        '{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": "\\ud800"}',
        "x" * 100_000_000,
        json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping", "params": {"x": "x" * 10**8}}),
        json.dumps(
            {
                "jsonrpc": "2.0",
                "id": 2,
                "method": "initialize",
                "params": {
                    "protocolVersion": "2025-11-25",
                    "capabilities": {},
                    "clientInfo": {"name": "raw", "version": "1"},
                },
            }
        ),
        '{"jsonrpc": "2.0", "method": "notifications/initialized"}',
        json.dumps(
            {
                "jsonrpc": "2.0",
                "id": 3,
                "method": "tools/call",
                "params": {"name": "run", "arguments": {"sandbox": box, "code": "1"}},
            }
        ),
        "",
    ]
    server = subprocess.Popen(
        [sys.executable, "-c", NOISY, "mcp"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "always"},
    )
    with server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("\n".join(lines).encode())
        server.stdin.flush()
        answers: list[dict[str, Any]] = []
        while not answers or answers[-1].get("id") != 3:
            answers.append(json.loads(server.stdout.readline()))
        out, errors = server.communicate(timeout=60)
    assert out == b""
    assert b"noise of Python" in errors
    assert b"noise of a child" in errors
    assert server.returncode == 0
    assert all(answer["jsonrpc"] == "2.0" for answer in answers)
    assert "error" in next(answer for answer in answers if answer.get("id") == 7)
    assert answers[-1]["result"]["isError"] is True


# --- HTTP


async def test_http_answers_the_official_client(servers: Servers) -> None:
    """Also over a restart of the server, in the middle of a session and a cell."""
    url = servers.http("--port", "0")
    port = url.split(":")[2].partition("/")[0]
    async with servers.http_agent(url) as agent:
        box = await agent.open()
        answer = await agent.call("run", sandbox=box, code=LINES.format(count=50), wait=0.5)
        servers.started[0].kill()
        servers.started[0].wait()
        again = servers.http("--port", port)
        assert again == url
        ended = await agent.until_over(answer)
        assert ended.facts["status"] == "ok"
        assert "line 49" in ended.text
    async with servers.http_agent(url, mode="legacy") as agent:
        assert "49" in (await agent.call("run", sandbox=box, code="n")).text
        assert (await agent.call("close", sandbox=box)).facts["status"] == "closed"


def test_http_refuses_whom_it_should(servers: Servers) -> None:
    """A wrong token, Host or Origin, on any path; a body that is too large."""
    url = servers.http("--port", "0", "--file-bytes", "1000")
    right = {
        "Authorization": f"Bearer {servers.token()}",
        "Accept": "application/json, text/event-stream",
    }
    origin = {"Origin": "http://evil.example"}
    with httpx2.Client(timeout=60) as client:
        for path in (url, url.replace("/mcp", "/"), url.replace("/mcp", "/other")):
            for headers, code in [
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 401),
                ({**right, "Host": "evil.example"}, 421),
                ({**right, **origin}, 403),
                (origin, 403),
            ]:
                assert client.post(path, headers=headers, json={}).status_code == code
                assert client.get(path, headers=headers).status_code == code
        assert client.post(url, headers=right, content=b"x" * 2_000_000).status_code == 413
        assert client.post(url, headers=right, json={"x": 1}).status_code == 400


def test_http_ends_with_ctrl_c(servers: Servers) -> None:
    servers.http("--port", "0")
    (server,) = servers.started
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0


def test_a_missing_package_is_named(servers: Servers) -> None:
    """The command says what it needs if its package is missing."""
    block = "import sys; sys.modules['mcp'] = None\nfrom sandbox_kernel.cli import main\nmain()"
    ran = subprocess.run(
        [sys.executable, "-c", block, "mcp"], capture_output=True, text=True, check=False
    )
    assert "pip install 'sandbox-kernel[mcp]'" in ran.stderr
    assert ran.stdout == ""
