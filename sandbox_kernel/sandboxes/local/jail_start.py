"""Starts a jail: folders, view of the host, environment, bubblewrap, cgroup, jailinit.

``Launch`` is used by ``LocalClient.create`` only. Its steps are synchronous and short, so that they
cannot be interrupted half-way; between them the client waits for the jail.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel import guest_program
from sandbox_kernel.errors import SpecError, SpecRefused
from sandbox_kernel.host_processes import ProcessId, adopt, reap
from sandbox_kernel.paths import data_dir, runtime_dir
from sandbox_kernel.sandboxes.async_fd import AsyncFd
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.egress_environment import (
    egress_variables,
    may_end_tls,
    with_bundle,
)
from sandbox_kernel.sandboxes.local import (
    bubblewrap,
    disk_image,
    low_ports,
    seccomp,
    systemd_scope,
    trusted_bundle,
)
from sandbox_kernel.sandboxes.local.cgroup import Cgroup, cgroups_allowed
from sandbox_kernel.sandboxes.local.environment import PythonEnvironment
from sandbox_kernel.sandboxes.local.guest_copy import compiled_guest
from sandbox_kernel.sandboxes.local.hidden_paths import contains, covers, is_environment
from sandbox_kernel.sandboxes.local.jail_folders import JailFolders
from sandbox_kernel.sandboxes.local.jail_request import listen
from sandbox_kernel.sandboxes.local.limits import Limits
from sandbox_kernel.sandboxes.local.mounts import Bind, Cover, Mount, mounted_in
from sandbox_kernel.sandboxes.local.overlay_venv import (
    PIP_VARIABLES,
    WITHOUT_NETWORK,
    overlay_venv,
)
from sandbox_kernel.sandboxes.local.shared_folder import SharedFolder, share
from sandbox_kernel.sandboxes.local.system_mounts import (
    HOME,
    USER,
    system_binds,
    write_identity,
    write_size,
)
from sandbox_kernel.spec import MAX_ENV, SandboxSpec

_log = logging.getLogger(__name__)

WORKSPACE = "/workspace"
OVERLAY = f"{HOME}/.venv"
AGENT_FOLDER = "/run/sandbox-kernel"
GUEST_ROOT = "/opt/sandbox-kernel"
_GUEST_FOLDER = f"{GUEST_ROOT}/{guest_program.PACKAGE}"
_MAX_INFO = 64 * 1024
_GIVE_UP_TIMEOUT = 5.0


def guest_command(python: str, module: str) -> list[str]:
    """The command line that runs ``main`` of a module of the guest package in the jail. Without
    ``site`` and without the user's settings: it must not depend on what the jail installs."""
    code = (
        f"import sys; sys.path.insert(0, {GUEST_ROOT!r}); "
        f"from {guest_program.PACKAGE}.guest.{module} import main; sys.exit(main())"
    )
    return [python, "-I", "-S", "-c", code]


def command_fields(command: Command) -> dict[str, Any]:
    """A command as jailinit wants it: the guest program is not started but forked there."""
    argv = list(command.argv)
    fields = {"argv": argv, "env": dict(command.env), "cwd": command.cwd or WORKSPACE}
    guest_part = guest_command("", "__main__")[1:]
    if argv[1 : 1 + len(guest_part)] == guest_part:
        fields["guest"] = argv[1 + len(guest_part) :]
    return fields


class Launch:
    """One attempt to start a jail. ``abort`` takes back whatever has been done so far.

    ``commands_apart``: no command in it may look into the processes of another one.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        folders: JailFolders,
        python: PythonEnvironment,
        commands_apart: bool,
    ) -> None:
        self._spec = spec
        self._commands_apart = commands_apart
        self._id = sandbox_id
        self._folders = folders
        self._python = python
        self._limits = Limits.of(spec)
        self._roots: bytes | None = None
        if may_end_tls(spec.egress):
            self._egress, self._roots = with_bundle(spec.egress, trusted_bundle.BUNDLE)
        else:
            self._egress = egress_variables(spec.egress)
        self._cpus = self._limits.choose_cpus()
        self._guest = compiled_guest(python.base_executable, python.version, _GUEST_FOLDER)
        self._fds: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self.init: ProcessId | None = None
        self.cgroup: Cgroup | None = None
        self._own_disk = False
        self._shared: SharedFolder | None = None

    def look(self, *, contested: bool) -> None:
        """Look through the folder that the jail is shown; of many files this takes long, and
        changes nothing. ``contested``: another sandbox may write there. SpecError."""
        self._shared = share(self._spec, WORKSPACE, self._folders.empty, contested=contested)

    def start(self) -> None:
        """Start bubblewrap, up to the point where it waits to be let go. After ``look``, if the
        jail is shown a folder."""
        self._folders.make()
        binds = self._binds()
        listener = self._hold(listen(self._folders.runtime).detach())
        log = self._open(self._folders.log, os.O_APPEND)
        state = self._open(self._folders.state)
        config_read, self._config = self._pipe()
        fcntl.fcntl(self._config, fcntl.F_SETPIPE_SZ, 4 * MAX_ENV)
        block_read, self._block = self._pipe()
        self._info, info_write = self._pipe()
        # Chosen from outside, or it would be no limit.
        refuse = () if self._cpus is None else ("sched_setaffinity",)
        program = self._memory_file(seccomp.program(refuse=refuse))
        meminfo, shown = write_size(self._folders.runtime, self._limits.memory, self._cpus)
        given = (listener, config_read, log, state, self._open(meminfo))
        command = bubblewrap.jail_command(
            bubblewrap.find(),
            binds=binds,
            hostname=self._spec.name,
            tmp_bytes=self._limits.memory // 2,
            env=self._environment(),
            seccomp_fd=program,
            info_fd=info_write,
            block_fd=block_read,
            argv=[
                *guest_command(self._python.base_executable, "jail.init"),
                *(str(fd) for fd in given),
            ],
            views=shown,
        )
        if self._wants_own_disk():
            command = disk_image.with_image(
                command, self._folders.image, self._folders.disk, self._limits.disk
            )
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={},
            # The reading end of info, too: if nobody could read it any more, bubblewrap's monitor
            # would die of that and leave the jail's first process behind, waiting forever.
            pass_fds=(*given, program, self._info, info_write, block_read),
            start_new_session=True,
        )
        adopt(self._process)
        # Only the jail has them now, so the end of the jail is seen as the end of these.
        self._close(*given, program, info_write, block_read)

    def _wants_own_disk(self) -> bool:
        """Only for a limit that was asked for: all of the space is set aside. A named workspace
        outlives its sandboxes, and several may use it, so it stays a plain folder."""
        if self._spec.disk_mib is None or self._spec.volume is not None:
            return False
        why_not = disk_image.why_not(self._folders.base, self._limits.disk)
        if why_not is not None:
            _log.info(
                "Sandbox %r has no file system of its own, so its disk_mib is held by a watch: %s.",
                self._spec.name,
                why_not,
            )
        return why_not is None

    async def let_go(self) -> bool:
        """Limit the jail's first process, then let it run. False if bubblewrap ended instead."""
        data = b""
        port = AsyncFd(os.dup(self._info))
        try:
            while len(data) < _MAX_INFO and (piece := await port.read()):
                data += piece
        finally:
            port.close()
        try:
            pid = int(json.loads(data)["child-pid"])
        except (ValueError, KeyError, TypeError):
            return False
        self.init = ProcessId.of(pid)
        if self.init is None:
            return False
        # From outside, because it cannot be changed inside. A limit of 0 would leave it to a
        # handler to which the kernel pipes core dumps; 1 means no dump at all to the kernel.
        resource.prlimit(pid, resource.RLIMIT_CORE, (1, 1))
        if self._cpus is not None:
            os.sched_setaffinity(pid, self._cpus)
        # From systemd first, where it runs: it takes the controllers of a cgroup that it has not
        # made itself away again, at its next reload.
        self.cgroup = await asyncio.to_thread(systemd_scope.create, self._id, pid, self._limits)
        if self.cgroup is None:
            cgroup = Cgroup.create(self._id, self._limits)
            self.cgroup = cgroup if cgroup and cgroup.add(pid) else None
        held = self.cgroup.folders if self.cgroup else {}
        if (self._spec.cpus or 0) % 1 and "cpu" not in held:
            raise SpecRefused(
                f"Sandbox {self._spec.name!r} was not created: cpus={self._spec.cpus:g} needs a "
                f"cgroup, and none can be made here. Give a whole number, which is enforced by CPU "
                f"affinity; `sandbox-kernel doctor` says how to get cgroups."
            )
        if self._spec.egress:
            why_not = await asyncio.to_thread(low_ports.allow, pid)
            if why_not is not None:
                _log.warning(
                    "Sandbox %r: programs that ignore proxies find no way out to ports below 1024, "
                    "such as 443: %s",
                    *(self._spec.name, why_not),
                )
        assert self._process is not None
        self._own_disk = disk_image.is_mounted(self._process.pid, self._folders.disk)
        config = {
            "memory": self._limits.memory,
            "lease": self._spec.lease_seconds,
            "commands_apart": self._commands_apart,
            # Not on bubblewrap's command line, which every user of this host can read.
            "env": dict(self._spec.env),
            **self._limits.for_guest(self.cgroup, self._counted(), own_disk=self._own_disk),
        }
        with contextlib.suppress(BrokenPipeError):  # it died; the caller sees that next
            os.write(self._config, json.dumps(config).encode())
            os.write(self._block, b"\n")
        self._close(self._config, self._block)
        return True

    def check_folder(self) -> None:
        """The jail answers, and nothing runs in it yet: is it shown what was meant? SpecError."""
        if self._shared is not None:
            assert self.init is not None
            self._shared.check(f"/proc/{self.init.pid}/root")

    def _counted(self) -> list[str]:
        """Folders whose files count for the disk limit: not those that are the user's own."""
        return [HOME] if self._spec.folder is not None else [WORKSPACE, HOME]

    def done(self) -> None:
        """The jail answers: free what was needed to start it."""
        self._close(*self._fds)

    def abort(self) -> None:
        """End what runs and delete what was made, but for the folders. Takes a moment at most."""
        # jailinit ends without its configuration, so this needs no process id.
        self._close(*self._fds)
        if self.init is not None:
            self.init.kill(_GIVE_UP_TIMEOUT)
        if self._process is not None:
            try:
                self._process.wait(_GIVE_UP_TIMEOUT)
            except subprocess.TimeoutExpired:
                for pid in (*_children(self._process.pid), self._process.pid):
                    process = ProcessId.of(pid)
                    if process is not None:
                        process.kill(_GIVE_UP_TIMEOUT)
            reap()
        if self.cgroup is not None:
            self.cgroup.remove()

    def facts(self) -> dict[str, Any]:
        """What another process must know about the running jail, for its record."""
        assert self.init is not None
        assert self._process is not None
        monitor = ProcessId.of(self._process.pid)
        return {
            "init": [self.init.pid, self.init.start],
            "bwrap": [monitor.pid, monitor.start] if monitor else None,
            "cgroup": self.cgroup.to_json() if self.cgroup else None,
            "limits": self._limits.in_words(self.cgroup, own_disk=self._own_disk),
            "own_disk": self._own_disk,
            "python": {
                "host": self._python.executable,
                "overlay": f"{OVERLAY}/bin/python",
                "base": self._python.base_executable,
            },
        }

    def likeness(self) -> str:
        """A digest of what the jail would be like if it were started now: what it sees of the host,
        its limits and its environment. For ``SandboxClient.likeness``; changes nothing."""
        shown = self._shown()
        sources = [mount.source for mount in shown if isinstance(mount, Bind)]
        facts = (
            *(shown, [_identity(source) for source in sources], mounted_in(sources)),
            *(self._hidden(shown), self._environment(), self._guest, self._python),
            *(self._limits, sorted(os.sched_getaffinity(0)), self._commands_apart),
            *(bubblewrap.find(), cgroups_allowed(), self._trust_facts()),
        )
        return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()

    def _trust_facts(self) -> object:
        """Of what it trusts, beside the gateway's authority: whoever uses the jail makes one."""
        if self._roots is None:
            return None
        return self._roots, trusted_bundle.targets(self._python.site_packages)

    # --- what the jail sees ---

    def _shown(self) -> list[Mount]:
        """What it sees of the host."""
        environments = list(filter(is_environment, self._spec.readable))
        asked_for = [os.path.normpath(p) for p in self._spec.readable if p not in environments]
        # No covers in folders that the user asked for by name.
        shown: list[Mount] = [
            mount
            for mount in (*system_binds(), *self._python.binds())
            if not (isinstance(mount, Cover) and any(contains(f, mount.target) for f in asked_for))
        ]
        shown += [self._readable(path) for path in self._spec.readable]
        for path in environments:
            shown += covers(os.path.realpath(path), path, is_prefix=True)
        return shown

    @staticmethod
    def _hidden(shown: Sequence[Mount]) -> list[str]:
        """Where in the jail our own files would be seen."""
        secrets = (data_dir(), runtime_dir())
        return [target for secret in secrets for target in _appearances(shown, secret)]

    def _binds(self) -> list[Mount]:
        shown = self._shown()
        hidden = [Bind(str(self._folders.empty), target) for target in self._hidden(shown)]
        overlay_venv(self._python, self._folders.home / ".venv", OVERLAY)
        own = [
            *self._workspace(),
            Bind(str(self._folders.home), HOME, writable=True),
            Bind(str(self._guest), _GUEST_FOLDER),
        ]
        resolver = bool(self._spec.egress)
        identity = write_identity(self._folders.etc, self._spec.name, resolver=resolver)
        return [*shown, *hidden, *identity, *self._trusted(), *own]

    def _trusted(self) -> list[Bind]:
        if self._roots is None:
            return []
        trusted_bundle.make(self._folders.trust, self._roots)
        return trusted_bundle.binds(self._folders.trust, self._python.site_packages)

    def _workspace(self) -> list[Mount]:
        if self._shared is not None:
            return list(self._shared.mounts)
        return [Bind(str(self._folders.workspace), WORKSPACE, writable=True)]

    def _readable(self, path: str) -> Bind:
        real = os.path.realpath(path)
        refused = f"Sandbox {self._spec.name!r} was not created: readable={path!r}"
        if not os.path.exists(real):
            raise SpecError(f"{refused} does not exist.")
        for secret in (data_dir(), runtime_dir()):
            if Path(real).is_relative_to(os.path.realpath(secret)):
                raise SpecError(f"{refused} is part of sandbox-kernel's own files.")
        for own in (WORKSPACE, HOME, GUEST_ROOT):
            if Path(path).is_relative_to(own) or Path(own).is_relative_to(path):
                raise SpecError(f"{refused} is in the way of {own}, which the jail has itself.")
        return Bind(real, path)

    def _environment(self) -> dict[str, str]:
        python = self._python
        path = [f"{OVERLAY}/bin", *python.path_entries(), "/usr/local/bin", "/usr/bin", "/bin"]
        language = os.environ.get("LANG", "")
        if not language.lower().replace("-", "").endswith("utf8"):
            language = "C.UTF-8"
        env = {
            "HOME": HOME,
            "USER": USER,
            "LOGNAME": USER,
            "SHELL": "/bin/sh",
            "PATH": ":".join(dict.fromkeys(path)),
            "LANG": language,
            "LC_ALL": language,
            "TERM": os.environ.get("TERM", "xterm-256color"),
            "TMPDIR": "/tmp",  # noqa: S108  (a path inside the sandbox)
            "VIRTUAL_ENV": OVERLAY,
            "XDG_CACHE_HOME": f"{HOME}/.cache",
            **PIP_VARIABLES,
            **(self._egress or WITHOUT_NETWORK),
            **python.variables(),
        }
        if "TZ" in os.environ:
            env["TZ"] = os.environ["TZ"]
        return env

    # --- descriptors ---

    def _open(self, path: Path, flags: int = 0) -> int:
        flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return self._hold(os.open(path, flags, 0o600))

    def _pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        return self._hold(read), self._hold(write)

    def _memory_file(self, content: bytes) -> int:
        fd = self._hold(os.memfd_create("seccomp", os.MFD_CLOEXEC))
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def _hold(self, fd: int) -> int:
        self._fds.add(fd)
        return fd

    def _close(self, *fds: int) -> None:
        for fd in fds:
            if fd in self._fds:
                self._fds.discard(fd)
                os.close(fd)


def _identity(path: str) -> tuple[int, int] | None:
    """Which file it is: another one may take its place, and a jail goes on with the first."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _appearances(shown: Sequence[Mount], secret: Path) -> Iterator[str]:
    """Where in the jail a folder that must stay hidden would be seen."""
    real = Path(os.path.realpath(secret))
    for mount in shown:
        if isinstance(mount, Bind) and real.is_relative_to(os.path.realpath(mount.source)):
            yield str(Path(mount.target) / real.relative_to(os.path.realpath(mount.source)))
