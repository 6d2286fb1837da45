"""One kernel, driven and timed as a notebook front end drives it."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from benchmarks.columns import Column

LIMIT = 120.0
"""Seconds that any one answer may take."""
RESEND = 0.5
"""Seconds after which a request to a starting kernel is repeated: requests that arrive before it
listens may be lost."""


class WrongOutput(Exception):
    """The kernel's output is wrong, so the figure would be worthless."""


class LiveKernel:
    """A running kernel with a client. ``start`` creates one; ``discard`` always frees it."""

    def __init__(self, column: Column) -> None:
        self.manager = KernelManager(kernel_name=column.kernel, transport=column.transport)
        self.client: BlockingKernelClient

    @classmethod
    def start(cls, column: Column) -> tuple[LiveKernel, float]:
        """A new kernel, and the seconds until its first cell had run."""
        begin = time.perf_counter()
        kernel = cls(column)
        try:
            kernel.manager.start_kernel()
            client = kernel.manager.client()
            assert isinstance(client, BlockingKernelClient)
            kernel.client = client
            client.start_channels()
            kernel._first_result()
            seconds = time.perf_counter() - begin
            kernel._settle()
        except BaseException:
            kernel.discard()
            raise
        return kernel, seconds

    def restart(self) -> float:
        begin = time.perf_counter()
        self.manager.restart_kernel(now=True)
        self._first_result()
        seconds = time.perf_counter() - begin
        self._settle()
        return seconds

    def stop(self) -> float:
        begin = time.perf_counter()
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        return time.perf_counter() - begin

    def discard(self) -> None:
        """End the kernel, whatever its state."""
        if hasattr(self, "client"):
            self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def round_trip(self) -> float:
        """Seconds from a request to its reply and the end of its output."""
        begin = time.perf_counter()
        self._run("pass", store_history=False)
        return time.perf_counter() - begin

    def large_output(self, size: int) -> float:
        """Seconds for one output of ``size`` bytes, until it has arrived; its length is checked."""
        data = f"{{'text/plain': 'x' * {size}}}"
        code = f"from IPython.display import display; display({data}, raw=True)"
        begin = time.perf_counter()
        request = self.client.execute(code)
        got = 0
        for message in self._outputs(request):
            if message["msg_type"] == "display_data":
                got += len(message["content"]["data"]["text/plain"])
        seconds = time.perf_counter() - begin
        self._reply(request)
        if got != size:
            raise WrongOutput(f"{got} bytes of output arrived, not {size}")
        return seconds

    def prints(self, count: int) -> float:
        """Seconds for ``count`` printed lines, until all have arrived; they are checked."""
        begin = time.perf_counter()
        request = self.client.execute(f"for i in range({count}): print(i)")
        pieces = [
            message["content"]["text"]
            for message in self._outputs(request)
            if message["msg_type"] == "stream"
        ]
        seconds = time.perf_counter() - begin
        self._reply(request)
        if "".join(pieces) != "".join(f"{i}\n" for i in range(count)):
            raise WrongOutput("printed lines were lost or reordered")
        return seconds

    def interrupt(self, code: str, running: float) -> float:
        """Seconds from interrupting a cell, which has run for ``running`` seconds, to its reply.

        Outputs are read all the time, as a front end does."""
        request = self.client.execute(code)
        failures: list[Exception] = []

        def read_outputs() -> None:
            try:
                for _ in self._outputs(request):
                    pass
            except Exception as error:  # noqa: BLE001  (raised again below)
                failures.append(error)

        reader = threading.Thread(target=read_outputs, daemon=True)
        reader.start()
        time.sleep(running)
        begin = time.perf_counter()
        self.manager.interrupt_kernel()
        reply = self._reply(request)
        seconds = time.perf_counter() - begin
        reader.join(LIMIT)
        if failures:
            raise failures[0]
        if reply["content"].get("ename") != "KeyboardInterrupt":
            raise WrongOutput(f"the interrupted cell ended with {reply['content']['status']!r}")
        return seconds

    # --- messages

    def _run(self, code: str, **options: Any) -> None:
        request = self.client.execute(code, **options)
        self._reply(request)
        for _ in self._outputs(request):
            pass

    def _reply(self, request: str, limit: float = LIMIT) -> dict[str, Any]:
        end = time.monotonic() + limit
        while True:
            left = end - time.monotonic()
            message: dict[str, Any] = self.client.get_shell_msg(timeout=max(left, 0))
            if message["parent_header"].get("msg_id") == request:
                return message

    def _outputs(self, request: str, limit: float = LIMIT) -> Any:
        """The outputs of a request, up to its last status message."""
        while True:
            message = self.client.get_iopub_msg(timeout=limit)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["content"].get("execution_state") == "idle":
                return
            yield message

    def _first_result(self) -> None:
        """Wait until a first cell has run. (``wait_for_ready`` would add pauses.)"""
        end = time.monotonic() + LIMIT
        while True:
            try:
                self._reply(self.client.kernel_info(), RESEND)
                break
            except queue.Empty:
                if time.monotonic() > end:
                    raise
        self._reply(self.client.execute("1 + 1"))

    def _settle(self) -> None:
        """Wait until outputs arrive: a subscription takes effect some time after the connection."""
        for _ in range(int(LIMIT / RESEND)):
            request = self.client.execute("pass", store_history=False)
            self._reply(request)
            try:
                for _ in self._outputs(request, RESEND):
                    pass
                return
            except queue.Empty:
                continue
        raise queue.Empty
