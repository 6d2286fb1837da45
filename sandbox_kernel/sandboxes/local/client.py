"""The local jail as a sandbox backend: creating, finding, using and removing jails.

A jail belongs to no process: it runs on when its creator dies, and whoever reads its record can
use it. What another process needs is in ``Record.data``: the folders, the process ids with their
start times, and the cgroups.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sandbox_kernel import places
from sandbox_kernel.errors import (
    SandboxError,
    SandboxGone,
    SandboxTimeout,
    SandboxUnavailable,
)
from sandbox_kernel.guest import landlock
from sandbox_kernel.guest.jailinit import STOP_GRACE
from sandbox_kernel.records import Record, Records
from sandbox_kernel.sandboxes import creation
from sandbox_kernel.sandboxes.base import (
    Capabilities,
    Diagnosis,
    SandboxClient,
    SandboxHandle,
    SandboxInfo,
    Usage,
)
from sandbox_kernel.sandboxes.files import read_tail
from sandbox_kernel.sandboxes.local import bubblewrap, environment
from sandbox_kernel.sandboxes.local.control import Control, Hangup
from sandbox_kernel.sandboxes.local.folders import Folders
from sandbox_kernel.sandboxes.local.launch import (
    AGENT_FOLDER,
    WORKSPACE,
    Launch,
    command_fields,
    guest_command,
)
from sandbox_kernel.sandboxes.local.limits import MIB, Cgroup, sweep_cgroups
from sandbox_kernel.sandboxes.local.stream import (
    START_TIMEOUT,
    LocalStream,
    check_started,
    open_stream,
)
from sandbox_kernel.sandboxes.local.usage import measure
from sandbox_kernel.sandboxes.processes import ProcessId, reap
from sandbox_kernel.sandboxes.unsaved import unsaved_in
from sandbox_kernel.spec import SandboxSpec
from sandbox_kernel.text import last_lines, printable

_log = logging.getLogger(__name__)

_KILL_TIMEOUT = 30.0
"""Seconds; a fork bomb on a busy machine dies slowly."""
_MONITOR_TIMEOUT = 1.0
_INFO_TIMEOUT = 5.0
_ERROR_TAIL = 1500
_NO_NETWORK = "The local jail has no network yet; leave it empty, or use a backend with egress."


class LocalHandle(SandboxHandle):
    """One jail, running or ended."""

    backend = "local"
    agent_folder = AGENT_FOLDER
    workdir = WORKSPACE
    holds_lease = True

    def __init__(self, record: Record, records: Records) -> None:
        self._record = record
        self._records = records
        self._folders = Folders.from_json(record.data["folders"])
        self.name = record.name
        self.id = record.id
        self.spec = record.sandbox_spec()
        self.weaknesses = _weaknesses(record.data.get("limits", {}))

    async def open_stream(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        tty: tuple[int, int] | None = None,
        duplex: bool = False,
    ) -> LocalStream:
        creation.check_here(self._record)
        return await open_stream(
            self._folders.runtime,
            command_fields(argv),
            sandbox=self.name,
            env=env or {},
            cwd=cwd or WORKSPACE,
            tty=tty,
            duplex=duplex,
            why_gone=self._why_gone,
        )

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        main: bool = False,
    ) -> None:
        """As the surface says. The end of a ``main`` command is the end of the jail."""
        answer = await self._ask(
            {
                "kind": "spawn",
                **command_fields(argv),
                "env": dict(env or {}),
                "cwd": cwd or WORKSPACE,
                "main": main,
            },
            START_TIMEOUT,
        )
        check_started(answer, argv, self.name)

    async def stop(self) -> None:
        try:
            await self._ask({"kind": "stop"}, STOP_GRACE)
        except SandboxGone:
            return
        except SandboxTimeout:
            await self.kill()
            return
        init = _process(self._record, "init")
        if init and not await asyncio.to_thread(init.wait, STOP_GRACE + _INFO_TIMEOUT):
            await self.kill()
        reap()

    async def kill(self) -> None:
        creation.check_here(self._record)
        init = _process(self._record, "init")
        if init is None or not init.alive:
            return
        try:
            self._folders.ended.write_text("it was killed")
        except OSError as error:  # its disk is full, or another process has removed it
            _log.debug("sandbox %s: why it ended was not noted: %s", self.name, error)
        await asyncio.to_thread(_kill, self._record)

    async def set_lease(self, seconds: float) -> bool:
        return "lease" in await self._ask({"kind": "lease", "seconds": seconds}, _INFO_TIMEOUT)

    async def clear(self) -> bool:
        return bool((await self._ask({"kind": "clear"}, _INFO_TIMEOUT)).get("cleared"))

    async def logs(self, *, tail: int | None = None) -> str:
        return last_lines(await asyncio.to_thread(read_tail, self._folders.log), tail)

    async def info(self) -> SandboxInfo:
        state: dict[str, Any] = {}
        detail: dict[str, Any] = {"workspace": str(self._folders.workspace)}
        if self._record.where == "elsewhere":
            detail["place"] = places.in_words(self._record.place)
            return SandboxInfo(
                name=self.name,
                id=self.id,
                backend=self.backend,
                status="running",  # as far as can be known here
                created=self._record.created,
                limits=dict(self._record.data.get("limits", {})),
                detail=detail,
            )
        if self._record.data.get("own_disk"):
            detail["image"] = {
                "image": str(self._folders.image),
                "mount": str(self._folders.disk),
                "folder": str(self._folders.workspace),
            }
        init = _process(self._record, "init")
        status = "running"
        try:
            state = await self._ask({"kind": "info"}, _INFO_TIMEOUT)
            detail["pid"] = init.pid if init else None
            if self._record.data.get("own_disk") and init:
                detail["workspace"] = f"/proc/{init.pid}/root{WORKSPACE}"
            detail["processes"] = _number(state.get("processes"))
            detail["memory_mib"] = _number(state.get("memory")) // MIB
            detail["attached"] = _number(state.get("attached"))
        except SandboxTimeout as error:
            detail["problem"] = str(error)
        except SandboxGone:
            if init is not None:
                # It hangs up a moment before the last of its processes has ended.
                await asyncio.to_thread(init.wait, _INFO_TIMEOUT)
            state = _saved_state(self._folders)
            status = "stopped" if self._folders.base.exists() else "gone"
            if self._record.data.get("own_disk"):
                detail["workspace"] = f"{self._folders.image} (a file system, in /workspace)"
            detail["reason"] = _reason(self._record)
        cgroup = Cgroup.from_json(self._record.data.get("cgroup"))
        oom_kills = cgroup.oom_kills() if cgroup else 0
        if cgroup is not None and (peak := cgroup.peak_memory()):
            detail["peak_memory_mib"] = peak // MIB
        return SandboxInfo(
            name=self.name,
            id=self.id,
            backend=self.backend,
            status=status,
            created=self._record.created,
            limits=dict(self._record.data.get("limits", {})),
            oom_kills=oom_kills + _kills(state, "memory"),
            last_kill=_last_kill(state, oom_kills, self._record),
            killed=_killed(state),
            detail=detail,
        )

    async def usage(self) -> Usage | None:
        init = _process(self._record, "init")
        if init is None or not init.alive:
            return None
        cgroup = Cgroup.from_json(self._record.data.get("cgroup"))
        return await asyncio.to_thread(measure, init.pid, cgroup)

    def guest_argv(self, *arguments: str) -> Sequence[str]:
        return [*guest_command(self._record.data["python"]["base"], "__main__"), *arguments]

    def kernel_argv(self, argv: Sequence[str]) -> Sequence[str]:
        python = self._record.data["python"]
        if argv and _same_interpreter(argv[0], python["host"]):
            return [python["overlay"], *argv[1:]]
        return argv

    async def install_guest(self, zipapp: bytes) -> None:
        """Nothing to do: the jail sees the guest program where it is installed."""

    async def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        creation.check_here(self._record)
        try:
            control, answer = await Control.request(self._folders.runtime, message, timeout=timeout)
        except Hangup:
            raise SandboxGone(self._why_gone()) from None
        control.close()
        return answer

    def _why_gone(self) -> str:
        return (
            f"Sandbox {self.name!r} has ended: {_reason(self._record)}. Its log: "
            f"`sandbox-kernel logs {self.name}`. Create it anew to go on."
        )


class LocalClient(SandboxClient):
    """Jails on this machine, for this user. Needs no daemon, no root and no account."""

    backend = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_mib=True,
        cpus=True,
        processes=True,
        open_files=True,
        disk_mib=True,
        workspace=True,
        readable=True,
        python=True,
        byte_exact_streams=True,
        reattach=True,
        notes={
            "image": "The local jail shows the host's own system; choose the interpreter with "
            "python, or use a backend with images.",
            "secrets": "The local jail has no way to use a secret without showing it; pass what "
            "the code may know in env.",
            "egress": _NO_NETWORK,
        },
    )

    commands_apart: ClassVar[bool] = True
    """Whether commands in a jail are kept from looking into each other's processes. (A jail that
    stands for a whole machine is none that should do that.)"""

    def __init__(self) -> None:
        self._records = Records()
        self._made: dict[str, Record] = {}
        """Jails that this client has started, for the case that somebody deletes their records."""

    async def create(self, spec: SandboxSpec) -> LocalHandle:
        self.capabilities.check(spec, self.backend)
        await self.sweep()
        # The only slow steps: they may have to run the interpreter. Nothing exists yet.
        python = await asyncio.to_thread(environment.describe, spec.python or sys.executable)
        sandbox_id = secrets.token_hex(6)
        folders = Folders.of(spec, sandbox_id)
        launch = await asyncio.to_thread(
            Launch, spec, sandbox_id, folders, python, self.commands_apart
        )
        record = Record(self.backend, spec.name, sandbox_id, spec.to_dict())
        record.data["folders"] = folders.to_json()
        creation.begin(record)
        self._records.reserve(record)
        try:
            launch.start()
            try:
                await asyncio.wait_for(self._wait_for_jail(launch, record), spec.start_timeout)
            except asyncio.TimeoutError:
                raise SandboxTimeout(
                    f"Sandbox {spec.name!r} did not start within {spec.start_timeout:g} s. Give a "
                    f"longer start_timeout. {_excerpt(folders)}"
                ) from None
        except BaseException as error:
            tail = _excerpt(folders)
            launch.abort()
            folders.remove()
            self._records.delete(self.backend, spec.name)
            if isinstance(error, Hangup):
                raise await self._start_failed(spec, tail) from None
            raise
        launch.done()
        self._made[record.name] = record
        return LocalHandle(record, self._records)

    async def _wait_for_jail(self, launch: Launch, record: Record) -> None:
        if not await launch.let_go():
            raise Hangup
        record.data.update(launch.facts())
        creation.finish(record)
        self._records.save(record)
        runtime = Path(record.data["folders"]["runtime"])
        control, _ = await Control.request(
            runtime, {"kind": "info"}, timeout=record.sandbox_spec().start_timeout
        )
        control.close()

    @staticmethod
    async def _start_failed(spec: SandboxSpec, tail: str) -> SandboxUnavailable:
        why = await asyncio.to_thread(bubblewrap.why_not)
        return SandboxUnavailable(f"Sandbox {spec.name!r} could not be started. {why or tail}")

    async def get(self, name: str) -> LocalHandle:
        return LocalHandle(self._records.load(self.backend, name), self._records)

    async def list(self) -> list[str]:
        return [record.name for record in self._records.list(self.backend)]

    async def remove(self, name: str) -> None:
        record = await creation.settled(self._records, self.backend, name)
        record = record or self._made.get(name)
        if record is None:
            return
        # A removal that was begun is carried through, also if the caller is cancelled.
        await asyncio.shield(asyncio.to_thread(self._destroy, record))

    def _destroy(self, record: Record) -> None:
        if not _kill(record):
            raise SandboxError(
                f"Sandbox {record.name!r} could not be removed: its process "
                f"{record.data['init'][0]} does not end. Try again later."
            )
        Folders.from_json(record.data["folders"]).remove()
        cgroup = Cgroup.from_json(record.data.get("cgroup"))
        if cgroup is not None:
            cgroup.remove()
        self._records.delete(self.backend, record.name)
        self._made.pop(record.name, None)

    async def sweep(self) -> None:
        """Remove what nobody wants: sandboxes whose lease ran out or whose creation was cut short,
        and cgroups without a sandbox. Called by ``create``; never raises for a single one."""
        await asyncio.to_thread(self._sweep)

    def _sweep(self) -> None:
        reap()
        try:
            records = self._records.list(self.backend)
            for record in records:
                if _unwanted(record):
                    self._destroy(record)
            sweep_cgroups({record.id for record in records})
        except (OSError, SandboxError) as error:
            _log.warning("Sandboxes that have ended could not be cleared away: %s", error)

    async def diagnose(self) -> Sequence[Diagnosis]:
        try:
            bwrap = await asyncio.to_thread(bubblewrap.find)
        except SandboxError as error:
            return [Diagnosis(False, "bubblewrap is not there", str(error))]
        version = ".".join(map(str, bwrap.version))
        found = [Diagnosis(True, f"bubblewrap {version} ({bwrap.source}: {bwrap.path})")]
        name = f"doctor-{secrets.token_hex(4)}"
        try:
            handle = await self.create(SandboxSpec(name=name, start_timeout=30.0))
            result = await handle.exec("/bin/sh", ["-c", "exit 0"], timeout=30.0)
            limits = (await handle.info()).limits
        except (OSError, SandboxError) as error:
            return [*found, Diagnosis(False, "no jail can be started", str(error))]
        finally:
            await self.remove(name)
        found.append(Diagnosis(result.ok, "a jail starts and runs a command"))
        found.append(_limits_diagnosis(limits))
        found.append(_landlock_diagnosis())
        if importlib.util.find_spec("ipykernel"):
            found.append(Diagnosis(True, f"ipykernel is installed for {sys.executable}"))
        else:
            fix = f"{sys.executable} -m pip install ipykernel"
            found.append(Diagnosis(False, f"ipykernel is not installed for {sys.executable}", fix))
        return found


def _landlock_diagnosis() -> Diagnosis:
    version = landlock.abi()
    if version >= landlock.LEAST_ABI:
        return Diagnosis(True, f"Landlock (version {version}) stands behind the jail's mounts")
    return Diagnosis(
        None,
        "this kernel has no Landlock that will do, so the jail's mounts are the only wall to files",
        "Linux 5.19 and later have it; it may have to be turned on at boot (lsm=landlock,...).",
    )


def _weaknesses(limits: Mapping[str, str]) -> Sequence[str]:
    """What only a watch holds a jail to."""
    coarse = [name for name in ("memory_mib", "processes") if "watch" in limits.get(name, "")]
    if not coarse:
        return ()
    return (
        f"no cgroup can be had here, so {' and '.join(coarse)} "
        f"{'are' if len(coarse) > 1 else 'is'} held by a watch, which sees an excess after the "
        f"fact; `sandbox-kernel doctor` says how to get one.",
    )


def _limits_diagnosis(limits: Mapping[str, str]) -> Diagnosis:
    held = [limits[name] for name in ("memory_mib", "processes") if name in limits]
    if all("cgroup" in words for words in held):
        return Diagnosis(True, f"cgroups limit memory and processes ({held[0]})")
    return Diagnosis(
        None,
        "no cgroup may be made here, so limits are held by rlimits and a watch, which are coarser: "
        + "; ".join(f"{name} {words}" for name, words in limits.items()),
        "Start the server in a delegated cgroup: systemd-run --user --scope -p Delegate=yes "
        "jupyter lab",
    )


def _process(record: Record, role: str) -> ProcessId | None:
    """None if there is none, or was none since this host was started."""
    found = record.data.get(role) if record.where == "here" else None
    return ProcessId(found[0], found[1]) if found else None


def _kill(record: Record) -> bool:
    """End a jail's processes: with its first one, Linux ends all of them."""
    ended = True
    for role in ("init", "bwrap"):
        process = _process(record, role)
        if process is not None:
            # The monitor ends by itself after the first one has.
            gone = role == "bwrap" and process.wait(_MONITOR_TIMEOUT)
            ended = (gone or process.kill(_KILL_TIMEOUT)) and ended
    reap()
    return ended


def _unwanted(record: Record) -> bool:
    if record.where == "elsewhere":
        return False
    if creation.unfinished(record):
        return creation.cut_short(record)
    init = _process(record, "init")
    if (init is not None and init.alive) or unsaved_in(record) is not None:
        return False
    return _saved_state(Folders.from_json(record.data["folders"])).get("ended") == "lease"


def _saved_state(folders: Folders) -> dict[str, Any]:
    """What jailinit last wrote down; empty if nothing of use is there."""
    try:
        state = json.loads(read_tail(folders.state).partition("\n")[0] or "{}")
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _reason(record: Record) -> str:
    folders = Folders.from_json(record.data["folders"])
    said = _saved_state(folders).get("reason") or read_tail(folders.ended, 200)
    if said:
        return str(said)[:500]
    if not folders.base.exists():
        return "it was removed"
    if creation.unfinished(record):
        return "its creation was interrupted"
    return "it was killed from outside, or the host was restarted"


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _kills(state: Mapping[str, Any], kind: str) -> int:
    kills = state.get("kills")
    return _number(kills.get(kind)) if isinstance(kills, dict) else 0


def _events(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    events = state.get("events")
    return [e for e in events if isinstance(e, dict)] if isinstance(events, list) else []


def _killed(state: Mapping[str, Any]) -> dict[int, str]:
    """What the watch in the jail has killed, by pid."""
    return {
        _number(e.get("pid")): printable(str(e["text"])[:500])
        for e in _events(state)
        if e.get("text")
    }


def _last_kill(state: Mapping[str, Any], oom_kills: int, record: Record) -> str:
    """In words. The cgroup tells that something was killed, jailinit may have seen what."""
    limit = record.data.get("limits", {}).get("memory_mib", "?").partition(" (")[0]
    for event in reversed(_events(state)):
        if event.get("text"):
            return printable(str(event["text"])[:500])
        if oom_kills and event.get("kind") == "killed" and event.get("name"):
            used = _number(event.get("used")) // MIB
            return f"out of memory: {str(event['name'])[:100]!r} used {used} MiB of {limit}"
    if oom_kills:
        return f"out of memory: {oom_kills} process(es) were killed at the limit of {limit}"
    return ""


def _same_interpreter(path: str, host: str) -> bool:
    """Whether a path names the same interpreter of the same environment: a virtual environment
    is known by the folder that the interpreter is called from."""
    if path == host:
        return True
    return (
        os.path.isabs(path)
        and os.path.realpath(path) == os.path.realpath(host)
        and os.path.realpath(os.path.dirname(path)) == os.path.realpath(os.path.dirname(host))
    )


def _excerpt(folders: Folders) -> str:
    tail = read_tail(folders.log, _ERROR_TAIL).strip()
    return f"Its log ends: {tail}" if tail else "Its log is empty."
