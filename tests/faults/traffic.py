"""Traffic of all kinds between a client and a real kernel, each message of which is accounted for.

Every cell has exactly one right sequence of messages. Anything that is lost, doubled or reordered
on any channel, in either direction, is an AssertionError in the next exchange at the latest.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.kernels.live import PATIENCE, Live

Message = dict[str, Any]

_SETUP = """
import hashlib, time
from IPython.display import display
kernel = get_ipython().kernel
interrupts = counter = 0

def noise(seed, size):
    return hashlib.shake_128(seed.encode()).digest(size)

def opened(comm, message):
    @comm.on_msg
    def echo(message):
        comm.send(message["content"]["data"], buffers=[bytes(b)[::-1] for b in message["buffers"]])

kernel.comm_manager.register_target("echo", opened)
"""


def noise(seed: str, size: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(size)


def at_once(talk: Callable[[int], None], number: int) -> None:
    """Run ``talk(0)``, ``talk(1)``, ... in a thread each. A blocking client needs a loop there."""

    def run(n: int) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            talk(n)
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    with ThreadPoolExecutor(number) as threads:
        for done in [threads.submit(run, n) for n in range(number)]:
            done.result()


class Traffic:
    """One client's conversation with one kernel. ``messages`` counts what has been checked."""

    def __init__(self, live: Live, seed: int) -> None:
        self.messages = 0
        self._live = live
        self._client = live.client
        self._rng = random.Random(seed)
        self._seen: set[str] = set()
        self._turn = 0
        self._counter = 0
        self._interrupts = 0
        live.ok(_SETUP)
        self._comm("comm_open", {"target_name": "echo", "data": {}}, [])
        while self._client.get_iopub_msg(timeout=PATIENCE)["content"] != {
            "execution_state": "idle"
        }:
            pass
        live.ok("0")  # behind this, nothing of the start is left on any channel

    def round(self) -> None:
        """One exchange of every kind, in some order."""
        exchanges: list[Callable[[], None]] = [
            self.streams,
            self.displays,
            self.binary_displays,
            self.comms,
            self.input,
            self.interrupt,
            self.big_output,
            self.big_input,
            self.pipelined,
        ]
        self._rng.shuffle(exchanges)
        for exchange in exchanges:
            self._turn += 1
            exchange()

    # --- the kinds

    def streams(self) -> None:
        lines = [f"{self._turn}:{n}:{'x' * (n % 97)}\n" for n in range(150)]
        cell = self._send(
            "for n in range(150):\n"
            f"    print(f'{self._turn}:{{n}}:' + 'x' * (n % 97), flush=n % 10 == 0)"
        )
        assert self._text(self._outputs(cell)) == "".join(lines)
        self._reply(cell)

    def displays(self) -> None:
        cell = self._send(
            f"for n in range(60): display({{'text/plain': f'{self._turn}:{{n}}'}}, raw=True)"
        )
        shown = [self._plain(m, "display_data") for m in self._outputs(cell)]
        assert shown == [f"{self._turn}:{n}" for n in range(60)]
        self._reply(cell)

    def binary_displays(self) -> None:
        cell = self._send(
            "for n in range(8):\n"
            f"    seed = f'{self._turn}:{{n}}'\n"
            "    content = {'data': {'text/plain': seed}, 'metadata': {}, 'transient': {}}\n"
            "    kernel.session.send(kernel.iopub_socket, 'display_data', content,\n"
            "        parent=kernel.get_parent(), buffers=[noise(seed, n * 7000), noise(seed, n)])"
        )
        for n, message in enumerate(self._outputs(cell)):
            seed = f"{self._turn}:{n}"
            assert self._plain(message, "display_data") == seed
            got = [bytes(b) for b in message["buffers"]]
            assert got == [noise(seed, n * 7000), noise(seed, n)]
        assert n == 7
        self._reply(cell)

    def comms(self) -> None:
        sent = []
        for n in range(12):
            buffers = [noise(f"{self._turn}:{n}", 3000 * n), b"", b"\0\xff\n" * n]
            sent.append(
                (self._comm("comm_msg", {"data": {"n": [self._turn, n]}}, buffers), buffers)
            )
        for n, (id_, buffers) in enumerate(sent):
            (echo,) = self._outputs(id_, shell=False)
            assert echo["content"]["data"] == {"n": [self._turn, n]}
            assert [bytes(b) for b in echo["buffers"]] == [b[::-1] for b in buffers]

    def input(self) -> None:
        cell = self._send(f"[input('{self._turn}:%d' % n) for n in range(3)]", allow_stdin=True)
        for n in range(3):
            request = self._take(self._client.get_stdin_msg(timeout=PATIENCE))
            assert request["content"]["prompt"] == f"{self._turn}:{n}"
            self._client.input(f"answer {self._turn}:{n}")
            self.messages += 1
        (result,) = self._outputs(cell)
        answers = [f"answer {self._turn}:{n}" for n in range(3)]
        assert self._plain(result, "execute_result") == str(answers)
        self._reply(cell)

    def interrupt(self) -> None:
        self._interrupts += 1
        cell = self._send(
            "try:\n"
            "    print('waits')\n"
            "    while True: time.sleep(0.01)\n"
            "except KeyboardInterrupt:\n"
            "    interrupts += 1\n"
            "    print('interrupted', interrupts)"
        )
        outputs = self._outputs(cell)
        said = ""
        while not said.endswith("\n"):
            said += self._text([next(outputs)])
        assert said == "waits\n"
        self._live.manager.interrupt_kernel()
        assert self._text(outputs) == f"interrupted {self._interrupts}\n"
        self._reply(cell)

    def big_output(self) -> None:
        size = self._rng.randint(200_000, 1_500_000)
        cell = self._send(f"display({{'text/plain': '{self._turn % 10}' * {size}}}, raw=True)")
        (message,) = self._outputs(cell)
        assert self._plain(message, "display_data") == str(self._turn % 10) * size
        self._reply(cell)

    def big_input(self) -> None:
        text = noise(str(self._turn), self._rng.randint(100_000, 400_000)).hex()
        code = f"len('{text}')"
        cell = self._send(code)
        (result,) = self._outputs(cell, code)
        assert self._plain(result, "execute_result") == str(len(text))
        self._reply(cell)

    def pipelined(self) -> None:
        cells = [self._send("counter += 1; counter") for _ in range(20)]
        for cell in cells:
            self._counter += 1
            (result,) = self._outputs(cell)
            assert self._plain(result, "execute_result") == str(self._counter)
        for cell in cells:
            self._reply(cell)

    # --- accounting

    def _send(self, code: str, *, allow_stdin: bool = False) -> str:
        self.messages += 1
        return str(self._client.execute(code, allow_stdin=allow_stdin))

    def _comm(self, kind: str, content: dict[str, Any], buffers: list[bytes]) -> str:
        session = self._client.session
        message = session.msg(kind, {"comm_id": "the one", **content})
        session.send(self._client.shell_channel.socket, message, buffers=buffers)
        self.messages += 1
        return str(message["header"]["msg_id"])

    def _take(self, message: Message) -> Message:
        id_ = message["header"]["msg_id"]
        assert id_ not in self._seen, f"this message came twice: {message}"
        self._seen.add(id_)
        self.messages += 1
        return message

    def _iopub(self, parent: str, kind: str | None = None) -> Message:
        message = self._take(self._client.get_iopub_msg(timeout=PATIENCE))
        found = message["parent_header"].get("msg_id")
        assert found == parent, f"a message of another request came in between: {message}"
        assert kind in (None, message["msg_type"]), f"{kind} was due, but this came: {message}"
        return message

    def _outputs(
        self, parent: str, code: str | None = None, *, shell: bool = True
    ) -> Iterator[Message]:
        """What a request gives on iopub between "busy" and "idle"."""
        assert self._iopub(parent, "status")["content"] == {"execution_state": "busy"}
        if shell:
            echoed = self._iopub(parent, "execute_input")["content"]["code"]
            assert code in (None, echoed)
        while (message := self._iopub(parent))["msg_type"] != "status":
            yield message
        assert message["content"] == {"execution_state": "idle"}

    def _reply(self, cell: str) -> None:
        reply = self._take(self._client.get_shell_msg(timeout=PATIENCE))
        assert reply["parent_header"]["msg_id"] == cell, f"another reply was due: {reply}"
        assert reply["content"]["status"] == "ok", reply["content"]

    @staticmethod
    def _plain(message: Message, kind: str) -> str:
        assert message["msg_type"] == kind, message
        return str(message["content"]["data"]["text/plain"])

    @staticmethod
    def _text(messages: Any) -> str:
        text = ""
        for message in messages:
            assert message["msg_type"] == "stream", message
            text += message["content"]["text"]
        return text
