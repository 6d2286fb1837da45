"""A command that a program runs to its end, for programs that run one command only."""

from __future__ import annotations

import functools
import os
import selectors
import signal

from ..loop import Loop
from .start import signal_group
from .stdio import CommandOutput


class RunningCommand:
    """A command and its outputs, on a loop that stops when all have ended.

    ``output`` gets each piece and its kind, ``o`` or ``e``; ``output_ended`` and ``exited`` are
    called once for each.
    """

    def __init__(self, pid: int, outputs: list[int]) -> None:
        self.pid = pid
        self.code: int | None = None
        self.loop = Loop(selectors.PollSelector())
        self.outputs = {
            kind: CommandOutput(
                self.loop,
                fd,
                functools.partial(self.output, kind),
                functools.partial(self._output_ended, kind),
            )
            for kind, fd in zip("oe", outputs)
        }
        self.loop.watch_children(self.reap)

    def output(self, kind: str, data: bytes) -> None:
        raise NotImplementedError

    def output_ended(self, kind: str) -> None: ...

    def exited(self, code: int) -> None: ...

    def kill(self) -> None:
        """Kill the command with its group, also if it has ended and left others there."""
        signal_group(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.exited(self.code)
        self.stop_if_over()

    def _output_ended(self, kind: str) -> None:
        del self.outputs[kind]
        self.output_ended(kind)
        self.stop_if_over()

    def stop_if_over(self) -> None:
        if self.code is not None and not self.outputs:
            self.loop.stop()
