"""The relay: what runs a command inside an Islo sandbox, and gives it what Islo lacks.

Islo starts commands without stdin, gives their output as text, and cannot signal them. So it runs
this file instead (``python3 -I -c <this file> MODE JSON``; standard library, Python 3.9), which
runs the command. It is never imported in the sandbox, and nothing of it stays there.

``stream``  all that the command writes goes to stdout as records; what the host sends is found in
            a folder, one file a push, numbered, and a byte in a pipe beside them says "look".
            A push that comes twice is done once; one that overtakes another waits for it.
``run``     the command to its end, within its time, with its output kept up to a bound. If the
            request arrives twice, the second one reports what the first did.
``spawn``   the command goes on by itself; its output goes to the sandbox's log.
``setup``   makes the folders, and says who the sandbox is.
``goodbye`` asks everything in the sandbox to end, and waits a little.

A record is a letter, base64 or digits, and ``;``. Line ends mean nothing. ``o`` stdout, ``e``
stderr (``O`` and ``E`` their ends), ``a`` pushes done so far, ``u`` an urgent push done, ``x`` exit
code, ``s`` started, ``f`` could not be started, ``h`` still here, with the number of the first push
that is missing, ``r`` the answer of all other modes.
"""

from __future__ import annotations

import base64
import errno
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time

TYPE_CHECKING = False  # typing takes long to import, and this is started often
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Union

PIECE = 48 * 1024
ROOM = 256 * 1024
"""Bytes of encoded output that may wait for the vendor's stream."""
STDIN_ROOM = 256 * 1024
HEARTBEAT = 10.0
LOG_LIMIT = 4 * 2**20
INLINE = 32 * 1024
"""Results beyond this are left in a file, for the host to fetch."""
KEEP = 3600.0
LOOK = 0.5
"""Seconds between two looks whether the host has given up."""


def record(kind: str, payload: bytes = b"") -> bytes:
    return kind.encode() + payload + b";\n"


def encoded(data: bytes) -> bytes:
    return base64.b64encode(data)


def start(config: Dict[str, Any], **streams: Any) -> Union[subprocess.Popen[bytes], str]:
    """The command, or the OSError that says why not, as text."""
    try:
        cwd = config.get("cwd") or None
        if cwd is not None:
            os.chdir(cwd)
        return subprocess.Popen(config["argv"], start_new_session=True, **streams)
    except (OSError, ValueError) as error:
        return str(error)


class Relay:
    """One command of the mode ``stream``."""

    def __init__(self, config: Dict[str, Any]) -> None:
        self.folder: str = config["folder"]
        self.selector = selectors.DefaultSelector()
        self.child: subprocess.Popen[bytes]
        self.out = bytearray()
        self.outputs: Dict[int, str] = {}
        self.stdin: Optional[int] = None
        self.waiting: List[Tuple[Optional[bytes], int]] = []
        """Data for stdin (None: its end), and what to acknowledge when it is written."""
        self.next = 0
        self.urgent: Set[str] = set()
        self.code: Optional[int] = None
        self.terminated = self.killed = False
        self.last = time.monotonic()
        self.master: Optional[int] = None
        self.ended = -1
        os.makedirs(os.path.dirname(self.folder), mode=0o700, exist_ok=True)
        os.mkdir(self.folder, 0o700)
        os.mkfifo(os.path.join(self.folder, "w"), 0o600)
        self.wake = os.open(os.path.join(self.folder, "w"), os.O_RDWR | os.O_NONBLOCK)
        os.set_blocking(1, False)
        self.selector.register(self.wake, selectors.EVENT_READ, self.look)

    def run(self, config: Dict[str, Any]) -> None:
        if config.get("tty"):
            if not self.start_with_terminal(config):
                return
        else:
            pipe = subprocess.PIPE
            child = start(config, stdin=pipe, stdout=pipe, stderr=pipe)
            if isinstance(child, str):
                return self.failed(child)
            assert child.stdin
            assert child.stdout
            assert child.stderr
            self.child = child
            self.outputs = {child.stdout.fileno(): "o", child.stderr.fileno(): "e"}
            self.stdin = child.stdin.fileno()
        assert self.stdin is not None
        for fd in [*self.outputs, self.stdin]:
            os.set_blocking(fd, False)
        self.put("s", b"%d" % self.child.pid)
        self.ended, ended = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.terminate)  # and the byte in the pipe calls reap
        self.selector.register(self.ended, selectors.EVENT_READ, self.reap)
        self.reap()
        self.look()
        while self.outputs or self.code is None or self.out:
            self.watch()
            for key, _ in self.selector.select(HEARTBEAT):
                key.data()
            if time.monotonic() - self.last > HEARTBEAT and not self.out:
                self.put("h", b"%d" % self.missing())

    def failed(self, why: str) -> None:
        self.put("f", encoded(why.encode()))
        os.set_blocking(1, True)
        os.write(1, self.out)

    def start_with_terminal(self, config: Dict[str, Any]) -> bool:
        import fcntl
        import pty
        import termios

        self.master, slave = pty.openpty()
        self.resize(*config["tty"])

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        child = start(config, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal)
        os.close(slave)
        if isinstance(child, str):
            self.failed(child)
            return False
        self.child = child
        self.outputs = {self.master: "o"}
        self.stdin = os.dup(self.master)
        return True

    def resize(self, rows: int, columns: int) -> None:
        import fcntl
        import struct
        import termios

        if self.master is not None:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    # --- out

    def put(self, kind: str, payload: bytes = b"") -> None:
        self.out += record(kind, payload)
        self.last = time.monotonic()

    def watch(self) -> None:
        """Watch what there is room or need for."""
        self.want(1, bool(self.out), selectors.EVENT_WRITE, self.flush)
        for fd in self.outputs:
            has_room = len(self.out) < ROOM
            self.want(fd, has_room, selectors.EVENT_READ, functools.partial(self.read, fd))
        if self.stdin is not None:
            self.want(self.stdin, bool(self.waiting), selectors.EVENT_WRITE, self.feed)

    def want(self, fd: int, wanted: bool, event: int, callback: Callable[[], None]) -> None:
        watched = fd in self.selector.get_map()
        if wanted and not watched:
            try:
                self.selector.register(fd, event, callback)
            except PermissionError:  # a plain file is always ready
                callback()
        elif watched and not wanted:
            self.selector.unregister(fd)

    def flush(self) -> None:
        try:
            del self.out[: os.write(1, memoryview(self.out)[:65536])]
        except BlockingIOError:
            pass
        except OSError:
            self.kill()  # nobody listens any more
            sys.exit(0)

    def read(self, fd: int) -> None:
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal ends like this
                raise
            data = b""
        if data:
            return self.put(self.outputs[fd], encoded(data))
        if fd in self.selector.get_map():
            self.selector.unregister(fd)
        self.put(self.outputs.pop(fd).upper())

    # --- in

    def look(self) -> None:
        """Do the pushes that have arrived."""
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        for name in os.listdir(self.folder):
            if name[0] == "u" and name[1:].isdigit():
                self.take_urgent(name)
        while self.take(str(self.next)):
            pass
        for name in os.listdir(self.folder):
            if name.isdigit() and int(name) < self.next:
                os.unlink(os.path.join(self.folder, name))
                self.put("a", b"%d" % (self.next - len(self.waiting)))

    def content(self, name: str) -> Optional[str]:
        """What a push says; None while it is not there, or not whole."""
        try:
            with open(os.path.join(self.folder, name)) as file:
                size, colon, text = file.read().partition(":")
        except OSError:
            return None
        return text if colon and size.isdigit() and len(text) == int(size) else None

    def missing(self) -> int:
        """The number of the first push that is not here."""
        number = self.next
        while os.path.exists(os.path.join(self.folder, str(number))):
            number += 1
        return number

    def take_urgent(self, name: str) -> None:
        text = self.content(name)
        if text is None:
            return
        os.unlink(os.path.join(self.folder, name))
        if name not in self.urgent:
            self.urgent.add(name)
            kind, _, values = text.partition(" ")
            numbers = [int(value) for value in values.split()]
            if kind == "kill":
                self.kill()
            elif kind == "signal":
                self.signal(numbers[0])
            elif kind == "resize":
                self.resize(*numbers)
        self.put("u", name[1:].encode())

    def take(self, name: str) -> bool:
        if self.waiting and sum(len(data or b"") for data, _ in self.waiting) > STDIN_ROOM:
            return False  # it lies well where it is
        text = self.content(name)
        if text is None:
            return False
        os.unlink(os.path.join(self.folder, name))
        self.next += 1
        ends = text == "end"
        self.waiting.append((None if ends else base64.b64decode(text), self.next))
        self.feed()
        return True

    def feed(self) -> None:
        before = len(self.waiting)
        try:
            while self.waiting:
                data, number = self.waiting[0]
                if data is None:
                    self.end_stdin()
                elif self.stdin is not None and data:
                    self.waiting[0] = data[os.write(self.stdin, data) :], number
                    if self.waiting[0][0]:
                        continue
                self.waiting.pop(0)
                self.put("a", b"%d" % number)
        except BlockingIOError:
            pass
        except OSError:
            self.close_stdin()  # the command reads no more; what is left is for nobody
            return self.feed()
        if len(self.waiting) < before:
            while self.take(str(self.next)):
                pass

    def end_stdin(self) -> None:
        if self.stdin is not None and self.master is not None:
            os.write(self.stdin, b"\x04")
        else:
            self.close_stdin()

    def close_stdin(self) -> None:
        if self.stdin is not None:
            if self.stdin in self.selector.get_map():
                self.selector.unregister(self.stdin)
            if self.child.stdin is not None:
                self.child.stdin.close()
            else:
                os.close(self.stdin)
            self.stdin = None

    # --- the end

    def signal(self, number: int) -> None:
        if self.code is None:
            try:
                os.killpg(self.child.pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def terminate(self, *_: object) -> None:
        self.terminated = True

    def kill(self) -> None:
        """The command with its group; what it left behind in there, too."""
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.killed = True
        self.reap()

    def reap(self) -> None:
        try:
            os.read(self.ended, 4096)
        except BlockingIOError:
            pass
        if self.terminated and not self.killed:
            return self.kill()
        if self.code is None and self.child.poll() is not None:
            self.code = self.child.returncode
            self.put("x", b"%d" % self.code)
        if self.killed and self.code is not None:
            for fd in list(self.outputs):
                if fd in self.selector.get_map():
                    self.selector.unregister(fd)
            self.outputs.clear()


def say(answer: Dict[str, Any]) -> None:
    sys.stdout.buffer.write(record("r", encoded(json.dumps(answer).encode())))
    sys.stdout.buffer.flush()


def stream(config: Dict[str, Any]) -> None:
    relay = Relay(config)
    try:
        relay.run(config)
    finally:
        remove(config["folder"])


def run(config: Dict[str, Any]) -> None:
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
        outcome_text = json.dumps(outcome(config, folder))
        with open(answer + ".new", "w") as file:
            file.write(outcome_text)
        os.rename(answer + ".new", answer)
    with open(answer) as file:
        found = file.read()
    say(json.loads(found) if len(found) < INLINE else {"file": answer})


def outcome(config: Dict[str, Any], folder: str) -> Dict[str, Any]:
    """Run the command; what became of it."""
    source = config.get("stdin_file")
    if not source:
        source = os.path.join(folder, "in")
        with open(source, "wb") as file:
            file.write(base64.b64decode(config.get("stdin", "")))
    with open(source, "rb") as file:
        child = start(config, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.unlink(source)
    if isinstance(child, str):
        return {"failed": child}
    assert child.stdout
    assert child.stderr
    limit = config.get("timeout")
    deadline = None if limit is None else time.monotonic() + limit
    kept: Dict[Any, bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
    truncated = timed_out = False
    most = config["max_output"]
    with selectors.DefaultSelector() as selector:
        for pipe in kept:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left = LOOK if deadline is None else deadline - time.monotonic()
            if left <= 0 or given_up(folder):
                timed_out = True
                break
            for key, _ in selector.select(min(left, LOOK)):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                room = most - len(kept[key.fileobj])
                truncated = truncated or len(data) > room
                kept[key.fileobj] += data[: max(0, room)]
    if not timed_out:
        try:
            child.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
    if timed_out:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return {
        "code": child.returncode,
        "out": encoded(bytes(kept[child.stdout])).decode(),
        "err": encoded(bytes(kept[child.stderr])).decode(),
        "truncated": truncated,
        "timed_out": timed_out,
    }


def given_up(folder: str) -> bool:
    """The host has no more use for the result."""
    return os.path.exists(os.path.join(folder, "kill"))


def remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def sweep(base: str) -> None:
    """Forget what was reported long ago."""
    for name in os.listdir(base):
        path = os.path.join(base, name)
        try:
            live = os.path.exists(os.path.join(path, "w"))
            if not live and time.time() - os.stat(path).st_mtime > KEEP:
                remove(path)
        except OSError:
            pass


def spawn(config: Dict[str, Any]) -> None:
    folder = config["folder"]
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return say({})  # the request came twice
    log = os.path.join(os.path.dirname(folder), "log")
    if os.path.exists(log) and os.path.getsize(log) > LOG_LIMIT:
        os.replace(log, log + ".old")
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    child = start(config, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    say({"failed": child} if isinstance(child, str) else {})


def setup(config: Dict[str, Any]) -> None:
    os.makedirs(config["folder"], mode=0o700, exist_ok=True)
    answer = {"marker": os.environ.get(config["variable"], "")}
    try:
        os.makedirs(config["workdir"], exist_ok=True)
    except OSError as error:
        answer["failed"] = str(error)
    say(answer)


def goodbye(config: Dict[str, Any]) -> None:
    keep = {os.getpid(), os.getppid(), 1}
    limit = time.monotonic() + config["seconds"]
    asked = {int(name) for name in os.listdir("/proc") if name.isdigit()} - keep
    for pid in asked:
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError:
            pass
    while time.monotonic() < limit and any(map(running, asked)):
        time.sleep(0.05)
    say({})


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


MODES = {"stream": stream, "run": run, "spawn": spawn, "setup": setup, "goodbye": goodbye}

if __name__ == "__main__":
    MODES[sys.argv[1]](json.loads(sys.argv[2]))
