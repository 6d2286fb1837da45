"""A host process that persists or hydrates, and dies at a given point of its own code.

    python killed.py persist|hydrate STORE FOLDER SOCKET POINT

A point is a line of the workspace code that is run, in any thread. With POINT 0 nothing dies, and
the number of points is printed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

from sandbox_kernel.workspace.conversation import Talk
from sandbox_kernel.workspace.receive import persist_over
from sandbox_kernel.workspace.reports import Quota
from sandbox_kernel.workspace.send import hydrate_over
from sandbox_kernel.workspace.store import Store
from tests.workspace.guests import facts_of

OURS = os.path.join("sandbox_kernel", "workspace", "")
seen = 0


def watch(point: int) -> None:
    def line(frame: FrameType, event: str, argument: Any) -> Any:
        global seen
        if event == "line":
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        return line if OURS in path or path.endswith("messages.py") else None

    threading.settrace(call)
    sys.settrace(call)


def main() -> None:
    what, url, folder, fd, point = sys.argv[1:]
    with socket.socket(fileno=int(fd)) as sock:
        watch(int(point))
        store = Store.open(url)
        if what == "persist":
            persist_over(Talk(sock), store, facts_of("work"), folder, Quota())
        else:
            hydrate_over(Talk(sock), store, store.find("work"), "guest", folder)
    sys.settrace(None)
    print(seen)


if __name__ == "__main__":
    main()
