"""The process of a column, which runs the tasks that measure it.

Each column has its own, because a link's shape, the tunnel's thread and the host's memory belong to
a whole process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from benchmarks import scale
from benchmarks.columns import Column
from benchmarks.livekernel import LiveKernel
from benchmarks.resources import Cpu, memory_by_part, pss
from benchmarks.shaping import echo_times, hosted, shaped

Samples = dict[str, list[float]]
"""Sample name -> values, in seconds and bytes."""

CALL_LIMIT = 900.0
"""Seconds that one task may take before its process is killed."""
STOP_LIMIT = 60.0
LOG_TAIL = 2000
REST_LIMIT = 90.0
"""Seconds after which the memory of idle kernels is measured in any case."""
IDLE = 3.0
"""Seconds without work before a start and a restart, in which pools and spares get ready."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured in one round."""

    round_trips: int = 200
    batches: int = 4
    """Number of turns for the round trips; the other columns have theirs in between."""
    output: int = 50_000_000
    prints: int = 20_000
    kernels: int = 10


QUICK = Sizes(round_trips=60, batches=2, output=10_000_000, prints=5_000, kernels=3)


class WorkerFailed(Exception):
    """A task failed in the column's process, or the process itself failed."""


# --- in the column's process


class Tasks:
    """The tasks that measure. Every public method is one; it gets a kernel that is ready."""

    def __init__(self, column: Column, sizes: Sizes) -> None:
        self._column = column
        self._sizes = sizes
        self._kernel: LiveKernel | None = None

    def start(self) -> Samples:
        """Start a new kernel, which stays for the next tasks."""
        self.discard()
        time.sleep(IDLE)
        self._kernel, seconds = LiveKernel.start(self._column)
        return {"start": [seconds]}

    def restart(self) -> Samples:
        kernel = self._ready()
        time.sleep(IDLE)
        return {"restart": [kernel.restart()], "restart_again": [kernel.restart()]}

    def stop(self) -> Samples:
        kernel = self._ready()
        self._kernel = None
        try:
            return {"stop": [kernel.stop()]}
        finally:
            kernel.discard()

    def round_trips(self) -> Samples:
        kernel = self._ready()
        count = self._sizes.round_trips // self._sizes.batches
        for _ in range(count // 5):
            kernel.round_trip()
        before = Cpu.now()
        times = [kernel.round_trip() for _ in range(count)]
        return {"rtt": times, **_cpu_since(before, "rtt", count)}

    def busy_round_trips(self) -> Samples:
        """With another thread that holds the interpreter's lock whenever it can."""
        kernel, done = self._ready(), threading.Event()

        def compute() -> None:
            while not done.is_set():
                sum(range(1000))

        thread = threading.Thread(target=compute)
        thread.start()
        try:
            return {"rtt_busy": [kernel.round_trip() for _ in range(self._sizes.round_trips // 4)]}
        finally:
            done.set()
            thread.join()

    def notebook(self) -> Samples:
        """Cells that do nothing, each from its request until nbclient goes on to the next one; and
        all of them together, from before the kernel's start until after its end."""
        self.discard()
        cells = [nbformat.v4.new_code_cell("pass") for _ in range(self._sizes.round_trips // 2)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        client = NotebookClient(notebook, kernel_name=self._column.kernel)
        times = []
        start = time.perf_counter()
        with client.setup_kernel():
            for index, cell in enumerate(cells):
                begin = time.perf_counter()
                client.execute_cell(cell, index)
                times.append(time.perf_counter() - begin)
        return {"nbclient": times, "nbclient_all": [time.perf_counter() - start]}

    def bare_link(self) -> Samples:
        """Only for columns with a shaped link."""
        return {"link": echo_times(self._sizes.round_trips // 4)} if self._column.link else {}

    def large_output(self) -> Samples:
        kernel = self._ready()
        before = Cpu.now()
        seconds = kernel.large_output(self._sizes.output)
        cpu = _cpu_since(before, "mb", self._sizes.output)
        return {"throughput": [self._sizes.output / seconds], **cpu}

    def prints(self) -> Samples:
        return {"prints": [self._ready().prints(self._sizes.prints)]}

    def interrupt(self) -> Samples:
        return {"interrupt": [self._ready().interrupt("import time; time.sleep(60)", 0.5)]}

    def interrupt_flood(self) -> Samples:
        code = "while True: print('y' * 1000)"
        return {"interrupt_flood": [self._ready().interrupt(code, 1.0)]}

    def memory(self) -> Samples:
        """Memory of idle kernels without clients, beyond that of the first kernel."""
        self.discard()
        kernels: list[LiveKernel] = []
        with contextlib.ExitStack() as stack:
            before = 0
            for number in range(self._sizes.kernels + 1):
                kernel, _ = LiveKernel.start(self._column)
                stack.callback(kernel.discard)
                kernel.client.stop_channels()
                kernels.append(kernel)
                if number == 0:
                    before = _own_memory()
            grown = (_own_memory() - before) / self._sizes.kernels
            parts = {f"memory_{part}": size for part, size in _memory_by_part().items()}
            parts |= {f"rested_{part}": size for part, size in _rested_memory().items()}
        each = {part: [size / len(kernels)] for part, size in parts.items()}
        return {"memory_host": [grown], **each}

    def many_kernels(self, kernels: int, round_trips: int) -> scale.Point:
        """For ``python -m benchmarks scale``."""
        return asyncio.run(scale.measure(self._column, kernels, round_trips))

    def discard(self) -> None:
        """End the kernel, if there is one. The next task starts another."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.discard()

    def _ready(self) -> LiveKernel:
        if self._kernel is None:
            self.start()
        assert self._kernel is not None
        return self._kernel


def _cpu_since(before: Cpu, name: str, count: int) -> Samples:
    now = Cpu.now()
    used = {f"host_cpu_{name}": [(now.process - before.process) / count]}
    if now.tunnel is not None and before.tunnel is not None:
        used[f"tunnel_cpu_{name}"] = [(now.tunnel - before.tunnel) / count]
    return used


def _own_memory() -> int:
    gc.collect()
    return pss()


def _memory_by_part() -> dict[str, int]:
    parts = memory_by_part(os.getpid())
    return {**parts, "all": sum(parts.values())}


def _rested_memory() -> dict[str, int]:
    """When no warm interpreter is left: they end when kernels have been idle for a while."""
    end = time.monotonic() + REST_LIMIT
    while "warm" in (parts := _memory_by_part()) and time.monotonic() < end:
        time.sleep(1.0)
    return parts


def serve(pipe: Connection, column: Column, sizes: Sizes, folder: Path) -> None:
    """The main function of a column's process: answer calls until None arrives."""
    # The main process handles Ctrl-C and tells this one to end. This is a handler, because kernels
    # would inherit an ignored signal.
    signal.signal(signal.SIGINT, lambda *_: None)
    log = os.open(log_file(folder, column), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stderr.fileno())
    os.dup2(log, sys.stdout.fileno())
    _own_folders(folder)
    os.environ.update(column.environment)
    tasks = Tasks(column, sizes)
    try:
        with hosted(column.service), shaped(column.link):
            pipe.send((True, None))
            while (call := pipe.recv()) is not None:
                pipe.send(_answer(tasks, *call))
    except EOFError:
        pass  # whoever was to be told is gone
    finally:
        tasks.discard()


def _answer(tasks: Tasks, name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
    try:
        return True, getattr(tasks, name)(**arguments)
    except Exception as error:  # noqa: BLE001  (told to the caller)
        traceback.print_exc()
        tasks.discard()
        return False, f"{type(error).__name__}: {error}"


def _own_folders(folder: Path) -> None:
    """Use private folders instead of the user's sandboxes, connection files and history."""
    names = {
        "SANDBOX_KERNEL_DATA_DIR": "data",
        "SANDBOX_KERNEL_RUNTIME_DIR": "run",
        "JUPYTER_RUNTIME_DIR": "jupyter",
        "IPYTHONDIR": "ipython",
    }
    for variable, name in names.items():
        (folder / name).mkdir(mode=0o700, exist_ok=True)
        os.environ[variable] = str(folder / name)
    # If this process is killed, its sandboxes end soon after.
    os.environ["SANDBOX_KERNEL_LEASE_SECONDS"] = "120"
    # A start is a cold one, unless the column says otherwise.
    os.environ["SANDBOX_KERNEL_WARM_SPARES"] = "0"


def log_file(folder: Path, column: Column) -> Path:
    return folder / f"{column.name}.log"


# --- in the main process


@contextlib.contextmanager
def _imports_from(checkout: Path | None) -> Iterator[None]:
    """Processes that start inside this block import the package, and the benchmarks and tests that
    know its modules, from another checkout."""
    path = [] if checkout is None else [str(checkout.resolve(strict=True))]
    sys.path[:0] = path
    try:
        yield
    finally:
        del sys.path[: len(path)]


class Worker:
    """A column's process, as seen from outside."""

    def __init__(self, column: Column, sizes: Sizes, folder: Path) -> None:
        """Raises WorkerFailed if the column does not work on this machine."""
        self.column = column
        self._log = log_file(folder, column)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, column, sizes, folder), name=f"bench-{column.name}"
        )
        with _imports_from(column.checkout):
            self._process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, task: str, **arguments: Any) -> Any:
        """Run a task. Raises WorkerFailed if it fails; others still work, unless ``dead``."""
        try:
            self._pipe.send((task, arguments))
        except OSError as error:
            raise WorkerFailed(f"the process of column {self.column.name!r} is gone") from error
        return self._answer()

    @property
    def dead(self) -> bool:
        return not self._process.is_alive()

    def close(self) -> None:
        """Let the process end its kernels; kill it if that takes too long. Idempotent."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        # A running task still writes its answer, so the pipe must stay open until then.
        self._process.join(STOP_LIMIT)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _answer(self) -> Any:
        if not self._pipe.poll(CALL_LIMIT):
            self._process.kill()
            raise WorkerFailed(f"no answer for {CALL_LIMIT:.0f} s")
        try:
            ok, result = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerFailed(f"its process ended; its last output was:\n{self._tail()}") from None
        if not ok:
            raise WorkerFailed(str(result))
        return result

    def _tail(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._log.read_text(errors="replace")[-LOG_TAIL:]
        return "(nothing)"
