"""What the backend promises by name, each thing that went wrong elsewhere before."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest

from sandbox_kernel.errors import ExecFailed, SandboxUnavailable, SpecError, SpecRefused
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.islo import IsloClient
from sandbox_kernel.spec import SandboxSpec

from ..emulators.running import Running
from ..hosted.sandboxes import LIMIT, sandbox
from .sandboxes import account


async def test_env_reaches_exec(client: IsloClient, emulator: Running) -> None:
    """Variables of the spec are there for each command, also after a resume by another process."""
    async with sandbox(client, env={"FROM_SPEC": "a $b"}) as handle:
        assert (await handle.shell("echo $FROM_SPEC", timeout=LIMIT)).stdout == "a $b\n"
        async with await handle.open_stream(["printenv", "FROM_SPEC"]) as stream:
            assert await stream.read() == b"a $b\n"
        for end in (handle.pause, handle.stop):
            await end()
            again = await IsloClient().get(handle.name)
            await again.resume()
            assert (await again.shell("echo $FROM_SPEC", timeout=LIMIT)).stdout == "a $b\n"


async def test_persist_reads_outside_the_workspace_root(client: IsloClient) -> None:
    """Files anywhere in the sandbox can be read and written, as bytes."""
    content = bytes(range(256)) * 1000
    async with sandbox(client) as handle:
        for path in ("/tmp/archive.tar", f"{handle.workdir}/inside"):
            await handle.write_file(path, content)
            assert await handle.read_file(path) == content
        assert b"root" in await handle.read_file("/etc/passwd")
        with pytest.raises(ExecFailed, match="/no/such"):
            await handle.read_file("/no/such")


async def test_a_folder_is_uploaded_in_one_request(
    client: IsloClient, emulator: Running, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "large").write_bytes(bytes(range(256)) * 10_000)
    (source / "sub" / "random").write_bytes(random.Random(1).randbytes(300_000))
    async with sandbox(client) as handle:
        emulator.clear()
        await handle.upload(str(source), "/workspace/there")
        assert sum(line.endswith("/files") for line in emulator.requests()) == 1
        result = await handle.shell("cat there/sub/* | wc -c; ls -A /workspace", timeout=LIMIT)
        assert result.stdout.split() == ["2860000", "there"]


async def test_no_api_key_in_serialized_state(
    client: IsloClient, emulator: Running, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Neither key nor session token is in records, logs, errors or representations."""
    caplog.set_level(logging.DEBUG)  # of everybody, also of httpx
    async with sandbox(client) as handle:
        await handle.shell("true", timeout=LIMIT)
        emulator.fault("GET /sandboxes/", "status", status=401, times=2)
        with pytest.raises(SandboxUnavailable) as raised:
            await handle.info()
        emulator.clear()
        written = "".join(
            path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
        )
        assert handle.id in written
        said = [written, caplog.text, str(raised.value), repr(handle), repr(client)]
        said.append(json.dumps(vars(Records().load("islo", handle.name))))
        said.append((await handle.shell("env", timeout=LIMIT)).stdout)
        token = client.api()._tokens.current
        assert token
        for secret in (emulator.env["ISLO_API_KEY"], token):
            assert not any(secret in text for text in said)


async def test_without_a_key_everything_says_what_to_do(
    client: IsloClient, emulator: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting a kernel, ``doctor`` and ``ps``; the last two go on for other backends."""
    monkeypatch.delenv("ISLO_API_KEY")
    with pytest.raises(SandboxUnavailable, match=r"API key.*set ISLO_API_KEY"):
        await client.create(SandboxSpec())
    found = await client.diagnose()
    assert [line.ok for line in found] == [True, False]
    assert "set ISLO_API_KEY" in found[1].fix
    assert await client.list() == []


async def test_sizes_are_asked_for_as_given(client: IsloClient, emulator: Running) -> None:
    """What Islo cannot count exactly is refused."""
    fields = {"memory_mib": 2048, "cpus": 2, "disk_mib": 4096, "image": "python:3.12"}
    async with sandbox(client, **fields):
        asked = account(emulator)["sandboxes"][0]["request"]
        assert [asked[key] for key in ("memory_mb", "vcpus", "disk_gb", "image")] == [
            *(2048, 2, 4),
            "python:3.12",
        ]
    for refused in ({"cpus": 1.5}, {"disk_mib": 1000}):
        with pytest.raises(SpecRefused, match=next(iter(refused))):
            await client.create(SandboxSpec.from_mapping(refused))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gateway": "x"}, "unknown key 'gateway'. Did you mean 'gateway_profile'"),
        ({"gateway_profile": 5}, "name or id of a profile"),
        ({"gateway_profile": {"rules": "x"}}, "rules of the gateway profile are a list"),
        ({"gateway_profile": {"rules": [{}]}}, "needs a host_pattern"),
        ({"gateway_profile": {"rule": []}}, "Did you mean 'rules'"),
        ({"gateway_profile": {"default_action": "maybe"}}, "default_action is 'allow' or 'deny'"),
        ({"gateway_profile": {"rules": [{"host_pattern": "a", "methods": "GET"}]}}, "methods is a"),
        ({"gateway_profile": {"rules": [{"host_pattern": "a", "priority": "1"}]}}, "priority is a"),
        ({"pause_after_idle": 1.5}, "pause_after_idle takes whole seconds"),
        ({"delete_after": 0}, "delete_after takes whole seconds"),
        ({"auto_resume": "always"}, "auto_resume is 'never' or 'on_activity'"),
    ],
)
async def test_options_are_checked_before_anything_is_made(
    client: IsloClient, emulator: Running, options: dict[str, object], message: str
) -> None:
    """The error names the key and what it takes."""
    with pytest.raises(SpecError, match=message):
        await client.create(SandboxSpec(options=options))
    assert emulator.requests() == []
