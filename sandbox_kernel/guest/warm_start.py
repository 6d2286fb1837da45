"""Warm start: keeps one interpreter that has imported ipykernel, to fork kernels from.

A forked kernel needs no imports. Only command lines ``python ... -m ipykernel_launcher ...`` are
kept warm, and only environments that do not differ in what an interpreter or its libraries read
when they start; other kernels are started plainly. ``warm/sitecustomize.py`` is the other end.
"""

import json
import os
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from ..wire.descriptors import send_with_descriptors
from ..wire.event_loop import Cancellable, LoopLike
from .warm import MAX_REQUEST
from .warm_process import WarmProcess

ANSWER_TIMEOUT = 30.0
"""Seconds for the warm kernel to import and fork; after that the kernel is started plainly."""

_EARLY_VARIABLES = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "PYDEVD", "DEBUGPY", "IPYTHON"),
    *("LANG", "LC_", "TZ", "EDITOR"),
)

Started = Callable[[Optional[int]], object]


def early_variables(environment: Dict[str, str]) -> Dict[str, str]:
    """The variables that are read before the first line of Python runs."""
    return {k: v for k, v in environment.items() if k.startswith(_EARLY_VARIABLES)}


class WarmStart:
    """At most one warm process. All methods return at once; answers come on the loop."""

    def __init__(self, loop: LoopLike) -> None:
        self._loop = loop
        self._warm: Optional[WarmProcess] = None
        self._requests: "Deque[Tuple[bytes, Tuple[int, ...], Started]]" = deque()
        """The first one has been sent."""
        self._timer: Optional[Cancellable] = None

    @property
    def pid(self) -> Optional[int]:
        return self._warm.pid if self._warm is not None else None

    def prepare(self, command: List[str]) -> bool:
        """Have a warm process for this command line, if it can have one and the sandbox's limits
        leave room for it; else the next kernel starts plainly."""
        if self._warm is not None and self._warm.command == command:
            return True
        self.close()
        return self._start(command)

    def _start(self, command: List[str]) -> bool:
        try:
            warm = WarmProcess.start(command)
        except OSError:
            return False
        if warm is not None:
            self.adopt(warm)
        return warm is not None

    def adopt(self, warm: WarmProcess) -> None:
        self._warm = warm
        self._loop.add_reader(warm.socket.fileno(), self._answered)

    def launch(
        self,
        command: List[str],
        environment: Dict[str, str],
        cwd: str,
        fds: Tuple[int, ...],
        started: Started,
        **options: Any,
    ) -> None:
        """Fork a kernel; ``started`` gets its pid, or None if there is no warm kernel for it.
        ``warm/sitecustomize.py`` says which options and descriptors there are."""
        request = json.dumps({"env": environment, "cwd": cwd, **options}).encode()
        fits = (
            self._warm is not None
            and self._warm.command == command
            and os.path.isdir(cwd)
            and len(request) < MAX_REQUEST
            and early_variables(environment) == early_variables(dict(os.environ))
        )
        if not fits:
            started(None)
            return
        self._requests.append((request, fds, started))
        if len(self._requests) == 1:
            self._send()

    def close(self) -> None:
        """End the warm kernel. Launches that wait for it are started plainly."""
        self._end()
        while self._requests:
            self._settle(None)

    def _end(self) -> None:
        if self._warm is not None:
            self._loop.remove_reader(self._warm.socket.fileno())
            self._warm.close()
            self._warm = None

    def _send(self) -> None:
        assert self._warm is not None
        request, fds, _ = self._requests[0]
        try:
            send_with_descriptors(self._warm.socket, request, fds)
        except OSError:
            self.close()
        else:
            self._timer = self._loop.call_later(ANSWER_TIMEOUT, self.close)

    def _answered(self) -> None:
        assert self._warm is not None
        try:
            data = self._warm.socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            answer = json.loads(data)
        except ValueError:  # it has ended, or sent nonsense
            return self.close()
        if isinstance(answer.get("pid"), int):
            self._settle(answer["pid"])
        elif answer.get("stale"):
            self._start_over()
        else:
            self.close()

    def _start_over(self) -> None:
        """The packages have changed: start another warm process for the requests."""
        assert self._warm is not None
        command = self._warm.command
        self._stop_timer()
        self._end()
        if not self._start(command):
            self.close()
        elif self._requests:
            self._send()

    def _settle(self, pid: Optional[int]) -> None:
        self._stop_timer()
        if not self._requests:
            return
        _, _, started = self._requests.popleft()
        if self._requests and self._warm is not None:
            self._send()
        started(pid)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
