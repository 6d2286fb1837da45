"""All kinds of messages arrive as they were sent: large, many, binary, urgent, encrypted."""

from __future__ import annotations

from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.helpers.ports import free_port

from .conftest import StartKernel
from .live import PATIENCE, Live, next_comm, raw_messages, send_comm, until_message, until_reply

MEGABYTE = 2**20


def test_input_and_getpass(live: Live) -> None:
    """A cell may ask; the answers go in over the stdin channel, in order."""
    ran = live.ok(
        "import getpass\nprint([input('name: '), getpass.getpass('word: '), input()])",
        answers=["Ada", "s3cret", ""],
    )
    assert ran.text().strip() == "['Ada', 's3cret', '']"


def test_input_is_refused_to_a_client_without_stdin(live: Live) -> None:
    """A client that cannot answer is not asked."""
    assert live.run("input()").reply["ename"] == "StdinNotImplementedError"


def test_interrupt_ends_input(live: Live) -> None:
    """A cell that waits for an answer can be interrupted."""
    cell = live.client.execute("input('never answered')", allow_stdin=True)
    live.client.get_stdin_msg(timeout=PATIENCE)
    live.manager.interrupt_kernel()
    assert until_reply(live.client, cell)["ename"] == "KeyboardInterrupt"


@pytest.mark.slow
def test_output_of_100_megabytes(live: Live) -> None:
    """One message of 100 MB, then the same as a stream of text: not a byte is missing."""
    ran = live.ok(
        "from IPython.display import display\n"
        f"block = bytes(range(33, 127)).decode() * {100 * MEGABYTE // 94}\n"
        "display({'text/plain': block}, raw=True)\n"
        "import sys; sys.stdout.write(block); None"
    )
    block = bytes(range(33, 127)).decode() * (100 * MEGABYTE // 94)
    assert ran.contents("display_data")[0]["data"]["text/plain"] == block
    assert ran.text() == block


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_small_outputs(live: Live) -> None:
    """100,000 outputs, each a message of its own, all there and in order.

    A ZMQ publisher drops what is too much for its queue, also in a plain kernel; so the queue is
    lifted here, and what is tested is the way from there.
    """
    live.ok("get_ipython().kernel.iopub_thread.socket.sndhwm = 0")
    live.client.iopub_channel.socket.rcvhwm = 0
    cell = live.client.execute(
        "from IPython.display import display\n"
        "for n in range(100_000): display({'text/plain': str(n)}, raw=True)"
    )
    seen = []
    for message in raw_messages(live.client, cell):
        if message["msg_type"] == "display_data":
            seen.append(int(message["content"]["data"]["text/plain"]))
    assert seen == list(range(100_000))


def test_displays_are_updated_in_place(live: Live) -> None:
    """display_id links an update to what it replaces."""
    ran = live.ok("h = display('first', display_id='d1')\nh.update('second')")
    (first,), (second,) = ran.contents("display_data"), ran.contents("update_display_data")
    assert first["transient"] == second["transient"] == {"display_id": "d1"}
    assert second["data"]["text/plain"] == "'second'"


def test_comms_carry_binary_buffers_both_ways(live: Live) -> None:
    """A comm that the client opens; what it sends comes back with its buffers."""
    live.ok(
        "def opened(comm, message):\n"
        "    @comm.on_msg\n"
        "    def echo(message):\n"
        "        comm.send({'got': message['content']['data']},\n"
        "                  buffers=[bytes(b)[::-1] for b in message['buffers']])\n"
        "    comm.send({'opened': [len(b) for b in message['buffers']]})\n"
        "get_ipython().kernel.comm_manager.register_target('echo', opened)"
    )
    buffers = [bytes(range(256)) * 5000, b"", b"\0\xff\n"]
    opening = {"comm_id": "c1", "target_name": "echo", "data": {}}
    send_comm(live, "comm_open", opening, buffers)
    answer = next_comm(live)
    assert answer["content"]["data"] == {"opened": [1280000, 0, 3]}
    send_comm(live, "comm_msg", {"comm_id": "c1", "data": {"n": 1}}, buffers)
    answer = next_comm(live)
    assert answer["content"] == {"comm_id": "c1", "data": {"got": {"n": 1}}}
    assert [bytes(b) for b in answer["buffers"]] == [b[::-1] for b in buffers]


def test_widgets(live: Live) -> None:
    """ipywidgets: the kernel opens the model, the client moves the slider."""
    pytest.importorskip("ipywidgets")
    ran = live.ok(
        "from ipywidgets import IntSlider, Image\n"
        "s = IntSlider(3)\n"
        "s.observe(lambda change: print('moved to', change['new']), 'value')\n"
        "i = Image(value=bytes(range(256)))"
    )
    opened = [m for m in ran.messages if m["msg_type"] == "comm_open"]
    slider = next(m for m in opened if m["content"]["data"]["state"].get("value") == 3)
    image = next(m for m in opened if m["content"]["data"]["buffer_paths"] == [["value"]])
    assert bytes(image["buffers"][0]) == bytes(range(256))
    update = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    send_comm(live, "comm_msg", {"comm_id": slider["content"]["comm_id"], "data": update}, [])
    assert live.ok("s.value").value == "7"


def control(live: Live, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """A request on the control channel, and its reply."""
    message = live.client.session.msg(kind, content)
    live.client.control_channel.send(message)
    while True:
        reply = live.client.get_control_msg(timeout=PATIENCE)
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            assert reply["content"].get("status", "ok") == "ok", reply["content"]
            return dict(reply["content"])


def test_a_subshell_answers_while_the_main_shell_is_busy(live: Live) -> None:
    """ipykernel 7: a second shell in the same kernel, over the same channel."""
    info = live.client.kernel_info(reply=True, timeout=PATIENCE)["content"]
    if "kernel subshells" not in info.get("supported_features", []):
        pytest.skip("this ipykernel has no subshells")
    subshell = control(live, "create_subshell_request", {})["subshell_id"]
    busy = live.begin("import threading; gate = threading.Event(); print('waits'); gate.wait()")
    request = live.client.session.msg("execute_request", {"code": "gate.set()", "silent": False})
    request["header"]["subshell_id"] = subshell
    live.client.shell_channel.send(request)
    replies: dict[str, Any] = {}
    while len(replies) < 2:
        reply = live.client.get_shell_msg(timeout=PATIENCE)
        replies[reply["parent_header"]["msg_id"]] = reply["content"]["status"]
    # The cell in the main shell can only have ended because the one in the subshell was run.
    assert replies == {request["header"]["msg_id"]: "ok", busy: "ok"}
    assert control(live, "list_subshell_request", {})["subshell_id"] == [subshell]
    control(live, "delete_subshell_request", {"subshell_id": subshell})


class Debugger:
    """The debugger of a notebook: DAP requests inside debug_request on the control channel."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._seq = 0

    def __call__(self, command: str, **arguments: Any) -> dict[str, Any]:
        self._seq += 1
        content = {
            "type": "request",
            "seq": self._seq,
            "command": command,
            "arguments": arguments,
        }
        answer = control(self._live, "debug_request", content)
        assert answer["success"], answer
        return dict(answer.get("body") or {})

    def event(self, name: str) -> dict[str, Any]:
        while True:
            message = self._live.client.get_iopub_msg(timeout=PATIENCE)
            if message["msg_type"] == "debug_event" and message["content"]["event"] == name:
                return dict(message["content"]["body"])


def test_debugger(live: Live) -> None:
    """A breakpoint in a cell stops it; stack and variables can be seen; it goes on."""
    info = live.client.kernel_info(reply=True, timeout=PATIENCE)["content"]
    assert "debugger" in info["supported_features"]
    debug = Debugger(live)
    debug(
        "initialize",
        clientID="test",
        adapterID="",
        pathFormat="path",
        linesStartAt1=True,
        columnsStartAt1=True,
        supportsVariableType=True,
    )
    debug("attach")
    code = "def f(x):\n    y = x + 1\n    return y\nf(41)"
    source = debug("dumpCell", code=code)["sourcePath"]
    placed = debug(
        "setBreakpoints", source={"path": source}, breakpoints=[{"line": 3}], sourceModified=False
    )
    assert [b["verified"] for b in placed["breakpoints"]] == [True]
    debug("configurationDone")
    cell = live.client.execute(code)
    stopped = debug.event("stopped")
    assert stopped["reason"] == "breakpoint"
    frames = debug("stackTrace", threadId=stopped["threadId"])["stackFrames"]
    assert (frames[0]["name"], frames[0]["line"], frames[0]["source"]["path"]) == ("f", 3, source)
    scopes = debug("scopes", frameId=frames[0]["id"])["scopes"]
    variables = debug("variables", variablesReference=scopes[0]["variablesReference"])
    assert {v["name"]: v["value"] for v in variables["variables"] if v["name"] in "xy"} == {
        "x": "41",
        "y": "42",
    }
    debug("continue", threadId=stopped["threadId"])
    assert until_reply(live.client, cell)["status"] == "ok"
    until_message(live.client, cell, "status", execution_state="idle")
    debug("disconnect", restart=False, terminateDebuggee=False)


@pytest.mark.skipif(
    not hasattr(KernelManager, "transport_encryption"), reason="jupyter_client before 8.10"
)
def test_encryption(start_kernel: StartKernel) -> None:
    """CurveZMQ passes end to end: the tunnel carries what it cannot read."""
    live = start_kernel(manager={"transport_encryption": "required"})
    assert live.manager.get_connection_info()["curve_publickey"]
    assert live.ok("6 * 7").value == "42"
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("6 * 7").value == "42"


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_transport_inside_the_sandbox(start_kernel: StartKernel, transport: str) -> None:
    """A kernel that knows TCP only gets ports on the sandbox's own loopback."""
    live = start_kernel(guest_transport=transport)
    ran = live.ok(
        "import ipykernel, json; json.load(open(ipykernel.get_connection_file()))['transport']"
    )
    assert ran.value == repr(transport)


def test_named_tcp_ports_on_the_host(start_kernel: StartKernel) -> None:
    """Ports that the user has named are used, so that a client elsewhere can count on them."""
    first = free_port()
    live = start_kernel(manager={"shell_port": first})
    info = live.manager.get_connection_info()
    assert (info["transport"], info["shell_port"]) == ("tcp", first)
    assert live.ok("1 + 1").value == "2"
