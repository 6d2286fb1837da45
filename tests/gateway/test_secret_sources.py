"""Where values come from, and how they are held."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.gateway import secret_sources
from sandbox_kernel.gateway.placeholders import placeholder_for
from sandbox_kernel.gateway.secret_rewriting import HeldSecret, SecretRewriting
from sandbox_kernel.gateway.secret_sources import MAX_VALUE, NoValue, find_value
from sandbox_kernel.gateway.secret_values import SecretValue
from sandbox_kernel.secret_declarations import read_secrets

VALUE = "a-value-that-is-secret"


async def found(source: Any) -> str:
    [secret] = read_secrets([{"name": "KEY", "from": source, "hosts": ["a.example"]}])
    return (await find_value(secret)).reveal()


def printing(text: str, end: str = "") -> str:
    return f"command:{sys.executable} -c {shlex.quote(f'print({text!r}, end={end!r})')}"


async def test_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE", VALUE)
    (tmp_path / "file").write_text(f"{VALUE}\n")
    assert await found("env:ELSEWHERE") == VALUE
    assert await found(f"file:{tmp_path}/file") == VALUE
    assert await found(printing(VALUE, "\n")) == VALUE
    assert await found(["sh", "-c", "echo a-value-$(echo that-is-secret)"]) == VALUE


async def test_a_command_has_no_shell() -> None:
    assert await found("command:echo $HOME;id") == "$HOME;id"


async def test_the_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    import keyring
    from keyring.backend import KeyringBackend

    class Memory(KeyringBackend):
        priority = 1

        def get_password(self, service: str, username: str) -> str | None:
            if service == "broken":
                raise RuntimeError(VALUE)
            return VALUE if (service, username) == ("https://a/b", "me") else None

        def set_password(self, service: str, username: str, password: str) -> None: ...

        def delete_password(self, service: str, username: str) -> None: ...

    before = keyring.get_keyring()
    keyring.set_keyring(Memory())  # type: ignore[no-untyped-call]
    try:
        assert await found("keyring:https://a/b/me") == VALUE
        with pytest.raises(NoValue, match="no password of 'you' for 'https://a/b'"):
            await found("keyring:https://a/b/you")
        with pytest.raises(NoValue, match=r"cannot be read \(RuntimeError\)") as raised:
            await found("keyring:broken/me")
        assert VALUE not in "".join(traceback.format_exception(raised.value))
    finally:
        keyring.set_keyring(before)
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(NoValue, match=r"pip install 'sandbox-kernel\[keyring\]'"):
        await found("keyring:a/b")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("env:NOT_SET_ANYWHERE", "the variable NOT_SET_ANYWHERE is not set"),
        ("file:/no/such/file", r"cannot be read \(No such file"),
        ("file:/etc", "not a regular file"),
        ("file:/dev/zero", "not a regular file"),
        ("command:/no/such/program", r"cannot be run \(No such file"),
        ("command:false", "ended with exit code 1"),
        ("command:echo 'open", "a quote that is not closed"),
        ("command:yes", "longer than 16 KiB"),
        (printing("x" * (MAX_VALUE + 1)), "longer than 16 KiB"),
        (printing(""), "empty"),
        (printing("secret1"), "shorter than 8 characters"),
        (printing(f"{VALUE}\r\nX-Injected: 1"), "more than one line"),
        (printing(f"{VALUE}\nmore\n"), "more than one line"),
        (printing(f"{VALUE}\0"), "more than one line, or has a NUL"),
        (printing(f"{VALUE}\x1b[31m"), "not printable ASCII"),
        (printing(f" {VALUE}"), "spaces at an end"),
        (printing(f"{VALUE}é"), "not printable ASCII"),
    ],
)
async def test_what_is_no_value(source: str, why: str) -> None:
    """The error says which secret and why, and never what was found."""
    with pytest.raises(NoValue, match=rf"The secret 'KEY' has no value on this host: .*{why}") as e:
        await found(source)
    assert VALUE not in str(e.value)


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NoValue, match="not a regular file"):
        await found(f"file:{tmp_path}/pipe")


async def test_a_command_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With everything that it started."""
    monkeypatch.setattr(secret_sources, "TIMEOUT", 0.5)
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(NoValue, match=r"did not end within 0\.5 s"):
        await found(["sh", "-c", script])
    pid = int((tmp_path / "pid").read_text())
    async with asyncio.timeout(30):
        while os.path.exists(f"/proc/{pid}") and "Z" not in _state(pid):
            await asyncio.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_value_is_shown_by_nothing() -> None:
    value = SecretValue(VALUE)
    held = HeldSecret(read_secrets("KEY@a.example")[0], placeholder_for(VALUE), value)
    rewriting = SecretRewriting([held], print)
    rewriting._shown_by([held])
    for thing in (value, held, rewriting, vars(rewriting), [value], {"a": value}):
        for shown in (repr(thing), str(thing), f"{thing}", f"{thing!r}"):
            assert VALUE not in shown
    assert VALUE not in f"{value:>40}"
    for copied in (copy.copy(value), copy.deepcopy([value])[0]):
        assert copied is value
    with pytest.raises(TypeError) as raised:
        json.dumps({"a": value})
    assert VALUE not in str(raised.value)
    with pytest.raises(TypeError, match="not serialized"):
        pickle.dumps(value)
    assert not hasattr(value, "__dict__")
