"""Landlock behind the jail's mounts: what it refuses that they would not, and what still works."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from sandbox_kernel.guest import landlock
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.sandboxes.local.jail_request import open_request

from .sandboxes import client_that_leaves_nothing, sandbox

needs_landlock = pytest.mark.skipif(
    landlock.abi() < landlock.LEAST_ABI, reason="this kernel has no Landlock that will do"
)


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    with client_that_leaves_nothing(own_dirs) as client:
        yield client


def runtime(handle: LocalHandle) -> Path:
    return Path(handle._folders.runtime)


async def run_with(handle: LocalHandle, code: str, leaked: int) -> str:
    """Run code in the jail with a descriptor of the host's as its third; what it printed."""
    read, write = os.pipe()
    try:
        script = 'exec python3 -c "$0" 3<&0 </dev/null'
        request = {"kind": "exec", "argv": ["sh", "-c", script, code], "cwd": "/"}
        fds = [leaked, write, write]
        control, answer = await open_request(runtime(handle), request, fds, timeout=30)
        assert "pid" in answer, answer
        while "exit" not in await asyncio.wait_for(control.receive(), 30):
            pass
        control.close()
        return os.read(read, 65536).decode()
    finally:
        os.close(read)
        os.close(write)


@needs_landlock
async def test_a_leaked_folder_of_the_host_leads_nowhere(
    client: LocalClient, tmp_path: Path
) -> None:
    """Suppose that a mistake, or a bug of the kernel's, puts a descriptor of a host's folder into
    the jail. The mounts do not help against that: every file of the host is a few ".." away."""
    (tmp_path / "secret").write_text("hunter2")
    code = """
import os
import struct
def attempt(*arguments, **options):
    try:
        return os.open(*arguments, **options) and 0
    except OSError as error:
        return error.errno
print([attempt("secret", os.O_RDONLY, dir_fd=3), attempt("../" * 30 + "etc/shadow", 0, dir_fd=3),
       attempt("new", os.O_WRONLY | os.O_CREAT, dir_fd=3), attempt(".", os.O_RDONLY, dir_fd=3),
       attempt("/proc/self/fd/3", os.O_RDONLY), attempt("/etc/passwd", os.O_RDONLY)])
"""
    async with sandbox(client) as handle:
        fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            said = await run_with(handle, code, fd)
        finally:
            os.close(fd)
    assert json.loads(said) == [*[errno.EACCES] * 5, 0]
    assert not (tmp_path / "new").exists()


@needs_landlock
async def test_ordinary_work_is_not_disturbed(client: LocalClient) -> None:
    """Files are renamed and linked across folders, sockets, pipes, queues and devices made and
    opened, terminals used, programs written and run, in every place that is writable."""
    code = r"""
import ctypes, fcntl, json, mmap, os, pty, shutil, socket, struct, subprocess, tempfile, termios
done = []
for place in ("/workspace", "/home/sandbox", "/tmp", "/dev/shm", "/run"):
    at = tempfile.mkdtemp(dir=place)
    for name in ("a", "b"):
        os.mkdir(f"{at}/{name}")
    with open(f"{at}/a/file", "w") as file:
        file.write("text")
    os.truncate(f"{at}/a/file", 2)
    os.link(f"{at}/a/file", f"{at}/b/link")
    os.rename(f"{at}/a/file", f"{at}/b/file")
    os.symlink("file", f"{at}/b/symlink")
    os.mkfifo(f"{at}/b/fifo")
    os.rename(f"{at}/b", f"{at}/a/b")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as near:
        listener.bind(f"{at}/socket")
        listener.listen()
        near.connect(f"{at}/socket")
    shutil.copy("/bin/true", f"{at}/program")
    if place in ("/workspace", "/home/sandbox", "/tmp"):
        done.append(subprocess.run([f"{at}/program"]).returncode)
    done.append(open(f"{at}/a/b/symlink").read())
    shutil.rmtree(at)
shutil.move("/bin/true" and shutil.copy("/bin/true", "/tmp/moved"), "/workspace/moved")
master, slave = pty.openpty()
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 20, 0, 0))
os.close(os.open(os.ttyname(slave), os.O_RDWR | os.O_NOCTTY))
open("/dev/null", "w").write("x")
open("/dev/urandom", "rb").read(1)
open("/proc/self/comm", "w").write("renamed")
memory = os.memfd_create("m")
os.write(memory, b"memory")
done.append(open(f"/proc/self/fd/{memory}").read())
read, write = os.pipe()
os.close(os.open(f"/proc/self/fd/{write}", os.O_WRONLY))
librt = ctypes.CDLL("librt.so.1", use_errno=True)
queue = librt.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None)
done.append(queue >= 0 and librt.mq_unlink(b"/queue"))
print(json.dumps(done))
"""
    async with sandbox(client) as handle:
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            said = await run_with(handle, code, null)
        finally:
            os.close(null)
        assert json.loads(said) == [0, "te", 0, "te", 0, "te", "te", "te", "memory", 0]
        # The wall is up, and the host knows.
        control, answer = await open_request(runtime(handle), {"kind": "info"}, timeout=30)
        control.close()
        assert answer["landlock"] == landlock.abi()


@needs_landlock
async def test_commands_cannot_look_into_each_other(client: LocalClient) -> None:
    """Each has a layer of its own: memory, descriptors and variables of another command's
    processes are closed to it, but signals reach them, and those of its own children are open."""
    code = """
import json, os, subprocess, sys
def looks(pid):
    for name in ("mem", "environ", "fd/0"):
        try:
            os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        except PermissionError as error:
            return error.errno
    return 0
with subprocess.Popen(["sleep", "60"], stdin=0) as own:
    found = [looks(sys.argv[1]), looks(own.pid), looks(1), open(f"/proc/{sys.argv[1]}/comm").read()]
    own.kill()
os.kill(int(sys.argv[1]), 15)
print(json.dumps(found))
"""
    async with sandbox(client) as handle:
        other = await handle.open_stream(["sh", "-c", "echo $$; exec sleep 60"])
        pid = (await other.read()).decode().strip()
        ran = await handle.exec("python3", ["-c", code, pid], timeout=30)
        assert json.loads(ran.stdout) == [errno.EACCES, 0, errno.EACCES, "sleep\n"], ran.stderr
        assert await other.wait() == -15
        await other.close()


def test_mounts_are_read_as_the_kernel_writes_them() -> None:
    """Odd names, read-only ones, and those that lie below another at the same place."""
    lines = [
        "1 0 0:1 / / ro,nosuid - tmpfs tmpfs rw",
        "2 1 0:2 / /workspace rw,nosuid,nodev - ext4 /dev/x rw",
        r"3 1 0:2 / /odd\040name\134 rw - ext4 /dev/x rw",
        "4 1 0:3 / /covered rw - tmpfs tmpfs rw",
        "5 4 0:4 / /covered ro - tmpfs tmpfs rw",
        "5 1 0:2 / /x\r1\x0b1\x0b1:1\x0b/\x0b/usr\x0brw\xa0\u2028 ro - tmpfs tmpfs rw",
        "6 1 0:5 / /usr ro,relatime shared:3 master:2 - ext4 /dev/y rw",
    ]
    assert landlock.writable_mounts(lines) == ["/workspace", "/odd name\\"]


@pytest.mark.parametrize(
    ("version", "asked", "flags"),
    [
        (0, None, None),
        (1, None, None),
        (2, 0x3FFF, 0),
        (3, 0x7FFF, 0),
        (5, 0xFFFF, 0),
        (9, 0xFFFF, 5),
    ],
)
def test_older_kernels_get_what_they_know(
    monkeypatch: pytest.MonkeyPatch, version: int, asked: int | None, flags: int | None
) -> None:
    """Without Landlock, or with its first version, in which nothing could be renamed from one
    folder to another, the wall is left out; later ones are asked for no right that they do not
    know. (Played through with a kernel that only listens.)"""
    calls = []

    def called(number: int, *arguments: object) -> int:
        if number == 444 and arguments[2] == 1:
            if not version:
                raise OSError(errno.EOPNOTSUPP, "turned off")
            return version
        calls.append((number, arguments))
        return os.open(os.devnull, os.O_RDONLY) if number == 444 else 0

    monkeypatch.setattr(landlock, "_call", called)
    assert landlock.restrict() == (version if asked else 0)
    if asked is None:
        assert calls == []
        return
    ruleset = struct.unpack("=QQQ", cast("bytes", calls[0][1][0]))
    assert ruleset == (asked, 0, 3 if version >= 6 else 0)
    rules = [struct.unpack("=Qi", cast("bytes", call[1][2])) for call in calls[1:-1]]
    assert {allowed & ~asked for allowed, _ in rules} == {0}
    assert calls[-1][1][1] == flags
