"""A hostile sandbox: what answers the host's connector is a program of ours.

Each behaviour of ``guest`` speaks the handshake and then breaks some rule. It runs in a real jail,
in place of the connector, with the guest package to build its frames from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.sandboxes.local.jail_start import GUEST_ROOT


def guest(behaviour: str) -> None:
    """Runs in the sandbox, with its own imports only; its source is sent as text."""
    import itertools
    import json
    import os
    import struct
    import time

    from sandbox_guest.wire.codec import PREAMBLE
    from sandbox_guest.wire.frames import (
        ACK,
        CREDIT,
        DATA,
        FIN,
        OPEN,
        PING,
        REFUSE,
        RESET,
        WELCOME,
        Frame,
        FrameDecoder,
        encode,
    )  # fmt: skip
    from sandbox_guest.wire.handshake import Welcome, decode_hello

    decoder = FrameDecoder()
    numbers = itertools.count(1)
    received, credit = 0, 2**18
    others: dict[int, int] = {}  # credit of other streams that the host has opened
    lines = b""
    waiting: list[dict[str, Any]] = []

    def send(
        type_: int,
        stream: int = 0,
        payload: bytes = b"",
        seq: int | None = None,
        ack: int | None = None,
    ) -> None:
        numbered = type_ >= OPEN
        number = (next(numbers) if seq is None else seq) if numbered else 0
        write(encode(Frame(type_, stream, number, received if ack is None else ack, payload)))

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    def listen() -> None:
        nonlocal received, lines, credit
        data = os.read(0, 65536)
        if not data:
            raise SystemExit
        for frame in decoder.feed(data):
            received = frame.seq or received
            if frame.type == DATA and frame.stream == 1:
                *whole, lines = (lines + bytes(frame.payload)).split(b"\n")
                waiting.extend(map(json.loads, whole))
            elif frame.type == CREDIT and frame.stream == 1:
                credit += struct.unpack(">I", frame.payload)[0]
            elif frame.type == CREDIT:
                others[frame.stream] += struct.unpack(">I", frame.payload)[0]
            elif frame.type == OPEN and frame.stream != 1:
                others[frame.stream] = 2**18

    def say(text: str | bytes) -> None:
        """On the control stream, as far as there is credit for it."""
        nonlocal credit
        data = text.encode() if isinstance(text, str) else text
        for at in range(0, len(data), 60000):
            piece = data[at : at + 60000]
            while credit < len(piece):
                listen()
            credit -= len(piece)
            send(DATA, 1, piece)

    def call() -> dict[str, Any]:
        """The next control call of the host."""
        while not waiting:
            listen()
        return waiting.pop(0)

    def answer(result: object, id_: int | None = None) -> None:
        request = call()
        text = json.dumps({"id": request["id"] if id_ is None else id_, "result": result})
        say(text + "\n")

    def launched() -> None:
        """Pretend that a kernel has been started."""
        answer({"generation": 1, "running": True, "pid": 7, "exit_code": None, "ended_at": None})

    def for_ever(act: Callable[[], object]) -> NoReturn:
        while True:
            act()

    if behaviour == "banner without end":
        for_ever(lambda: write(b"Welcome to your sandbox! " * 1000))
    write(PREAMBLE)
    if behaviour == "garbage for an answer":
        for_ever(lambda: write(os.urandom(65536)))
    if behaviour == "silence":
        time.sleep(600)
    frames: list[Frame] = []
    while not frames:
        frames = decoder.feed(os.read(0, 65536))
    hello = decode_hello(frames[0])
    numbers = itertools.count(hello.received + 1)
    again = hello.resume and "without end" in behaviour
    if again:
        with open("/tmp/received") as file:
            received = int(file.read())
    welcome = {
        "a welcome of another version": Welcome(2, hello.session, 0),
        "a welcome for another session": Welcome(1, "0" * 32, 0),
        "a welcome that has received too much": Welcome(1, hello.session, 10**30),
    }.get(behaviour, Welcome(1, hello.session, received))._asdict()
    if behaviour == "a welcome with wrong types":
        welcome["received"] = "all"
    if behaviour == "a refusal full of control characters":
        send(REFUSE, payload=json.dumps({"code": "\x1b[2J", "message": "\0" * 999}).encode())
        time.sleep(600)
    if behaviour.startswith("refused:"):
        code = behaviour.partition(":")[2]
        send(REFUSE, payload=json.dumps({"code": code, "message": "no"}).encode())
        time.sleep(600)
    send(WELCOME, payload=json.dumps(welcome).encode(), ack=0)
    if behaviour == "closes after each welcome":
        return

    # --- before the kernel is launched
    if behaviour == "garbage":
        call()
        for_ever(lambda: write(os.urandom(65536)))
    if behaviour == "an old welcome again and again":
        for _ in range(100):
            send(WELCOME, payload=json.dumps(welcome).encode(), ack=0)
        send(REFUSE, payload=b"{}")
    if behaviour == "acknowledges what was never sent":
        send(ACK, ack=10**6)
    if behaviour == "too much data":
        for_ever(lambda: send(DATA, 1, b" " * 60000))
    if behaviour == "data on a stream that never was":
        send(DATA, 999, b"x")
    if behaviour == "opens an odd stream":
        send(OPEN, 3, b"\0control")
    if behaviour == "too much credit":
        for_ever(lambda: send(CREDIT, 1, b"\x7f\xff\xff\xff"))
    if behaviour == "closes the control stream":
        send(FIN, 1)
    if behaviour == "resets the control stream":
        send(RESET, 1, b"\xff\x1b[2J" * 200)
    if behaviour == "control line without end":
        for_ever(lambda: say(b"[" * 60000))
    if behaviour == "deep control line":
        say("[" * 200000 + "\n")
    if behaviour == "a number of a million digits":
        say("9" * 100000 + "\n")
    for message in ('"event"', '["event"]', "null", "7", '{"id": []}', "{}", "\xff", '{"id": 1}'):
        if behaviour == "control message " + message:
            call()
            say(message + "\n")
    if behaviour == "an error with wrong types":
        say(json.dumps({"id": call()["id"], "error": ["kind", 7]}) + "\n")
    if behaviour == "status is a string":
        answer("running")
    if behaviour == "status with wrong types":
        answer({"generation": "one", "running": [1], "pid": -(10**40), "exit_code": {}})
    if behaviour == "status with huge numbers":
        answer({"generation": 10**400, "running": 0, "pid": 2**64, "exit_code": -(10**400)})
    if behaviour == "answers nothing":
        time.sleep(600)

    # --- with a kernel, as the host believes
    if not again:
        if behaviour in (
            *("names to ask for without end", "requests without end"),
            *("uploads that nobody takes", "odd ways out"),
        ):
            answer({"proxy": 3128, "names": True})
        launched()
        with open("/tmp/received", "w") as file:
            file.write(str(received))
    exited = {"event": "kernel_exited", "generation": 1, "exit_code": -9}
    if behaviour == "a thousand ends of one kernel":
        for _ in range(1000):
            say(json.dumps(exited) + "\n")
        for_ever(lambda: answer(12345))
    if behaviour == "a kernel that ends with wrong types":
        say(json.dumps({**exited, "generation": [], "exit_code": "9"}) + "\n")
        say(json.dumps({**exited, "exit_code": 10**400}) + "\n")
        for_ever(lambda: answer({"not": "text"}))
    if behaviour == "answers twice":
        request = call()
        for _ in range(1000):
            say(json.dumps({"id": request["id"], "result": {"sent": True}}) + "\n")
        for_ever(lambda: answer({}, id_=10**9))
    if behaviour == "events without end":
        text = b"".join(b'{"event": "%d"}\n' % n for n in range(3000))
        for_ever(lambda: say(text))
    if behaviour == "a recording of nothing":
        while not others:
            listen()
        (stream,) = others
        data = b'{"first": 0, "problem": ""}\n' + bytes(16 * 2**20 - 64)
        for at in range(0, len(data), 60000):
            piece = data[at : at + 60000]
            while others[stream] < len(piece):
                listen()
            others[stream] -= len(piece)
            send(DATA, stream, piece)
        send(FIN, stream)
    if behaviour == "pings without end":
        for_ever(lambda: send(PING, payload=b"x" * 65536))
    if behaviour == "acknowledges without end":
        flood = encode(Frame(ACK, 0, 0, received, b"")) * 4096
        for_ever(lambda: write(flood))
    if behaviour == "credits of nothing without end":
        for_ever(lambda: send(CREDIT, 1, b"\0\0\0\0"))
    if behaviour == "the same frame without end":
        flood = encode(Frame(CREDIT, 1, 1, received, b"\0\0\0\0")) * 4096
        for_ever(lambda: write(flood))
    if behaviour == "opens streams without end":
        ids = itertools.count(2, 2)
        for_ever(lambda: send(OPEN, next(ids), b"\0anything", ack=0))
    ids = itertools.count(2 * hello.received + 2, 2)  # behind those of earlier links
    if behaviour == "names to ask for without end":
        for n in itertools.count():
            stream = next(ids)
            send(OPEN, stream, b"\5egress:ports:n%d.example" % n)
            send(FIN, stream)
    if behaviour == "requests without end":
        asked = b"GET http://denied.example/ HTTP/1.1\r\nHost: denied.example\r\n\r\n"
        for n in itertools.count():
            stream = next(ids)
            send(OPEN, stream, b"\5egress:proxy", ack=0)
            send(DATA, stream, asked, ack=0)
            if n % 2:
                send(RESET, stream, ack=0)
    if behaviour == "uploads that nobody takes":
        for stream in itertools.islice(ids, 300):
            send(OPEN, stream, b"\5egress:tcp:7:a.example")
            for _ in range(4):
                send(DATA, stream, b"x" * 65536)
        say(json.dumps(exited) + "\n")
        answer("")
    if behaviour == "odd ways out":
        for target in (
            *(b"egress", b"egress:", b"egress:proxy:", b"egress:proxy:1", b"egress:tcp"),
            *(b"egress:tcp:", b"egress:tcp:443", b"egress:tcp:443:", b"egress:tcp::a.example"),
            *(b"egress:tcp:-1:a.example", b"egress:tcp:0:a.example", b"egress:tcp:65536:a.example"),
            *(b"egress:tcp:" + b"9" * 4000 + b":a.example", b"egress:tcp:\xc2\xb2:a.example"),
            *(b"egress:tcp:443:a\0.example", b"egress:tcp:443:127.0.0.1", b"egress:tcp:443:.."),
            *(
                b"egress:tcp:443:a.example\n",
                b"egress:tcp:443:\xff",
                b"egress:tcp:443:" + b"a" * 999,
            ),
            *(b"egress:ports:", b"egress:ports:a b", b"egress:ports:" + b"a" * 4000),
            *(b"egress:ports:\xd0\xb0", b"egress:what:a", b"kernel:shell", b"control", b""),
        ):
            send(OPEN, next(ids), b"\5" + target)
        question = next(ids)
        send(OPEN, question, b"\0egress:ports:a.example")
        send(DATA, question, b"more")
        say(json.dumps(exited) + "\n")
        answer("")
    if behaviour == "a log without end":
        say(json.dumps(exited) + "\n")
        answer("\x1b[2Jline\n" * 150000)
        for_ever(lambda: answer({}))
    time.sleep(600)


def program(behaviour: str) -> str:
    """The text of a Python program that behaves so."""
    return (
        "from __future__ import annotations\n"
        f"import sys; sys.path.insert(0, {GUEST_ROOT!r})\n"
        f"{inspect.getsource(guest)}\n"
        f"guest({behaviour!r})\n"
    )


class HostileClient(LocalClient):
    """The local jail, with a program of that behaviour where the connector should be."""

    def __init__(self, behaviour: str) -> None:
        super().__init__()
        self.behaviour = behaviour

    async def create(self, spec: Any) -> Any:
        return HostileHandle(await super().create(spec), self)


class HostileHandle:
    def __init__(self, inner: Any, client: HostileClient) -> None:
        self._inner = inner
        self._client = client
        self.connectors = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open_command(self, command: Command) -> Any:
        if command.duplex:
            self.connectors += 1
            text = program(self._client.behaviour)
            command = replace(command, argv=[command.program, "-I", "-S", "-c", text])
        return await self._inner.open_command(command)
