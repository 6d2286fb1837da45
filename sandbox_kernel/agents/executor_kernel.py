"""ExecutorKernel: runs cells one after another, for callers that block (``agents/smolagents.py``).

It is jupyter_client's KernelManager with our provisioner. What the kernel sends is bounded.
"""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager

from sandbox_kernel.errors import KernelError, SandboxGone
from sandbox_kernel.jupyter.kernelspec import template
from sandbox_kernel.untrusted_text import printable

START = 60.0
"""Seconds for a kernel to answer."""
MAX_OUTPUT = 2**20
"""Characters of printed text, of a result, and of a traceback, that are kept."""
MAX_ERROR = 32 * 2**20
"""Characters of an error's value: a final answer comes as one."""
_INTERRUPT_GRACE = 5.0
_POLL = 0.5
"""Seconds after which a silent kernel is checked for being alive."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CUT = "\n[... the rest of the output was left out]"


@dataclass
class Cell:
    """What came of one cell."""

    printed: str = ""
    result: str | None = None
    error_name: str = ""
    error_value: str = ""
    traceback: str = ""
    problem: str = ""
    """In words, if it did not end by itself: it took too long, or the kernel died."""
    lost: bool = False
    """A new kernel runs, without any variables."""

    def print(self, text: str) -> None:
        if len(self.printed) <= MAX_OUTPUT:
            self.printed += text
            if len(self.printed) > MAX_OUTPUT:
                self.printed = self.printed[:MAX_OUTPUT] + _CUT


class ExecutorKernel:
    """A kernel in a sandbox of its own. Not for several threads at once."""

    def __init__(self, backend: str, settings: Mapping[str, Any]) -> None:
        config = {"persist": False, "warm_spares": False, **settings, "backend": backend}
        self._manager: Any = KernelManager(
            kernel_name=_OneKernelspec.name, kernel_spec_manager=_OneKernelspec(config)
        )
        self._client: Any = None
        self.name = ""
        """Of the sandbox."""
        try:
            self._manager.start_kernel()
            self._connect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the kernel and its sandbox. Idempotent."""
        manager, self._manager = self._manager, None
        self._disconnect()
        if manager is not None:
            if manager.has_kernel:
                manager.shutdown_kernel(now=True)
            else:
                manager.cleanup_resources()

    def run(self, code: str, timeout: float) -> Cell:
        """Run a cell to its end. It is interrupted when its time is over; if that does not end it,
        or if the kernel dies, a new kernel is started in its place."""
        if self._manager is None:
            raise SandboxGone(f"Sandbox {self.name!r} was closed. Make a new executor to go on.")
        cell = Cell()
        request = self._client.execute(code, allow_stdin=False)
        if self._follow(request, cell, timeout):
            return cell
        if self._manager.is_alive():
            cell.problem = f"The code did not end within {timeout:g} s and was interrupted."
            self._manager.interrupt_kernel()
            if self._follow(request, cell, _INTERRUPT_GRACE):
                cell.error_name = ""  # KeyboardInterrupt
                return cell
            cell.problem = f"The code did not end within {timeout:g} s, not even interrupted."
        else:
            death = printable(getattr(self._manager.provisioner, "death", "")).rstrip(". ")
            cell.problem = f"The kernel died{': ' + death if death else ''}."
        before = self.name
        self._restart()
        gone = "all variables are" if self.name == before else "all variables and files are"
        cell.problem += f" A new one was started: {gone} gone."
        cell.lost = True
        return cell

    def _follow(self, request: str, cell: Cell, timeout: float) -> bool:
        """Take the kernel's messages about a request, until it has ended. False if it has not in
        this time, or the kernel died."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                message = self._client.get_iopub_msg(timeout=min(left, _POLL))
            except queue.Empty:
                if not self._manager.is_alive():
                    return False
                continue
            parent, content = message.get("parent_header"), message.get("content")
            if not isinstance(parent, dict) or not isinstance(content, dict):
                continue
            if parent.get("msg_id") == request and _take(message.get("msg_type"), content, cell):
                return True
        return False

    def _restart(self) -> None:
        self._disconnect()
        self._manager.restart_kernel(now=True)
        self._connect()

    def _connect(self) -> None:
        self.name = self._manager.provisioner.kernel.handle.name
        self._client = self._manager.client()
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=START)
        except RuntimeError as error:
            raise KernelError(
                f"The kernel in sandbox {self.name!r} did not answer within {START:g} s: {error}. "
                f"`sandbox-kernel doctor` may say why."
            ) from error

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.stop_channels()


def _take(kind: object, content: Mapping[str, Any], cell: Cell) -> bool:
    """True for the end of the cell. The kernel is hostile: nothing need be of its type."""
    if kind == "stream":
        cell.print(_COLOURS.sub("", str(content.get("text", ""))))
    elif kind == "execute_result":
        data = content.get("data")
        if isinstance(data, dict):
            cell.result = str(data.get("text/plain", ""))[:MAX_OUTPUT]
    elif kind == "error":
        lines = content.get("traceback")
        text = "\n".join(map(str, lines)) if isinstance(lines, list) else ""
        cell.error_name = str(content.get("ename", "")) or "Error"
        cell.error_value = str(content.get("evalue", ""))[:MAX_ERROR]
        cell.traceback = _COLOURS.sub("", text)[-MAX_OUTPUT:]
    return kind == "status" and content.get("execution_state") == "idle"


class _OneKernelspec(KernelSpecManager):
    """Our kernelspec with these settings, which is nowhere on disk."""

    name = "sandbox"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._found = template()
        self._found["metadata"]["kernel_provisioner"]["config"] = dict(config)

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(resource_dir="", **self._found)
