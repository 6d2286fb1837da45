"""``python -m tests.soak``: see the package. Exit code 0 only if nothing was found.

SOAK_MINUTES (default 30), SOAK_SEED (default: a random one, which is printed).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sandbox_kernel.jupyter.kernelspec import write_kernelspec
from sandbox_kernel.records import Records
from tests.emulators.running import started
from tests.helpers.signals import heed_signals
from tests.helpers.waiting import wait_until
from tests.server.running import JupyterServer

from .actor import Actor, Gate
from .figures import Figures, command, growth, look, resident, sandboxes

NOTEBOOKS = 5
DISK_MIB = 700
LOOK_EVERY = 30.0
FULL_SECONDS = 20.0
PAUSE_SECONDS = 10.0
GRACE = 0


def main() -> int:
    heed_signals()
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(10**6))
    print(f"soak: {minutes:g} minutes, SOAK_SEED={seed}", flush=True)
    with place() as folder, started("superserve") as service:
        environment(folder)
        os.environ.update(service.env)
        write_kernelspec(
            name="hosted", backend="superserve", display_name="hosted", prefix=str(folder)
        )
        server = JupyterServer(folder, folder / "root")
        server.start()
        try:
            return Soak(folder, server, seed, minutes * 60).run()
        finally:
            server.end(9)
            for backend in ("local", "superserve"):
                for record in Records().list(backend):
                    with contextlib.suppress(AssertionError):
                        command("rm", "--force", record.name)


class Soak:
    """The world around the users: disk, pauses, gc, and somebody who counts."""

    def __init__(self, folder: Path, server: JupyterServer, seed: int, seconds: float) -> None:
        self._folder, self._server, self._seconds = folder, server, seconds
        self._problems: list[str] = []
        self._series: list[Figures] = []
        self._gate, self._full, self._over = Gate(), threading.Event(), threading.Event()
        # The last one is in a hosted sandbox, which can be paused.
        self._actors = [
            Actor(
                server,
                number,
                seed,
                gate=self._gate,
                kernel="hosted" if number == NOTEBOOKS else "sandbox",
                full=self._full,
                over=self._over,
                problems=self._problems,
            )
            for number in range(1, NOTEBOOKS + 1)
        ]

    def run(self) -> int:
        for actor in self._actors:
            actor.open()
        for actor in self._actors:
            actor.start()
        began = time.monotonic()
        events = [
            (0.25, self.fill_the_disk),
            (0.4, self.pause),
            (0.55, self.collect),
            (0.7, self.fill_the_disk),
            (0.85, self.collect),
        ]
        while (passed := time.monotonic() - began) < self._seconds or events:
            if events and passed > events[0][0] * self._seconds:
                _, event = events.pop(0)
                self._try(event.__name__, event)
            self._try("look", self.look)
            time.sleep(max(0.0, min(LOOK_EVERY, self._seconds / 20)))
        self._over.set()
        for actor in self._actors:
            actor.join(600)
            if actor.is_alive():
                self._problems.append(f"{actor.path}: it does not come to an end")
        self._try("end", self.end)
        return self.report(time.monotonic() - began)

    def _try(self, name: str, act: object) -> None:
        assert callable(act)
        try:
            act()
        except Exception as error:  # noqa: BLE001  (all are told in the end)
            self._problems.append(f"{name}: {type(error).__name__}: {error}")
            print(f"  PROBLEM {self._problems[-1][:600]}", flush=True)
        finally:
            self._gate.release()

    def look(self) -> None:
        if not self._gate.hold():
            raise AssertionError("a user does not come to an end")
        assert self._server.process is not None
        self._series.append(look(self._server.process.pid, self._folder / "run"))
        print(f"  {time.strftime('%H:%M:%S')} {self._series[-1]}", flush=True)

    def fill_the_disk(self) -> None:
        """Somebody else takes all of the disk on which the sandboxes' files lie, for a while."""
        disk = self._folder / "disk"
        if not os.path.ismount(disk):
            print("  the disk is not filled: only root can mount one for that", flush=True)
            return
        if not self._gate.hold():
            raise AssertionError("a user does not come to an end")
        self._full.set()
        self._gate.release()
        beside = disk / "beside"
        free = shutil.disk_usage(disk).free
        print(f"  the disk is filled with {free // 2**20} MiB", flush=True)
        with beside.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        time.sleep(FULL_SECONDS)
        beside.unlink()
        self._full.clear()
        print("  the disk is freed", flush=True)

    def pause(self) -> None:
        """The hosted sandbox is paused from outside; the next cell resumes it."""
        if not self._gate.hold():
            raise AssertionError("a user does not come to an end")
        (name,) = (s["name"] for s in sandboxes() if s["backend"] == "superserve")
        command("pause", name)
        print(f"  {name} is paused", flush=True)
        time.sleep(PAUSE_SECONDS)

    def collect(self) -> None:
        """gc, while notebooks are being saved."""
        out = command("workspace", "gc", "--keep", "3", "--grace", str(GRACE)).stdout
        print(f"  gc: {' '.join(out.split())}", flush=True)

    def end(self) -> None:
        """The store is whole, and the quit button leaves nothing behind."""
        print(f"  {command('workspace', 'verify').stdout.strip()}", flush=True)
        assert self._server.process is not None
        print(f"  server and sandboxes: {resident(self._server.process.pid):.0f} MiB", flush=True)
        self._server.request("POST", "/api/shutdown")
        self._server.process.wait(120)
        wait_until(lambda: not sandboxes() or None, "the end of all sandboxes")

    def report(self, seconds: float) -> int:
        done: Counter[str] = sum((actor.done for actor in self._actors), Counter())
        print(f"soak: {seconds / 60:.1f} minutes, {sum(done.values())} actions: {dict(done)}")
        if self._series:
            print(f"  first: {self._series[0]}\n  last:  {self._series[-1]}")
        found = self._problems + growth(self._series)
        for problem in found:
            print(f"PROBLEM: {problem}")
        lost = [line for line in self._server.log.splitlines() if "Traceback" in line]
        print(f"{len(found)} problems, {len(lost)} tracebacks in the server's log")
        if found or lost:
            kept = Path(tempfile.gettempdir()) / f"soak-{os.getpid()}.log"
            kept.write_text(self._server.log)
            print(f"The server's log: {kept}")
        return 1 if found or lost else 0


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A folder with a short path and, if this is root, a small disk in it for our data."""
    folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="soak-")))
    disk = folder / "disk"
    for path in (disk, folder / "root", folder / "jupyter"):
        path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "soak", str(disk)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    if not mounted:
        print("soak: no disk of its own can be mounted here, so none will be filled")
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path) -> None:
    for name in [name for name in os.environ if name.startswith("SANDBOX_KERNEL_")]:
        del os.environ[name]
    os.environ.update(
        SANDBOX_KERNEL_DATA_DIR=str(folder / "disk" / "data"),
        SANDBOX_KERNEL_RUNTIME_DIR=str(folder / "run"),
        SANDBOX_KERNEL_LABEL=folder.name,
        SANDBOX_KERNEL_WARM_SPARES="0",  # they would count as left behind
        JUPYTER_RUNTIME_DIR=str(folder / "jupyter"),
        JUPYTER_PATH=str(folder / "share" / "jupyter"),
        JUPYTER_CONFIG_DIR=str(folder / "config"),
        IPYTHONDIR=str(folder / "ipython"),
    )


if __name__ == "__main__":
    sys.exit(main())
