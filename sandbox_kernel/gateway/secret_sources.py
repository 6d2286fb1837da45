"""Finds the values of secrets on this host: in the environment, a file, a command's output, or the
keyring of the desktop. Errors name the secret and its kind of source, and never repeat a value."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shlex
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable

from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway.secret_values import SecretValue
from sandbox_kernel.host_programs import host_environment
from sandbox_kernel.secret_declarations import SecretDeclaration

TIMEOUT = 30.0
"""Seconds that a command or the keyring may take."""
_LOOK = 0.1
"""Seconds between two looks whether a command is still wanted."""
MAX_VALUE = 16 * 1024
"""Bytes of a value. A head of HTTP must hold it."""
MIN_VALUE = 8
"""A shorter one could not be told from other text in an answer."""
_PLAIN = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


class NoValue(SpecError):
    """A secret has no usable value on this host."""

    def __init__(self, secret: SecretDeclaration, why: str) -> None:
        super().__init__(f"The secret {secret.name!r} has no value on this host: {why}.")


async def find_value(secret: SecretDeclaration) -> SecretValue:
    """The value as it is now. NoValue."""
    source = secret.source
    if not isinstance(source, str):
        data = await _printed(secret, list(source))
    else:
        kind, _, where = source.partition(":")
        if kind == "env":
            data = _variable(secret, where)
        elif kind == "file":
            data = await asyncio.to_thread(_content, secret, where)
        elif kind == "command":
            data = await _printed(secret, _words(secret, where))
        else:
            data = await _from_keyring(secret, where)
    return SecretValue(_checked(secret, data))


def _checked(secret: SecretDeclaration, data: bytes) -> str:
    """One line of printable ASCII: nothing that could end a header, or be written in two ways."""
    if len(data) > MAX_VALUE:
        raise NoValue(secret, f"what was found is longer than {MAX_VALUE // 1024} KiB")
    text = data.decode("latin-1").removesuffix("\n").removesuffix("\r")
    if not text:
        raise NoValue(secret, "what was found is empty")
    if "\n" in text or "\r" in text or "\0" in text:
        raise NoValue(secret, "what was found is more than one line, or has a NUL")
    if not _PLAIN.fullmatch(text):
        raise NoValue(secret, "what was found is not printable ASCII, or has spaces at an end")
    if len(text) < MIN_VALUE:
        raise NoValue(secret, f"what was found is shorter than {MIN_VALUE} characters")
    return text


def _variable(secret: SecretDeclaration, name: str) -> bytes:
    if name not in os.environ:
        raise NoValue(secret, f"the variable {name} is not set where the sandbox is made")
    return os.environb[name.encode()]


def _content(secret: SecretDeclaration, path: str) -> bytes:
    try:
        # Not to wait for the writer of a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NoValue(secret, "its file is not a regular file")
            return os.read(fd, MAX_VALUE + 3)
        finally:
            os.close(fd)
    except OSError as error:
        raise NoValue(secret, f"its file cannot be read ({error.strerror})") from None


def _words(secret: SecretDeclaration, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        raise NoValue(secret, "its command has a quote that is not closed") from None


async def _printed(secret: SecretDeclaration, words: list[str]) -> bytes:
    """What a command prints. There is no shell, unless the words name one."""
    given_up = threading.Event()
    try:
        return await asyncio.to_thread(_run, secret, words, given_up)
    finally:
        given_up.set()


def _run(secret: SecretDeclaration, words: list[str], given_up: threading.Event) -> bytes:
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",  # nothing of a notebook's folder is run or obeyed
            env=host_environment(),
        )
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not a command"
        raise NoValue(secret, f"its command cannot be run ({why})") from None
    assert process.stdout is not None
    end, data, code = time.monotonic() + TIMEOUT, b"", None
    try:
        with process.stdout as output:
            while len(data) <= MAX_VALUE + 2 and time.monotonic() < end and not given_up.is_set():
                if select.select([output], [], [], _LOOK)[0]:
                    more = os.read(output.fileno(), 4096)
                    if not more:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            code = process.wait(max(0.0, end - time.monotonic()))
                        break
                    data += more
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if len(data) > MAX_VALUE + 2:
        return data
    if code is None:
        raise NoValue(secret, f"its command did not end within {TIMEOUT:g} s")
    if code:
        raise NoValue(secret, f"its command ended with exit code {code}; try it in a terminal")
    return data


async def _from_keyring(secret: SecretDeclaration, where: str) -> bytes:
    service, _, user = where.rpartition("/")
    try:
        import keyring
    except ImportError:
        extra = "pip install 'sandbox-kernel[keyring]'"
        raise NoValue(secret, f"the keyring needs an extra package: {extra}") from None
    get: Callable[[str, str], str | None] = keyring.get_password
    try:
        async with asyncio.timeout(TIMEOUT):
            found = await asyncio.to_thread(get, service, user)
    except TimeoutError:
        raise NoValue(secret, f"the keyring did not answer within {TIMEOUT:g} s") from None
    except Exception as error:  # noqa: BLE001  its backends raise errors of their own
        raise NoValue(secret, f"the keyring cannot be read ({type(error).__name__})") from None
    if found is None:
        raise NoValue(secret, f"the keyring has no password of {user!r} for {service!r}")
    return found.encode()
