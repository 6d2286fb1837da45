"""Hostile code tries to gain rights, to change what is not its own, and to leave its namespaces."""

from __future__ import annotations

import platform

import pytest

from .hosts import Jail

WRITABLE = ("/tmp", "/dev/shm", "/run", "/workspace", "/home/sandbox")
# The few that every program may need: no disk, no memory, no console, no input, no GPU.
DEVICES = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts/ptmx"}


def test_no_rights(jail: Jail) -> None:
    """No capability in any set, none to be gained, and a filter in force."""
    status = jail.answer(
        """
        lines = open("/proc/self/status").read().splitlines()
        answer(dict(line.split(":\\t") for line in lines if ":\\t" in line))
        """
    )
    sets = {name: int(status[name], 16) for name in status if name.startswith("Cap")}
    assert set(sets) == {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}
    assert set(sets.values()) == {0}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"1000"}


def test_setuid_programs_give_nothing(jail: Jail) -> None:
    """Neither the system's own, nor one that the code makes itself."""
    ran = jail.run("/bin/sh", "-c", "echo | su -c id; passwd -d root")
    assert "uid=0" not in ran["stdout"]
    assert ran["exit_code"] != 0
    script = "cp /usr/bin/id i && chmod 6755 i && ./i -u && ./i -ru && ./i -g"
    assert jail.run("/bin/sh", "-c", script)["stdout"].split() == ["1000"] * 3
    found = jail.answer("answer([attempt(os.setuid, 0), attempt(os.setgroups, [0])])")
    assert found == ["EINVAL", "EPERM"]


def test_a_setuid_program_is_of_no_use_to_others_on_the_host(jail: Jail) -> None:
    """It lies in a folder that only the host's own user can enter."""
    assert jail.host.data.stat().st_mode & 0o077 == 0


def test_only_its_own_places_are_writable(jail: Jail) -> None:
    """Every folder of the tree is tried, and every mount is looked at."""
    folders, mounts = jail.answer(
        """
        writable = []
        for at, folders, _ in os.walk("/"):
            if at.startswith("/proc"):
                folders.clear()
            elif os.access(at, os.W_OK):
                folders.clear()
                if attempt(os.mkdir, at + "/attempt") is None:
                    os.rmdir(at + "/attempt")
                    writable.append(at)
        mounts = [line.split() for line in open("/proc/self/mountinfo")]
        mounts = [m[4] for m in mounts if "rw" in m[5].split(",")]
        answer([writable, mounts])
        """,
        timeout=120,
    )
    assert set(folders) <= set(WRITABLE)
    others = {m for m in mounts if m not in WRITABLE and not m.startswith("/dev/")}
    assert others <= {"/proc"}


def test_every_mount_is_without_devices_and_setuid(jail: Jail) -> None:
    """Only the few device nodes themselves are mounts where a device works."""
    found = jail.answer(
        """
        mounts = [line.split() for line in open("/proc/self/mountinfo")]
        answer({m[4]: m[5].split(",") for m in mounts})
        """
    )
    assert [at for at, options in found.items() if "nosuid" not in options] == []
    devices = {at for at, options in found.items() if "nodev" not in options}
    assert {at for at in devices if not at.startswith("/dev/")} == set()


def test_nothing_in_proc_can_be_written(jail: Jail) -> None:
    """No setting of the host's kernel: what may be opened for writing is of its own processes."""
    found = jail.answer(
        """
        writable = []
        for at, folders, files in os.walk("/proc"):
            if at == "/proc":
                folders[:] = [f for f in folders if not f.isdigit() and f != "net"]
            for path in (os.path.join(at, name) for name in files):
                if not os.path.islink(path) and attempt(os.open, path, os.O_WRONLY) is None:
                    writable.append([path, os.stat(path).st_rdev == os.stat("/dev/null").st_rdev])
        answer(writable)
        """
    )
    assert [path for path, covered in found if not covered] == []


def test_no_devices(jail: Jail) -> None:
    """Only the usual nodes are there, and no other can be made."""
    nodes, made = jail.answer(
        """
        nodes = [os.path.join(at, name)[5:] for at, _, names in os.walk("/dev") for name in names
                 if stat.S_IFMT(os.lstat(os.path.join(at, name)).st_mode) in
                 (stat.S_IFCHR, stat.S_IFBLK)]
        made = [attempt(os.mknod, f"{folder}/node", kind | 0o666, os.makedev(*numbers))
                for folder in ("/workspace", "/tmp", "/dev/shm", "/home/sandbox")
                for kind, numbers in ((stat.S_IFBLK, (8, 0)), (stat.S_IFCHR, (1, 1)))]
        answer([nodes, made])
        """
    )
    assert {name for name in nodes if not name.startswith("pts/")} <= DEVICES
    assert set(made) <= {"EPERM", "EACCES"}  # no right to, or Landlock was asked first


def test_no_controlling_terminal(jail: Jail) -> None:
    """The terminal that the host was started from is out of reach."""
    assert jail.answer('answer(attempt(open, "/dev/tty"))') == "ENXIO"


def test_only_its_standard_streams_are_open(jail: Jail) -> None:
    """No descriptor of the host's or of the jail's keeper leaks into a command."""
    assert jail.answer('answer(sorted(map(int, os.listdir("/proc/self/fd")))[:-1])') == [0, 1, 2]


_SYSCALLS = {
    # name: (x86_64, aarch64, arguments)
    "unshare user": (272, 97, [0x10000000]),
    "unshare mount": (272, 97, [0x00020000]),
    "clone user": (56, 220, [0x10000000 | 17]),
    "setns": (308, 268, [0, 0]),
    "mount": (165, 40, []),
    "umount2": (166, 39, []),
    "pivot_root": (155, 41, []),
    "chroot": (161, 51, []),
    "open_tree": (428, 428, []),
    "fsopen": (430, 430, []),
    "bpf": (321, 280, []),
    "perf_event_open": (298, 241, []),
    "userfaultfd": (323, 282, []),
    "io_uring_setup": (425, 425, [1]),
    "ptrace": (101, 117, [0]),
    "process_vm_readv": (310, 270, [1]),
    "pidfd_getfd": (438, 438, []),
    "kcmp": (312, 272, []),
    "keyctl": (250, 219, []),
    "add_key": (248, 217, []),
    "request_key": (249, 218, []),
    "init_module": (175, 105, []),
    "kexec_load": (246, 104, []),
    "reboot": (169, 142, []),
    "swapon": (167, 224, []),
    "sethostname": (170, 161, []),
    "settimeofday": (164, 170, []),
    "open_by_handle_at": (304, 265, []),
    "syslog": (103, 116, []),
}


@pytest.mark.parametrize("name", _SYSCALLS)
def test_calls_that_lead_outside_are_refused(jail: Jail, name: str) -> None:
    """EPERM (or: there is no such call), whatever the arguments."""
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("the numbers of this machine's calls are not known here")
    number = _SYSCALLS[name][platform.machine() == "aarch64"]
    found = jail.answer(
        """
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = [ctypes.c_long(int(n)) for n in sys.argv[1:]]
        result = libc.syscall(*numbers, *[ctypes.c_long(0)] * (7 - len(numbers)))
        answer([result, errno.errorcode.get(ctypes.get_errno())])
        """,
        str(number),
        *map(str, _SYSCALLS[name][2]),
    )
    assert found == [-1, "EPERM"]


def test_no_typing_into_a_terminal(jail: Jail) -> None:
    """TIOCSTI is refused, also on a terminal of the jail's own."""
    found = jail.answer(
        """
        import fcntl, pty, termios
        master, slave = pty.openpty()
        answer(attempt(fcntl.ioctl, slave, termios.TIOCSTI, b"x"))
        """
    )
    assert found == "EPERM"


def test_no_keyring(jail: Jail) -> None:
    """The session's keys are neither listed nor usable."""
    assert jail.answer('answer(attempt(open, "/proc/keys"))') in ("EACCES", "ENOENT")


def test_links_of_proc_lead_nowhere(jail: Jail) -> None:
    """The root and folders of the keeper, and of namespaces, cannot be entered."""
    found = jail.answer(
        """
        places = ["/proc/1/root/etc", "/proc/1/cwd/etc", "/proc/1/task/1/root", "/proc/1/map_files"]
        answer([attempt(os.stat, "/proc/1/ns/user")] + [attempt(os.listdir, p) for p in places])
        """
    )
    assert set(found) == {"EACCES"}


def test_a_crash_is_not_fed_to_the_hosts_handler(jail: Jail) -> None:
    """Where core dumps go through a pipe (systemd-coredump, apport), a limit of 0 does not keep the
    host from running its handler on what hostile code left in its memory; a limit of 1 does. It
    cannot be changed from inside, in no way, and programs that try it (gpg) go on."""
    found = jail.answer(
        """
        import resource
        core = resource.RLIMIT_CORE
        limits = [resource.getrlimit(core)]
        resource.setrlimit(core, (0, 0))
        libc = ctypes.CDLL(None, use_errno=True)
        zero = (ctypes.c_uint64 * 2)()
        number = {"x86_64": 160, "aarch64": 164}[os.uname().machine]
        called = libc.syscall(ctypes.c_long(number), ctypes.c_long(core), zero)
        tried = attempt(resource.prlimit, 0, core, (0, 0))
        child = os.fork()
        if child == 0:
            os.abort()
        status = os.waitpid(child, 0)[1]
        limits += [resource.getrlimit(core), resource.prlimit(os.getpid(), core)]
        answer([limits, called, tried, os.WCOREDUMP(status), os.WTERMSIG(status)])
        """
    )
    assert found == [[[1, 1]] * 3, 0, "EPERM", False, 6]
