"""What the backend promises by name, each thing that went wrong elsewhere before."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.errors import ExecFailed, SandboxUnavailable, SpecError, SpecRefused
from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.capabilities import EgressWay
from sandbox_kernel.sandboxes.superserve import SuperserveClient, network, request
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.waiting import until

from ..emulators.running import Running
from ..hosted.sandboxes import LIMIT, sandbox
from .sandboxes import at_the_service


async def test_env_reaches_exec(client: SuperserveClient, emulator: Running) -> None:
    """Variables of the spec are there for each command, also after a resume by another process."""
    async with sandbox(client, env={"FROM_SPEC": "a $b"}) as handle:
        assert at_the_service(emulator)[0]["request"]["env_vars"] == {"FROM_SPEC": "a $b"}
        assert (await handle.shell("echo $FROM_SPEC", timeout=LIMIT)).stdout == "a $b\n"
        await handle.pause()
        again = await SuperserveClient().get(handle.name)
        await again.resume()
        assert (await again.shell("echo $FROM_SPEC", timeout=LIMIT)).stdout == "a $b\n"


async def test_persist_reads_outside_the_workspace_root(client: SuperserveClient) -> None:
    """Files anywhere in the sandbox can be read and written, as bytes."""
    content = bytes(range(256)) * 1000
    async with sandbox(client) as handle:
        for path in ("/tmp/archive.tar", f"{handle.workdir}/inside", "/home/sandbox/deep/er"):
            await handle.write_file(path, content)
            assert await handle.read_file(path) == content
        assert b"sandbox" in await handle.read_file("/etc/passwd")
        with pytest.raises(ExecFailed, match=r"/no/such.*no such file"):
            await handle.read_file("/no/such")
        with pytest.raises(Exception, match="maximum size"):
            await handle.read_file("/tmp/archive.tar", max_bytes=1000)


async def test_large_folders_go_by_the_files_api(
    client: SuperserveClient, emulator: Running, tmp_path: Path
) -> None:
    """In one request; small ones by the stream. Both arrive whole."""
    import random

    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "small").write_text("small")
    async with sandbox(client) as handle:
        await handle.upload(str(source), "/workspace/small")
        assert "POST /files" not in emulator.requests()
        (source / "large").write_bytes(random.Random(1).randbytes(3_000_000))
        await handle.upload(str(source), "/workspace/large")
        assert emulator.requests().count("POST /files") == 1
        script = "cat small/sub/small; wc -c <large/large; ls -A /tmp"
        result = await handle.shell(script, timeout=LIMIT)
        assert result.stdout.split()[0] == "small3000000"
        assert ".tgz" not in result.stdout


async def test_no_api_key_in_serialized_state(
    client: SuperserveClient,
    emulator: Running,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Neither key nor access token is in records, logs, errors or representations."""
    caplog.set_level(logging.DEBUG)
    async with sandbox(client) as handle:
        await handle.snapshot("kept")
        await handle.shell("env", timeout=LIMIT)
        await handle.pause()
        emulator.fault("GET /sandboxes/", "status", status=401)
        with pytest.raises(SandboxUnavailable) as raised:
            await handle.info()
        found = at_the_service(emulator)[0]
        written = "".join(
            path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
        )
        assert handle.id in written
        said = [written, caplog.text, str(raised.value), repr(handle), repr(client)]
        said.append(json.dumps(Records().load("superserve", handle.name).__dict__))
        for secret in (emulator.env["SUPERSERVE_API_KEY"], found["token"]):
            assert not any(secret in text for text in said)
    await client.remove_snapshot("kept")


async def test_the_lease_is_the_services(client: SuperserveClient, emulator: Running) -> None:
    """Auto-pause and auto-delete are set from the spec, and pushed on while somebody is there."""
    async with sandbox(client, lease_seconds=10, delete_after_seconds=500) as handle:
        asked = at_the_service(emulator)[0]["request"]
        assert asked["timeout_seconds"] == 10 + request.SLACK
        assert asked["auto_delete_seconds"] == 500
        async with await handle.open_stream(["cat"]):

            async def pushed_on() -> bool:
                limit: int = at_the_service(emulator)[0]["timeout_seconds"]
                return limit > 10 + request.SLACK

            await until(pushed_on)


async def test_a_sandbox_that_was_paused_for_long_is_deleted(
    client: SuperserveClient, emulator: Running
) -> None:
    """By the service, after ``delete_after_seconds``."""
    handle = await client.create(SandboxSpec(delete_after_seconds=1))
    await handle.pause()

    async def deleted() -> bool:
        return (await handle.info()).status == "gone"

    await until(deleted)
    await client.remove(handle.name)


async def test_our_own_lapse_is_made_good(client: SuperserveClient, emulator: Running) -> None:
    """This machine slept with a stream open, and the service paused the sandbox for it: the next
    command resumes it, since nobody has asked for the pause."""
    async with sandbox(client, lease_seconds=1) as handle:
        stream = await handle.open_stream(["sleep", "1000"])
        renewing = handle._lease._renewing
        assert renewing is not None
        renewing.cancel()  # as if this process had not run

        async def paused() -> bool:
            return bool((await handle.info()).status == "paused")

        await until(paused)
        assert (await handle.shell("echo back", timeout=LIMIT)).stdout == "back\n"
        await stream.close()


async def test_fork(client: SuperserveClient, emulator: Running) -> None:
    """A second sandbox with the first one's state, by way of a snapshot that does not stay. (The
    emulator copies files, not memory.)"""
    async with sandbox(client, env={"A": "1"}) as handle:
        await handle.shell("echo mine > note", timeout=LIMIT)
        copy = await handle.fork("the-copy")
        try:
            assert copy.id != handle.id
            assert at_the_service(emulator)[1]["request"]["from_snapshot"]
            await handle.shell("echo changed > note", timeout=LIMIT)
            assert (await copy.shell("cat note; echo $A", timeout=LIMIT)).stdout == "mine\n1\n"
            snapshot = at_the_service(emulator)[1]["request"]["from_snapshot"]
            assert f"DELETE /snapshots/{snapshot}" in emulator.requests()
        finally:
            await client.remove("the-copy")


async def test_snapshots(client: SuperserveClient) -> None:
    """Kept under a name, restored as often as one likes, and listed until they are removed."""
    async with sandbox(client) as handle:
        await handle.shell("echo kept > note", timeout=LIMIT)
        taken = await handle.snapshot("as-it-was")
        assert (taken.name, taken.sandbox, taken.memory) == ("as-it-was", handle.name, True)
    assert [found.name for found in await client.snapshots()] == ["as-it-was"]
    restored = await client.restore("as-it-was", SandboxSpec(name="again"))
    assert (await restored.shell("cat note", timeout=LIMIT)).stdout == "kept\n"
    await client.remove("again")
    await client.remove_snapshot("as-it-was")
    await client.remove_snapshot("as-it-was")
    assert await client.snapshots() == []


async def test_create_from_a_template_or_a_snapshot(
    client: SuperserveClient, emulator: Running
) -> None:
    """``image`` names either."""
    async with sandbox(client, image="superserve/python-3.11") as handle:
        assert at_the_service(emulator)[0]["request"]["from_template"] == "superserve/python-3.11"
        snapshot = await handle.take_snapshot("by-hand")
        async with sandbox(client, image=f"snapshot:{snapshot}"):
            assert at_the_service(emulator)[1]["request"]["from_snapshot"] == snapshot


# --- policy


@pytest.mark.parametrize(
    ("egress", "lists"),
    [
        ([], {"allow_out": [], "deny_out": ["0.0.0.0/0"]}),
        (["203.0.113.0/24"], {"allow_out": ["203.0.113.0/24"], "deny_out": ["0.0.0.0/0"]}),
        (
            ["data.example", "*.data.example", "1.1.1.1"],
            {"allow_out": ["data.example", "*.data.example", "1.1.1.1"], "deny_out": ["0.0.0.0/0"]},
        ),
        (["*"], None),
        ({"default": "allow"}, None),
        (
            {"default": "allow", "rules": ["!203.0.113.0/24"]},
            {"allow_out": [], "deny_out": ["203.0.113.0/24"]},
        ),
    ],
)
def test_egress_is_mapped_exactly(egress: Any, lists: Any) -> None:
    """Deny all unless something is named; the service's lists say the same as the rules."""
    spec = SandboxSpec.from_mapping({"egress": egress})
    made = request.arguments(spec, "tag")["network"]
    assert (made.model_dump() if made else None) == lists
    assert request.CAPABILITIES.egress_way(spec.egress) is not EgressWay.GATEWAY


@pytest.mark.parametrize(
    ("egress", "what"),
    [
        (["data.example"], r"egress\[0\]\.host.*resolver.*1\.1\.1\.1"),
        (["data.example:8443", "1.1.1.1"], r"egress\[0\]\.ports=\[8443\].*hosts and networks only"),
        (["@pip"], r"egress\[0\]\.host='@pip' \(a preset"),
        ([{"host": "203.0.113.1", "rate_limit_rpm": 5}], r"egress\[0\]\.rate_limit_rpm"),
        (["!203.0.113.1", "203.0.113.0/24"], r"egress\[0\]\.action='deny'.*wins over"),
        (["10.1.2.3"], r"egress\[0\]\.host='10\.1\.2\.3'.*private"),
        (["[2001:db8::1]"], r"egress\[0\]\.host.*IPv4"),
        ({"default": "allow", "rules": ["!data.example"]}, r"egress\[0\]\.host.*not names"),
        ({"default": "allow", "rules": ["203.0.113.1"]}, r"egress\[0\]\.action='allow'"),
    ],
)
def test_egress_beyond_the_lists_goes_through_the_gateway(egress: Any, what: str) -> None:
    """The service then lets nothing out, and it is said why."""
    spec = SandboxSpec.from_mapping({"egress": egress})
    assert request.CAPABILITIES.egress_way(spec.egress) is EgressWay.GATEWAY
    assert re.match(what, network.beyond_own_rules(spec.egress) or "")
    assert request.arguments(spec, "tag")["network"] == network.OFF


async def test_a_copy_has_no_network_either(client: SuperserveClient, emulator: Running) -> None:
    """If it is the gateway that holds the rules. (The emulator's copies have no processes.)"""
    async with sandbox(client, egress=["data.example:8443"]) as handle:
        copy = await handle.fork("the-copy")
        try:
            assert (await copy.info()).egress == "gateway"
            asked = [one["request"]["network"] for one in at_the_service(emulator)]
            assert asked == 2 * [network.OFF.model_dump()]
        finally:
            await client.remove(copy.name)


async def test_what_neither_can_hold_is_refused_by_name(
    client: SuperserveClient, emulator: Running
) -> None:
    """Before anything is made: secrets, which the service replaces in its own network only."""
    spec = SandboxSpec.from_mapping({"egress": ["data.example:8443"], "secrets": ["TOKEN"]})
    with pytest.raises(SpecRefused, match=r"secrets=\['TOKEN'\] beside .*egress\[0\]\.ports"):
        await client.create(spec)
    assert at_the_service(emulator) == []
    assert "POST /sandboxes" not in emulator.requests()


async def test_secrets(client: SuperserveClient, emulator: Running) -> None:
    """Bound to variables by name; the sandbox sees a stand-in. What is no name is refused."""
    async with sandbox(client, secrets=["TOKEN", "OPENAI_API_KEY=openai-prod"]) as handle:
        asked = at_the_service(emulator)[0]["request"]["secrets"]
        assert asked == {"TOKEN": "TOKEN", "OPENAI_API_KEY": "openai-prod"}
        result = await handle.shell("echo $OPENAI_API_KEY", timeout=LIMIT)
        assert result.stdout == "proxy-token-for-openai-prod\n"
    for name in ("openai-prod", "A B=x", "=x"):
        with pytest.raises(SpecError, match=r"secrets: .*VARIABLE=secret-name"):
            SandboxSpec.from_mapping({"secrets": [name]})
    with pytest.raises(SpecRefused, match=r"secrets=.*VARIABLE=secret-name"):
        await client.create(SandboxSpec.from_mapping({"secrets": ["TOKEN@api.example"]}))


async def test_nothing_is_published(client: SuperserveClient, emulator: Running) -> None:
    """The sandbox's ports are private, and its time is bounded, without being asked for."""
    async with sandbox(client):
        asked = at_the_service(emulator)[0]["request"]
        assert asked["preview_access"] == "private"
        assert asked["timeout_seconds"] == 3600 + request.SLACK
        assert asked["auto_delete_seconds"] == request.DEFAULT_DELETE_AFTER
