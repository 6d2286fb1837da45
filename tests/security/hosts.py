"""Hosts for hostile code: a process of this user, and one of a user without any rights."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sandbox_kernel
from sandbox_kernel.sandboxes.local import bubblewrap
from tests.local.jails import NOBODY, SYSTEM_PYTHON, public_bwrap, public_folder

PRELUDE = """
import errno, json, os, socket, stat, sys, ctypes

def answer(value):
    print("ANSWER", json.dumps(value))

def attempt(call, *arguments, **options):
    "The name of the error that an attempt ends with, or None if it succeeds."
    try:
        call(*arguments, **options)
    except OSError as error:
        return errno.errorcode.get(error.errno, repr(error))
"""


class Failed(Exception):
    """What the host process answered with."""


class NoAnswer(Exception):
    """Hostile code ended before it had an answer: its exit code, and what it said on stderr."""


class Jail:
    """A sandbox that hostile code runs in."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.name = name

    def call(self, call: str, **arguments: Any) -> Any:
        return self.host.call(call, name=self.name, **arguments)

    def run(self, *argv: str, timeout: float = 60) -> dict[str, Any]:
        """Run a command; stdout, stderr and exit_code."""
        result: dict[str, Any] = self.call("exec", argv=argv, timeout=timeout)
        return result

    def answer(self, code: str, *arguments: str, timeout: float = 60) -> Any:
        """Run hostile Python code; the value is what it passes to ``answer(...)``, or NoAnswer."""
        code = PRELUDE + textwrap.dedent(code)
        ran = self.run("python3", "-c", code, *arguments, timeout=timeout)
        if "ANSWER " not in ran["stdout"]:
            raise NoAnswer(f"exit code {ran['exit_code']}: {ran['stderr'].strip()}")
        return json.loads(ran["stdout"].rpartition("ANSWER ")[2])


class Host:
    """One user's host process, with secrets around it that no sandbox may get at."""

    def __init__(self, folder: Path, uid: int | None) -> None:
        self.uid = os.getuid() if uid is None else uid
        self.canary = f"canary-{secrets.token_hex(8)}"
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "secret").write_text(self.canary)
        self.data = folder / "data"
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "CANARY": self.canary,
            "AWS_SECRET_ACCESS_KEY": self.canary,
            "SANDBOX_KERNEL_DATA_DIR": str(self.data),
            "SANDBOX_KERNEL_RUNTIME_DIR": str(folder / "run"),
        }
        python, script = sys.executable, Path(__file__).with_name("hostprocess.py")
        user: dict[str, Any] = {}
        if uid is not None:
            python, user = SYSTEM_PYTHON, {"user": uid, "group": uid, "extra_groups": []}
            script = Path(shutil.copy(script, folder))
            source = Path(sandbox_kernel.__file__).parent
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / "lib" / "sandbox_kernel", ignore=ignored)
            bwrap = public_bwrap(folder / "bin")
            environment["PATH"] = f"{os.path.dirname(bwrap.path)}:/usr/local/bin:/usr/bin:/bin"
            environment["PYTHONPATH"] = str(folder / "lib")
            for path in (folder, self.home):
                os.chown(path, uid, uid)
        self._process = subprocess.Popen(
            [python, script, self.canary],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
            **user,
        )

    def call(self, call: str, **arguments: Any) -> Any:
        """Let the host process do something with its sandboxes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self._process.stdin.flush()
        # If a test is given up here, the next answer would be taken for another's.
        try:
            line = self._process.stdout.readline()
        except BaseException:
            self._process.kill()
            raise
        assert line, f"the host process ended with {self._process.wait(10)}"
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["result"]

    @contextlib.contextmanager
    def jail(self, *, agent: bool = False, **spec: Any) -> Iterator[Jail]:
        """A sandbox, with an agent that this host is attached to if asked for."""
        spec.setdefault("lease_seconds", 900)  # if the test run itself is killed
        jail = Jail(self, self.call("create_with_agent" if agent else "create", **spec))
        try:
            yield jail
        finally:
            jail.call("remove")

    def close(self) -> None:
        left = self.call("list")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert left == []


@contextlib.contextmanager
def host(uid: int | None) -> Iterator[Host]:
    """A host process of this user (None) or of another one."""
    with public_folder() as folder:
        (folder / "bin").mkdir()
        made = Host(folder, uid)
        try:
            yield made
        finally:
            made.close()


def users() -> dict[str, int | None]:
    """Who can be a host here: this user and, if this is root, one without any rights."""
    return {"this user": None, **({"an ordinary user": NOBODY} if os.getuid() == 0 else {})}


def why_not() -> str | None:
    return bubblewrap.why_not()
