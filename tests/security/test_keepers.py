"""Hostile code turns against what keeps it: the jail's first process, and the agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .hosts import Failed, Host, Jail


@pytest.fixture
def attached(victim: Host) -> Iterator[Jail]:
    """A sandbox with an agent, of the test's own."""
    with victim.jail(agent=True) as made:
        yield made


def test_process_1_takes_no_signal(attached: Jail) -> None:
    """Not one of them stops, ends or confuses it."""
    attached.answer("answer([attempt(os.kill, 1, number) for number in range(1, 65)])")
    assert attached.run("echo", "still here")["stdout"] == "still here\n"
    assert attached.call("info")["status"] == "running"


@pytest.mark.parametrize(
    "name", ["mem", "environ", "maps", "fd/0", "fdinfo/0", "cwd", "root", "exe"]
)
def test_the_keepers_cannot_be_looked_into(attached: Jail, name: str) -> None:
    """Neither memory nor descriptors, for reading or for writing."""
    keepers = (1, attached.call("agent_pid"))
    found = attached.answer(
        """
        def look(path):
            open(path, "rb").read(1)
        name, *pids = sys.argv[1:]
        answer([attempt(look, f"/proc/{pid}/{name}") for pid in pids]
               + [attempt(os.readlink, f"/proc/{pid}/fd/1") for pid in pids]
               + [attempt(os.open, f"/proc/{pid}/mem", os.O_RDWR) for pid in pids])
        """,
        name,
        *map(str, keepers),
    )
    assert set(found) == {"EACCES"}


def test_the_keepers_cannot_be_traced(attached: Jail) -> None:
    """ptrace is refused before it is asked whom."""
    keepers = (1, attached.call("agent_pid"))
    found = attached.answer(
        """
        libc = ctypes.CDLL(None, use_errno=True)
        results = []
        for pid in map(int, sys.argv[1:]):
            for request in (16, 0x4206):  # ATTACH, SEIZE
                result = libc.ptrace(request, pid, 0, 0)
                results.append([result, errno.errorcode.get(ctypes.get_errno())])
        answer(results)
        """,
        *map(str, keepers),
    )
    assert found == [[-1, "EPERM"]] * 4


def test_who_kills_the_agent_ends_its_own_sandbox(attached: Jail) -> None:
    """The agent has the same uid, so it can be killed; all that this does is to end the jail."""
    pid = attached.call("agent_pid")
    with pytest.raises(Failed, match="SandboxGone"):
        attached.run("/bin/sh", "-c", f"kill -9 {pid}; sleep 1000")
    assert "SIGKILL" in attached.call("death")
    assert attached.call("info")["status"] == "stopped"


def test_a_stopped_agent_does_not_keep_its_sandbox_alive(attached: Jail) -> None:
    """The host removes it as any other: it needs no help from inside."""
    attached.run("kill", "-STOP", str(attached.call("agent_pid")))
    attached.call("remove")
    assert attached.name not in attached.host.call("list")


def test_a_lease_cannot_be_lengthened_from_inside(victim: Host) -> None:
    """Hostile code that keeps itself busy is not an attached host."""
    with victim.jail(lease_seconds=2) as jail:
        jail.call("spawn", argv=["/bin/sh", "-c", "while true; do sleep 0.01; done"])
        found = jail.answer(
            """
            sockets = [os.path.join(at, name) for top in ("/run", "/tmp", "/dev", "/home", "/opt")
                       for at, _, names in os.walk(top) for name in names
                       if stat.S_ISSOCK(os.lstat(os.path.join(at, name)).st_mode)]
            answer(sockets)
            """
        )
        assert found == [], "the keeper's socket must not be reachable from inside"
        for _ in range(600):
            if jail.call("info")["status"] != "running":
                break
            victim.call("sleep", seconds=0.1)
        assert "lease" in jail.call("info")["detail"]["reason"]


def test_a_false_agent_gets_nothing_but_its_own_session(attached: Jail) -> None:
    """Code that takes the agent's place can send what it likes: the host refuses it, tries again
    now and then, and is otherwise well."""
    attached.answer(
        """
        folder, agent = sys.argv[1], int(sys.argv[2])
        os.rename(folder + "/agent.sock", folder + "/old.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(folder + "/agent.sock")
        listener.listen()
        child = os.fork()
        if child == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            while True:
                connection, _ = listener.accept()
                _, fds, _, _ = socket.recv_fds(connection, 4096, 2)
                for fd in fds:
                    try:
                        while True:
                            os.write(fd, os.urandom(65536))
                    except OSError:
                        pass
        # Every connector that is there is cut off, so the host makes a new one.
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if pid not in (1, agent, os.getpid(), child):
                attempt(os.kill, pid, 9)
        answer(None)
        """,
        attached.call("agent_folder"),
        str(attached.call("agent_pid")),
    )
    reconnecting = attached.call("reconnecting")
    assert reconnecting, "the host must have noticed that it lost its agent"
    assert attached.run("echo", "fine")["stdout"] == "fine\n"
    with attached.host.jail() as other:
        assert other.run("echo", "fine")["stdout"] == "fine\n"
    status = Path(f"/proc/{attached.host.call('pid')}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 300 * 1024
    attached.call("remove")
    assert attached.name not in attached.host.call("list")
