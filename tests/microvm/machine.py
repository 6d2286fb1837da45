"""Boots the rig under QEMU and runs commands in it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from tests.helpers.ports import free_port

BOOT_TIMEOUT = 180.0
MEMORY_MIB = 4096
END = b"\0exit "
# More than one processor makes about one microVM in twelve fail to start, under emulation.
PROCESSORS = 1
QEMU = (
    *("qemu-system-x86_64", "-nographic", "-nodefaults", "-no-user-config", "-no-reboot"),
    *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "EPYC-v3,+svm,+npt"),
    *("-smp", str(PROCESSORS), "-m", str(MEMORY_MIB), "-monitor", "none"),
)
KERNEL = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr net.ifnames=0 random.trust_cpu=on "
    "tsc=reliable no_timer_check"
)


class Machine:
    """One running rig. ``share`` on this side is /share inside. Its disk is new at each boot."""

    def __init__(self, rig: Path, name: str) -> None:
        self._rig = rig
        self.folder = rig / "machines" / name
        self.share = self.folder / "share"
        self._console = self.folder / "console.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def __enter__(self) -> Machine:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.share.mkdir(parents=True)
        self._port = free_port()
        disk = self.folder / "disk.qcow2"
        create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]
        subprocess.run([*create, self._rig / "disk.img", disk], check=True)
        self._console.touch()
        forward = f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{self._port}-:2323"
        with open(self.folder / "qemu.log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    *QEMU,
                    *("-kernel", str(self._rig / "vmlinuz"), "-append", KERNEL),
                    *("-initrd", str(self._rig / "initial.img")),
                    *("-drive", f"file={disk},if=virtio,cache=unsafe"),
                    *("-fsdev", f"local,id=share,path={self.share},security_model=none"),
                    *("-device", "virtio-9p-pci,fsdev=share,mount_tag=share"),
                    *("-netdev", forward, "-device", "virtio-net-pci,netdev=net,romfile="),
                    *("-device", "virtio-rng-pci", "-serial", f"file:{self._console}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def down(self) -> None:
        """Switch it off."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        (self.folder / "disk.qcow2").unlink(missing_ok=True)

    def run(
        self, command: str, environment: Mapping[str, str], output: Callable[[bytes], object]
    ) -> int:
        """Run a shell command in the rig; ``output`` gets what it prints. Its exit code."""
        request = json.dumps({"command": command, "env": dict(environment)}).encode() + b"\n"
        tail = b""
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(request)
            while data := connection.recv(65536):
                output(data.split(END)[0])
                tail = (tail + data)[-64:]
        if END not in tail:
            raise RuntimeError(f"the rig ended during {command!r}: {self._last_words()}")
        return int(tail.rsplit(END, 1)[1])

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + BOOT_TIMEOUT
        while b"RIG READY" not in self._console.read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the rig did not boot: {self._last_words()}")
            time.sleep(0.1)

    def _last_words(self) -> str:
        texts = [self._console.read_bytes(), (self.folder / "qemu.log").read_bytes()]
        return " ".join(text.decode(errors="replace")[-500:] for text in texts)
