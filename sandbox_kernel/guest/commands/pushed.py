"""Runs a command where the provider has no stdin, no signals and only text (Islo).

The provider runs this program instead (``guest_program.program`` makes its text), with a mode and
a JSON object as arguments. Nothing of it stays in the sandbox.

``stream``  all output of the command goes to stdout as records. Input from the host arrives as
            numbered files in a folder, one a push, and a byte in a FIFO beside them wakes this
            program. A push that comes twice is done once; one that overtakes another waits for it.
``run``     the command to its end, within its time, with its output kept up to a bound. If the
            request arrives twice, the second one reports the result of the first.
``spawn``   the command outlives this program; its output goes to the sandbox's log.
``setup``   makes the folders, and says which sandbox this is.
``goodbye`` asks everything in the sandbox to end, and waits a little.

A record is a letter, base64 or digits, and ``;``. Line ends mean nothing. ``o`` stdout, ``e``
stderr (``O`` and ``E`` their ends), ``a`` pushes done so far, ``u`` an urgent push done, ``x`` exit
code, ``s`` started, ``f`` could not be started, ``h`` still here, with the number of the first push
that is missing, ``r`` the answer of all other modes.
"""

from __future__ import annotations

import binascii
import functools
import json
import os
import selectors
import signal
import sys
import time
from collections import deque

from ..loop import Loop
from . import start
from .stdio import CommandInput, CommandOutput, Ends

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque

OUTPUT_ROOM = 256 * 1024
"""Bytes of encoded output that may wait for the provider's stream."""
STDIN_ROOM = 256 * 1024
HEARTBEAT = 10.0
INLINE = 32 * 1024
"""A longer result is left in a file, for the host to fetch."""
KEEP = 3600.0
LOOK = 0.5
"""Seconds between two checks whether the host has given up."""


def record(kind: str, payload: bytes = b"") -> bytes:
    return kind.encode() + payload + b";\n"


def encoded(data: bytes) -> bytes:
    return binascii.b2a_base64(data, newline=False)


def start_command(config: dict[str, Any], streams: list[int]) -> int:
    """Start the command of a request. OSError says why it cannot be started."""
    terminal = bool(config.get("tty"))
    cwd = config.get("cwd") or "."
    return start.start(config["argv"], os.environ, cwd, streams, terminal=terminal)


class RunningCommand:
    """A command and its outputs, on a loop that stops when all have ended. Subclasses get each
    piece of ``output`` with its kind, ``o`` or ``e``."""

    def __init__(self, pid: int, outputs: list[int]) -> None:
        self.pid = pid
        self.code: int | None = None
        self.loop = Loop(selectors.PollSelector())
        self.outputs = {
            kind: CommandOutput(
                self.loop,
                fd,
                functools.partial(self.output, kind),
                functools.partial(self._output_ended, kind),
            )
            for kind, fd in zip("oe", outputs)
        }
        self.loop.watch_children(self.reap)

    def output(self, kind: str, data: bytes) -> None:
        raise NotImplementedError

    def output_ended(self, kind: str) -> None: ...

    def exited(self, code: int) -> None: ...

    def kill(self) -> None:
        """Kill the command with its group, also if it has ended and left others there."""
        start.signal_group(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.exited(self.code)
        self.stop_if_over()

    def _output_ended(self, kind: str) -> None:
        del self.outputs[kind]
        self.output_ended(kind)
        self.stop_if_over()

    def stop_if_over(self) -> None:
        if self.code is not None and not self.outputs:
            self.loop.stop()


class PushedCommand(RunningCommand):
    """One command of the mode ``stream``."""

    def __init__(self, pid: int, ends: Ends, folder: str, *, terminal: bool) -> None:
        super().__init__(pid, ends.outputs)
        self._folder = folder
        self._unsent = bytearray()
        self._next = 0
        self._taken = self._given = 0
        self._unacknowledged: Deque[tuple[int, int]] = deque()
        """Count of pushes to acknowledge when so many bytes have been taken."""
        self._urgent: set[str] = set()
        self._terminated = self._killed = False
        self._said_at = self.loop.time()
        self._stdin = CommandInput(self.loop, ends.stdin, self._stdin_taken, terminal=terminal)
        self._wake = os.open(os.path.join(folder, "w"), os.O_RDWR | os.O_NONBLOCK)
        os.set_blocking(1, False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._terminate)  # reap is called next

    def run(self) -> None:
        self._put("s", b"%d" % self.pid)
        self.loop.add_reader(self._wake, self._look)
        self.loop.call_later(HEARTBEAT, self._beat)
        self.reap()
        self._look()
        self.loop.run()

    # --- out

    def _put(self, kind: str, payload: bytes = b"") -> None:
        if not self._unsent:
            self.loop.add_writer(1, self._flush)
        self._unsent += record(kind, payload)
        self._said_at = self.loop.time()

    def _flush(self) -> None:
        try:
            del self._unsent[: os.write(1, self._unsent[:65536])]
        except BlockingIOError:
            return
        except OSError:
            self.kill()  # nobody listens any more
            return self.loop.stop()
        if not self._unsent:
            self.loop.remove_writer(1)
            self.stop_if_over()
        if len(self._unsent) < OUTPUT_ROOM:
            for output in self.outputs.values():
                output.resume()

    def output(self, kind: str, data: bytes) -> None:
        self._put(kind, encoded(data))
        if len(self._unsent) >= OUTPUT_ROOM:
            for output in self.outputs.values():
                output.pause()

    def output_ended(self, kind: str) -> None:
        self._put(kind.upper())

    def _beat(self) -> None:
        if self.loop.time() - self._said_at >= HEARTBEAT and not self._unsent:
            self._put("h", b"%d" % self._missing())
        self.loop.call_later(HEARTBEAT, self._beat)

    # --- in

    def _look(self) -> None:
        """Do the pushes that have arrived."""
        try:
            os.read(self._wake, 4096)
        except BlockingIOError:
            pass
        for name in os.listdir(self._folder):
            if name[0] == "u" and name[1:].isdigit():
                self._take_urgent(name)
        self._take_next()
        for name in os.listdir(self._folder):
            if name.isdigit() and int(name) < self._next:
                os.unlink(os.path.join(self._folder, name))
                self._put("a", b"%d" % (self._next - len(self._unacknowledged)))

    def _content(self, name: str) -> str | None:
        """The text of a push; None while it is not there, or not whole."""
        try:
            with open(os.path.join(self._folder, name)) as file:
                size, colon, text = file.read().partition(":")
        except OSError:
            return None
        return text if colon and size.isdigit() and len(text) == int(size) else None

    def _missing(self) -> int:
        """The number of the first push that is not here."""
        number = self._next
        while os.path.exists(os.path.join(self._folder, str(number))):
            number += 1
        return number

    def _take_urgent(self, name: str) -> None:
        text = self._content(name)
        if text is None:
            return
        os.unlink(os.path.join(self._folder, name))
        if name not in self._urgent:
            self._urgent.add(name)
            kind, _, values = text.partition(" ")
            numbers = [int(value) for value in values.split()]
            if kind == "kill":
                self.kill()
            elif kind == "signal" and self.code is None:
                start.signal_group(self.pid, numbers[0])
            elif kind == "resize":
                self._stdin.resize(*numbers)
        self._put("u", name[1:].encode())

    def _take_next(self) -> None:
        """Take pushes in their order, while the command reads what was taken before."""
        while self._stdin.pending <= STDIN_ROOM:
            text = self._content(str(self._next))
            if text is None:
                return
            os.unlink(os.path.join(self._folder, str(self._next)))
            self._next += 1
            data = b"" if text == "end" else binascii.a2b_base64(text)
            self._given += len(data)
            self._unacknowledged.append((self._given, self._next))
            if text == "end":
                self._stdin.end()
            self._stdin.write(data)
            self._acknowledge()

    def _stdin_taken(self, size: int) -> None:
        self._taken += size
        self._acknowledge()
        self._take_next()

    def _acknowledge(self) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= self._taken:
            self._put("a", b"%d" % self._unacknowledged.popleft()[1])

    # --- the end

    def _terminate(self, *_: object) -> None:
        self._terminated = True

    def kill(self) -> None:
        super().kill()
        self._killed = True
        self.reap()

    def exited(self, code: int) -> None:
        self._put("x", b"%d" % code)

    def reap(self) -> None:
        if self._terminated and not self._killed:
            return self.kill()
        super().reap()
        if self._killed and self.code is not None:
            for output in self.outputs.values():
                output.close()
            self.outputs.clear()
            self.stop_if_over()

    def stop_if_over(self) -> None:
        if not self._unsent:
            super().stop_if_over()


def say(answer: dict[str, Any]) -> None:
    os.write(1, record("r", encoded(json.dumps(answer).encode())))


def stream(config: dict[str, Any]) -> None:
    folder = config["folder"]
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    os.mkdir(folder, 0o700)  # fails if the host has ended the command meanwhile
    ends = Ends(config.get("tty"))
    try:
        os.mkfifo(os.path.join(folder, "w"), 0o600)
        pid = start_command(config, ends.theirs)
        ends.close_theirs()
        PushedCommand(pid, ends, folder, terminal=bool(config.get("tty"))).run()
    except OSError as error:
        os.write(1, record("f", encoded(str(error.strerror).encode())))
    finally:
        remove(folder)


def run(config: dict[str, Any]) -> None:
    folder = config["folder"]
    base = os.path.dirname(folder)
    os.makedirs(base, mode=0o700, exist_ok=True)
    sweep(base)
    answer = os.path.join(folder, "answer")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        # The same request once more: somebody else runs it, or did.
        limit = time.monotonic() + (config.get("timeout") or 86400) + 30
        while not os.path.exists(answer) and time.monotonic() < limit:
            if given_up(folder):
                return
            time.sleep(0.05)
    else:
        with open(answer + ".new", "w") as file:
            file.write(json.dumps(outcome(config, folder)))
        os.rename(answer + ".new", answer)
    with open(answer) as file:
        found = file.read()
    say(json.loads(found) if len(found) < INLINE else {"file": answer})


def outcome(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run the command to its end; its result."""
    source = config.get("stdin_file")
    if not source:
        source = os.path.join(folder, "in")
        with open(source, "wb") as file:
            file.write(binascii.a2b_base64(config.get("stdin", "")))
    with open(source, "rb") as file:
        ends = Ends(None, stdin=file.fileno())
        try:
            pid = start_command(config, ends.theirs)
        except OSError as error:
            ends.close()
            return {"failed": error.strerror}
        finally:
            os.unlink(source)
    ends.close_theirs()
    return KeptCommand(pid, ends.outputs, config).result()


class KeptCommand(RunningCommand):
    """One command of the mode ``run``, with its output kept up to a bound."""

    def __init__(self, pid: int, outputs: list[int], config: dict[str, Any]) -> None:
        self._folder = config["folder"]
        self._most = config["max_output"]
        self._kept = {"o": bytearray(), "e": bytearray()}
        self._truncated = self._timed_out = False
        super().__init__(pid, outputs)
        if config.get("timeout") is not None:
            self.loop.call_later(config["timeout"], self._give_up)

    def result(self) -> dict[str, Any]:
        self._look()
        self.reap()
        self.loop.run()
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return {
            "code": self.code,
            "out": encoded(bytes(self._kept["o"])).decode(),
            "err": encoded(bytes(self._kept["e"])).decode(),
            "truncated": self._truncated,
            "timed_out": self._timed_out,
        }

    def output(self, kind: str, data: bytes) -> None:
        room = self._most - len(self._kept[kind])
        self._truncated = self._truncated or len(data) > room
        self._kept[kind] += data[: max(0, room)]

    def _look(self) -> None:
        if given_up(self._folder):
            self._give_up()
        self.loop.call_later(LOOK, self._look)

    def _give_up(self) -> None:
        self._timed_out = True
        self.kill()
        self.loop.stop()


def given_up(folder: str) -> bool:
    """Whether the host has no more use for the result."""
    return os.path.exists(os.path.join(folder, "kill"))


def remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def sweep(base: str) -> None:
    """Remove the folders of results that were reported long ago."""
    for name in os.listdir(base):
        path = os.path.join(base, name)
        try:
            live = os.path.exists(os.path.join(path, "w"))
            if not live and time.time() - os.stat(path).st_mtime > KEEP:
                remove(path)
        except OSError:
            pass


def spawn(config: dict[str, Any]) -> None:
    folder = config["folder"]
    answer = {}
    try:
        os.mkdir(folder, 0o700)
        log = start.open_log(os.path.join(os.path.dirname(folder), "log"))
        start_command(config, [os.open(os.devnull, os.O_RDONLY), log, log])
    except FileExistsError:
        pass  # the request came twice
    except OSError as error:
        answer["failed"] = error.strerror
    say(answer)


def setup(config: dict[str, Any]) -> None:
    os.makedirs(config["folder"], mode=0o700, exist_ok=True)
    answer = {"marker": os.environ.get(config["variable"], "")}
    try:
        os.makedirs(config["workdir"], exist_ok=True)
    except OSError as error:
        answer["failed"] = str(error)
    say(answer)


def goodbye(config: dict[str, Any]) -> None:
    limit = time.monotonic() + config["seconds"]
    asked = set(start.running_pids()) - {os.getppid(), 1}
    for pid in asked:
        start.signal_process(pid, signal.SIGTERM)
    while time.monotonic() < limit and asked & set(start.running_pids()):
        time.sleep(0.05)
    say({})


MODES = {"stream": stream, "run": run, "spawn": spawn, "setup": setup, "goodbye": goodbye}


def main() -> None:
    start.close_inherited()
    MODES[sys.argv[1]](json.loads(sys.argv[2]))
