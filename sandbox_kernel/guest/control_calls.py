"""Control calls: what the host can ask of the agent. docs/wire.md lists them."""

import os
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

from ..wire import VERSION
from .control_server import CallError, Later
from .kernel_process import LOG_LIMIT, LaunchError
from .recorder import MAX_LIMIT

if TYPE_CHECKING:
    from .agent import Agent


class ControlCalls:
    """Each public method is a call; its parameters are the call's arguments."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._kernel = agent.kernel

    def by_name(self) -> Dict[str, Callable[..., Any]]:
        return {name: getattr(self, name) for name in CALLS}

    def info(self) -> Dict[str, Any]:
        return {
            "version": VERSION,
            "name": self._agent.sessions.name,
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "lease": self._agent.lease,
            "kernel": self._kernel.status(),
        }

    def launch(
        self,
        argv: List[str],
        env: Dict[str, str],
        cwd: str,
        connection: Dict[str, Any],
        transport: str,
        warm: bool = True,
        spare: bool = True,
    ) -> Later:
        later = Later()

        def done(failure: Optional[LaunchError]) -> None:
            if failure is not None:
                return later.fail(CallError(failure.kind, str(failure)))
            later.finish(self._kernel.status())
            self._agent.targets.kernel_launched()
            plan = self._kernel.plan(argv, env, cwd)
            if warm and spare:
                self._kernel.spares.keep(plan)
            else:
                self._kernel.warm.close()

        if not warm:
            self._kernel.spares.close()
            self._kernel.warm.close()
        self._kernel.launch(argv, env, cwd, connection, transport, done)
        return later

    def signal(self, signum: int) -> Dict[str, Any]:
        return {"sent": self._kernel.signal(signum)}

    def status(self) -> Dict[str, Any]:
        return self._kernel.status()

    def usage(self) -> Dict[str, Any]:
        return self._kernel.usage()

    def logs(self, size: int = LOG_LIMIT) -> str:
        return self._kernel.log.tail(size)

    def lease(self, seconds: float) -> Dict[str, Any]:
        if not 0 < seconds < 1e9:
            raise CallError("value", "a lease of %r seconds is not possible" % seconds)
        self._agent.lease = float(seconds)
        return {"lease": self._agent.lease}

    def record(self, limit: int) -> Dict[str, Any]:
        if not isinstance(limit, int) or not 0 <= limit <= MAX_LIMIT:
            raise CallError("value", "a recording of %r bytes is not possible" % limit)
        return self._agent.recorder.start(limit)

    def ways_out(self, proxy: int) -> Dict[str, Any]:
        try:
            return self._agent.open_ways_out(proxy)
        except OSError as error:
            raise CallError("os", "port %d: %s" % (proxy, error)) from None

    def kill(self) -> Dict[str, Any]:
        self._kernel.kill()
        return self._kernel.status()

    def shutdown(self) -> Dict[str, Any]:
        self._kernel.kill()
        self._agent.loop.call_later(0.05, self._agent.loop.stop)
        return {}


CALLS = (
    *("info", "launch", "status", "signal", "usage", "logs", "lease", "record", "kill"),
    *("ways_out", "shutdown"),
)
