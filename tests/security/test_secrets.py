"""Hostile code looks for what is the host's: variables, files, processes, network, tokens."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from sandbox_kernel.sandboxes.local.hidden_paths import SETTINGS, shown_with
from tests.local.jails import SYSTEM_PYTHON

from .hosts import Host, Jail

OWN_VARIABLES = {
    *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "PWD", "LANG", "LC_ALL", "TERM", "TMPDIR", "TZ"),
    *("VIRTUAL_ENV", "XDG_CACHE_HOME", "JUPYTER_PATH", "JUPYTER_CONFIG_PATH"),
    *("PIP_DISABLE_PIP_VERSION_CHECK", "PIP_RETRIES"),
}


def test_no_variable_of_the_host(jail: Jail) -> None:
    """A command has the few that the jail sets, and those hold nothing of the host's secrets."""
    found = jail.answer("answer(dict(os.environ))")
    assert set(found) - OWN_VARIABLES == set()
    assert jail.host.canary not in repr(found)


def test_no_variable_of_the_host_in_any_process(jail: Jail) -> None:
    """Nor is one to be had from another process in the sandbox."""
    found = jail.answer(
        """
        found = ""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("environ", "cmdline"):
                try:
                    found += open(f"/proc/{pid}/{name}", errors="replace").read()
                except OSError:
                    pass
        answer(found)
        """
    )
    assert jail.host.canary not in found


def test_no_home_folder(jail: Jail) -> None:
    """The host's home cannot be read, listed, or reached through a link."""
    found = jail.answer(
        """
        home = sys.argv[1]
        os.symlink(home, "home-link")
        places = [home, home + "/secret", "home-link/secret", "/root/.ssh", "/home/sandbox/secret"]
        answer([attempt(open, place) for place in places] + [os.listdir("/home")])
        """,
        str(jail.host.home),
    )
    assert found == ["ENOENT"] * 5 + [["sandbox"]]


def test_no_temporary_files(jail: Jail) -> None:
    """The host's /tmp and /dev/shm are others, and empty."""
    for folder in ("/tmp", "/dev/shm"):
        with tempfile.NamedTemporaryFile(dir=folder) as canary:
            os.chmod(canary.name, 0o644)
            assert jail.answer("answer(os.path.exists(sys.argv[1]))", canary.name) is False


def test_none_of_the_hosts_own_files(jail: Jail) -> None:
    """Neither the records with tokens, nor the sockets, nor another sandbox's folders."""
    folders = (jail.host.data, jail.host.data.with_name("run"))
    for folder in folders:
        found = jail.answer("answer(attempt(os.listdir, sys.argv[1]))", str(folder))
        assert found == "ENOENT"


@pytest.mark.parametrize(
    "path", ["/etc/shadow", "/etc/sudoers", "/etc/ssh", "/root/.ssh", "/boot", "/sys", "/var/lib"]
)
def test_no_system_secrets(jail: Jail, path: str) -> None:
    """What holds secrets of the system is not there at all."""
    assert jail.answer("answer(attempt(os.stat, sys.argv[1]))", path) == "ENOENT"


def test_no_process_of_the_host(jail: Jail) -> None:
    """None is seen, and none can be signalled."""
    found = jail.answer(
        """
        shown = [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc") if p.isdigit()]
        hosts = map(int, sys.argv[1:])
        answer([shown, [attempt(os.kill, pid, 0) for pid in hosts], attempt(os.kill, -1, 0)])
        """,
        str(os.getpid()),
        str(jail.host.call("pid")),
    )
    shown, signals, everyone = found
    assert len(shown) <= 3
    assert jail.host.canary not in repr(shown)
    assert set(signals) == {"ESRCH"}
    assert everyone is None or everyone == "ESRCH"


@contextlib.contextmanager
def listeners() -> Iterator[tuple[int, int, str, list[socket.socket]]]:
    """A TCP, a UDP and an abstract Unix socket of the host's that wait for a visitor."""
    name = f"canary-{secrets.token_hex(8)}"
    with (
        socket.socket() as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        tcp.bind(("0.0.0.0", 0))
        udp.bind(("0.0.0.0", 0))
        abstract.bind("\0" + name)
        tcp.listen()
        abstract.listen()
        for waiting in (tcp, udp, abstract):
            waiting.setblocking(False)
        yield tcp.getsockname()[1], udp.getsockname()[1], name, [tcp, udp, abstract]


def test_no_network(jail: Jail) -> None:
    """No way to the host's sockets: not by loopback, not by its address, not by an abstract
    name; no name is resolved, and there is no interface but the jail's own loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells the host's own address
        address = probe.getsockname()[0]
    with listeners() as (tcp, udp, name, waiting):
        found = jail.answer(
            """
            tcp, udp, name, address = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
            def connect(family, place):
                with socket.socket(family) as s:
                    s.settimeout(5)
                    s.connect(place)
            def send(place):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                    s.sendto(b"x", place)
            def resolve():
                socket.getaddrinfo("example.org", 80)
            answer({
                "tcp": attempt(connect, socket.AF_INET, ("127.0.0.1", tcp)),
                "tcp6": attempt(connect, socket.AF_INET6, ("::1", tcp)),
                "own address": attempt(connect, socket.AF_INET, (address, tcp)),
                "outside": attempt(connect, socket.AF_INET, ("1.1.1.1", 53)),
                "udp": attempt(send, ("1.1.1.1", 53)),
                "abstract": attempt(connect, socket.AF_UNIX, "\\0" + name),
                "dns": attempt(resolve) is not None,
                "interfaces": [name for _, name in socket.if_nameindex()],
                "raw": attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
                "packet": attempt(socket.socket, 17, socket.SOCK_RAW),
                "vsock": attempt(socket.socket, 40, socket.SOCK_STREAM),
                "listed": name in open("/proc/net/unix").read(),
            })
            """,
            str(tcp),
            str(udp),
            name,
            address,
        )
        for listener in waiting:
            with pytest.raises(BlockingIOError):
                listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()
    assert found.pop("interfaces") == ["lo"]
    assert found.pop("dns") is True
    assert found.pop("listed") is False
    assert [what for what, error in found.items() if error is None] == []


def test_no_other_sandbox(victim: Host, jail: Jail) -> None:
    """Two sandboxes of one user see neither files, nor sockets, nor processes of each other."""
    with victim.jail(agent=True) as other:
        mark = f"mark-{secrets.token_hex(8)}"
        other.run("touch", f"/tmp/{mark}", f"/workspace/{mark}", f"/dev/shm/{mark}")
        other.call("spawn", argv=["sleep", "31536005"])
        found = jail.answer(
            """
            files = [os.path.join(at, name) for top in ("/tmp", "/run", "/workspace", "/home",
                     "/dev") for at, folders, names in os.walk(top) for name in names + folders]
            shown = [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc") if p.isdigit()]
            answer([files, shown, open("/proc/net/unix").read()])
            """
        )
        assert mark not in repr(found)
        assert "agent.sock" not in repr(found)
        assert "31536005" not in repr(found)


def test_the_session_token_is_nowhere_to_be_found(victim: Host) -> None:
    """While a host is attached, no file, variable, command line or readable memory has it."""
    with victim.jail(agent=True) as jail:
        found = jail.answer(
            """
            import re
            token, found = re.compile(rb"[0-9a-f]{64}"), set()
            for top in ("/tmp", "/run", "/home", "/workspace", "/dev/shm"):
                for at, folders, names in os.walk(top):
                    # What is read-only comes from the host, which knew no token then.
                    folders[:] = [f for f in folders if os.access(os.path.join(at, f), os.W_OK)]
                    for name in names:
                        path = os.path.join(at, name)
                        if stat.S_ISREG(os.lstat(path).st_mode):
                            found.update(token.findall(open(path, "rb").read()))
            for pid in filter(str.isdigit, os.listdir("/proc")):
                for name in ("environ", "cmdline"):
                    try:
                        found.update(token.findall(open(f"/proc/{pid}/{name}", "rb").read()))
                    except OSError:
                        pass
                if int(pid) == os.getpid():
                    continue
                try:
                    maps, memory = open(f"/proc/{pid}/maps"), open(f"/proc/{pid}/mem", "rb", 0)
                except OSError:
                    continue
                for line in maps:
                    start, end = (int(n, 16) for n in line.split()[0].split("-"))
                    if line.split()[1].startswith("rw"):
                        try:
                            memory.seek(start)
                            found.update(token.findall(memory.read(end - start)))
                        except (OSError, ValueError, OverflowError):
                            pass
            answer([item.decode() for item in found])
            """
        )
        assert victim.call("token", name=jail.name) not in found


_FIND = """
    found, readable = [], []
    for at, _, names in os.walk(sys.argv[1]):
        for path in (os.path.join(at, name) for name in names):
            try:
                with open(path, "rb") as file:
                    content = file.read()
            except OSError:
                continue
            readable.append(os.path.relpath(path, sys.argv[1]))
            if sys.argv[2].encode() in content:
                found.append(readable[-1])
    answer([found, readable])
"""


@pytest.mark.parametrize("layout", ["the environment is the project", "it lies in the project"])
def test_no_settings_of_the_environment(victim: Host, layout: str) -> None:
    """An environment is shown for its packages, not for what else lies in it: pip.conf with the
    password of an index, Jupyter's configuration, the variables of other kernels; and where the
    environment is a project's folder, or an editable install shows that, .env and .git."""
    canary = f"secret-{victim.canary}"
    project = victim.home / f"project-{len(layout)}"
    venv = project if "is the" in layout else project / ".tox" / "env"
    subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    if venv != project:
        (site,) = venv.glob("lib/python3.*/site-packages")
        (site / "project.pth").write_text(f"{project}\n")
    spec = {"argv": ["x"], "display_name": "x", "language": "x"}
    kernels = "share/jupyter/kernels"
    secrets_in = {
        project: (".env", ".git/config", ".envrc", ".tox/log", ".aws/credentials"),
        venv: (
            *("pip.conf", "pip.ini", "etc/jupyter/jupyter_server_config.json", "etc/npmrc"),
            *("conda-meta/state", "etc/conda/activate.d/env_vars.sh", ".netrc"),
            *(f"{kernels}/mine/launch.json", f"{kernels}/broken/kernel.json"),
            *("share/jupyter/runtime/jpserver-1.json", "share/jupyter/lab/settings/x.json"),
        ),
    }
    for folder, names in secrets_in.items():
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(canary)
    for name, more in {"other": {"env": {"TOKEN": canary}}, "plain": {}}.items():
        (venv / kernels / name).mkdir()
        (venv / kernels / name / "kernel.json").write_text(json.dumps({**spec, **more}))
    (venv / "etc/fonts").mkdir()
    (venv / "etc/fonts/fonts.conf").touch()
    (project / "module.py").touch()
    with victim.jail(python=str(venv / "bin/python")) as jail:
        found, readable = jail.answer(_FIND, str(project), canary)
        assert found == []
        inside = os.path.relpath(venv, project)
        wanted = ["pyvenv.cfg", "etc/fonts/fonts.conf", f"{kernels}/plain/kernel.json"]
        needed = {os.path.normpath(f"{inside}/{name}") for name in wanted}
        assert {"module.py", *needed} <= set(readable)
        ran = jail.run("python3", "-c", "import module, sys; print(sys.version_info[:2] >= (3, 9))")
        assert venv == project or ran["stdout"] == "True\n"


def test_no_settings_of_the_system_prefix(jail: Jail) -> None:
    """/usr/local/etc is shown with /usr, but what administrators keep there is not."""
    for folder in ("/usr/local/etc", "/usr/etc"):
        _, readable = jail.answer(_FIND, folder, "x")
        kept = " ".join(SETTINGS.values()).replace("*", "").split()
        assert [name for name in readable if not name.startswith(tuple(kept))] == []


def test_a_program_in_the_home_folder_shows_itself_only(victim: Host) -> None:
    """What a kernel's program in ~/bin makes readable is the program, not the keys beside it."""
    program = victim.home / "bin" / "kernel"
    program.parent.mkdir(exist_ok=True)
    shutil.copy("/bin/true", program)
    (program.parent / "key").write_text(victim.canary)
    with victim.jail(readable=list(shown_with(str(program)))) as jail:
        found, readable = jail.answer(_FIND, str(victim.home), victim.canary)
        assert (found, readable) == ([], ["bin/kernel"])
        assert jail.run(str(program))["exit_code"] == 0
