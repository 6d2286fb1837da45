"""Commands in a sandbox, and what comes back from them."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from sandbox_kernel.errors import ExecFailed, SandboxTimeout, SpecError
from sandbox_kernel.sandboxes.base import SandboxHandle
from tests.helpers.waiting import LIMIT, until

from .conftest import SCALE, Backend
from .processes import not_running, running


async def test_its_capabilities_are_the_expected_ones(backend: Backend) -> None:
    """A backend does not lose a capability without somebody noticing."""
    missing = {n for n in backend.row.capabilities if not getattr(backend.capabilities, n)}
    assert missing == set()
    assert backend.client.backend == backend.row.name


async def test_exec_gives_output_and_exit_code(sandbox: SandboxHandle) -> None:
    """stdout and stderr are kept apart."""
    result = await sandbox.exec("/bin/sh", ["-c", "echo out; echo err >&2; exit 7"], timeout=LIMIT)
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
    assert not result.ok
    assert not result.truncated


async def test_arguments_are_never_parsed_by_a_shell(sandbox: SandboxHandle) -> None:
    """What means something to a shell arrives as it was written."""
    words = ["$HOME", "a b", "*", "`id`", "; exit 3", "", "'\"\\", "two\nlines", "-n", "é漢😀"]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    result = await sandbox.exec("python3", ["-c", code, *words], timeout=LIMIT)
    assert json.loads(result.stdout) == words


async def test_shell_runs_a_script(sandbox: SandboxHandle) -> None:
    """``shell`` is where a shell is wanted."""
    result = await sandbox.shell("for i in 1 2 3; do printf $i; done | tr 2 x", timeout=LIMIT)
    assert (result.stdout, result.ok) == ("1x3", True)


async def test_environment(sandbox: SandboxHandle) -> None:
    """Variables of the sandbox are there for each command, and each may have its own."""
    script = 'echo "$FROM_SPEC|$OWN"'
    result = await sandbox.exec("/bin/sh", ["-c", script], env={"OWN": "a $b"}, timeout=LIMIT)
    assert result.stdout == "for all commands|a $b\n"
    result = await sandbox.exec(
        "/bin/sh", ["-c", script], env={"FROM_SPEC": "for this one"}, timeout=LIMIT
    )
    assert result.stdout == "for this one|\n"
    assert (await sandbox.shell(script, timeout=LIMIT)).stdout == "for all commands|\n"


async def test_no_variable_of_the_host_is_seen(
    sandbox: SandboxHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's environment goes in only where the spec names it."""
    monkeypatch.setenv("CANARY_OF_THE_HOST", "secret")
    assert "CANARY_OF_THE_HOST" not in (await sandbox.shell("env", timeout=LIMIT)).stdout


async def test_working_folder(sandbox: SandboxHandle) -> None:
    """Commands start in ``workdir`` unless they name a folder of their own."""
    assert (await sandbox.exec("pwd", timeout=LIMIT)).stdout.strip() == sandbox.workdir
    assert (await sandbox.exec("pwd", cwd="/usr", timeout=LIMIT)).stdout.strip() == "/usr"
    with pytest.raises(ExecFailed):
        await sandbox.exec("pwd", cwd="/no/such/folder", timeout=LIMIT)


async def test_files_in_the_working_folder_stay(sandbox: SandboxHandle) -> None:
    """What one command writes, the next one reads."""
    await sandbox.shell("printf kept > between-commands", timeout=LIMIT)
    result = await sandbox.exec("cat", [f"{sandbox.workdir}/between-commands"], timeout=LIMIT)
    assert result.stdout == "kept"


async def test_stdin(sandbox: SandboxHandle) -> None:
    """Input arrives whole and ends; without any, a command sees the end at once."""
    data = b"line\n" * (200_000 // SCALE)
    result = await sandbox.exec("wc", ["-c"], stdin=data, timeout=LIMIT)
    assert int(result.stdout) == len(data)
    assert (await sandbox.exec("cat", timeout=LIMIT)).stdout == ""


async def test_input_that_nobody_reads_is_no_error(sandbox: SandboxHandle) -> None:
    """A command may end without reading its input."""
    result = await sandbox.exec("true", stdin=b"x" * (2_000_000 // SCALE), timeout=LIMIT)
    assert result.ok


async def test_unicode_and_broken_unicode(sandbox: SandboxHandle) -> None:
    """Text comes back as it was written; bytes that are no text are replaced, not fatal."""
    text = "Grüße, 世界 😀\n"
    assert (await sandbox.exec("cat", stdin=text.encode(), timeout=LIMIT)).stdout == text
    result = await sandbox.exec("printf", [r"a\377b"], timeout=LIMIT)
    assert result.stdout == "a\ufffdb"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
async def test_death_by_a_signal_is_a_negative_exit_code(
    sandbox: SandboxHandle, number: signal.Signals
) -> None:
    """Signal N gives -N, as subprocess does."""
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    result = await sandbox.exec("python3", ["-c", code], timeout=LIMIT)
    assert result.exit_code == -number


@pytest.mark.parametrize("command", ["no-such-command", "/no/such/command", "/etc", "/etc/passwd"])
async def test_what_cannot_be_run(sandbox: SandboxHandle, command: str) -> None:
    """A command that does not exist or is no program is ExecFailed, which names both."""
    with pytest.raises(ExecFailed) as raised:
        await sandbox.exec(command, timeout=LIMIT)
    assert command in str(raised.value)
    assert sandbox.name in str(raised.value)


async def test_timeout_kills_the_command(sandbox: SandboxHandle) -> None:
    """SandboxTimeout, and nothing of the command runs on."""
    word = "31536001"
    with pytest.raises(SandboxTimeout, match="longer timeout"):
        await sandbox.exec("/bin/sh", ["-c", f"sleep {word}; true"], timeout=0.5)
    await until(lambda: not_running(sandbox, word))


async def test_output_is_bounded(sandbox: SandboxHandle) -> None:
    """The rest is dropped and said to be, and the command still ends by itself."""
    size = 3_000_000 // SCALE
    flood = f"head -c {size} /dev/zero | tr '\\0' x; head -c 10 /dev/zero | tr '\\0' y >&2"
    result = await sandbox.exec("/bin/sh", ["-c", flood], max_output=1000, timeout=LIMIT)
    assert result.truncated
    assert result.stdout == "x" * 1000
    assert result.stderr == "y" * 10
    assert result.ok


async def test_many_commands_at_once(sandbox: SandboxHandle) -> None:
    """Commands do not wait for one another and do not mix up their output."""
    results = await asyncio.gather(
        *(sandbox.exec("/bin/sh", ["-c", f"sleep 0.2; echo {n}"], timeout=LIMIT) for n in range(20))
    )
    assert [r.stdout for r in results] == [f"{n}\n" for n in range(20)]


async def test_run_once(backend: Backend) -> None:
    """``run_python`` and ``run_shell`` have a sandbox of their own, which is gone afterwards."""
    fields = {key: value for key, value in backend.row.spec.items() if key != "env"}
    name = f"{backend.prefix}-once"
    result = await backend.client.run_python(
        "import os; print(os.environ['A'] * 2)", timeout=LIMIT, name=name, env={"A": "x"}, **fields
    )
    assert (result.stdout, result.ok) == ("xx\n", True)
    result = await backend.client.run_shell("exit 5", timeout=LIMIT, name=name, **fields)
    assert result.exit_code == 5
    with pytest.raises(SandboxTimeout):
        await backend.client.run_shell("sleep 1000", timeout=0.5, name=name, **fields)
    assert name not in await backend.names()
    with pytest.raises(SpecError, match=r"memory_mb.*memory_mib"):
        await backend.client.run_shell("true", name=name, memory_mb=1)


async def test_a_sandbox_is_not_the_host(sandbox: SandboxHandle) -> None:
    """The least that any sandbox must do: it has its own processes."""
    assert not await running(sandbox, "pytest")
    code = "import os; print(os.getppid())"
    result = await sandbox.exec("python3", ["-c", code], timeout=LIMIT)
    assert int(result.stdout) != os.getpid()
