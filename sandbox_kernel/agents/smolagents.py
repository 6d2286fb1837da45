"""SandboxKernelExecutor: smolagents' code runs as cells of one notebook in a sandbox.

    with SandboxKernelExecutor(backend="local", memory_mib=1024) as executor:
        agent = CodeAgent(tools=[], model=model, executor=executor)

Variables stay in the kernel from step to step. What comes back is JSON: no pickle of the sandbox is
ever loaded on this host.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

from sandbox_kernel.agents.blocking import BlockingNotebook
from sandbox_kernel.agents.extras import missing
from sandbox_kernel.agents.files import AnyPath
from sandbox_kernel.agents.model_text import shortened
from sandbox_kernel.agents.result import Result
from sandbox_kernel.agents.terminal_text import plain
from sandbox_kernel.errors import KernelError, SandboxGone
from sandbox_kernel.spec import DEFAULT_BACKEND

try:
    from smolagents.local_python_executor import CodeOutput
    from smolagents.monitoring import AgentLogger, LogLevel
    from smolagents.remote_executors import RemotePythonExecutor
    from smolagents.utils import AgentExecutionError
except ImportError as error:
    raise missing("smolagents", error) from error

TIMEOUT = 120.0
"""Seconds that a step may take."""
INSTALL_TIMEOUT = 600.0
MAX_PRINTED = 50_000
"""Characters of what a step prints that the agent gets: as many as smolagents' own executor."""
_LOST = "A new kernel was started: all variables are gone."
_MARK = "_sandbox_kernel_tools"
"""A variable of the kernel that has the tools."""
_FIND = "import importlib.util as u; print([n for n in {names!r} if u.find_spec(n) is None])"
_MODULES = {"pillow": "PIL", "scikit_learn": "sklearn", "beautifulsoup4": "bs4", "pyyaml": "yaml"}
"""Packages whose modules have other names."""


class SandboxKernelExecutor(RemotePythonExecutor):
    """A kernel that starts now. ``cleanup`` removes it and its sandbox. ``settings`` are those of a
    kernelspec (memory_mib, egress, ...). The steps are recorded in ``notebook``, an .ipynb file, if
    one is named. Packages that tools need are installed if the sandbox has a way out to the index
    (``egress=["@pip"]``)."""

    def __init__(
        self,
        additional_imports: Sequence[str] = (),
        logger: AgentLogger | None = None,
        *,
        backend: str = DEFAULT_BACKEND,
        notebook: AnyPath | None = None,
        timeout: float = TIMEOUT,
        **settings: Any,
    ) -> None:
        super().__init__(list(additional_imports), logger or AgentLogger(level=LogLevel.ERROR))
        if notebook is None:
            settings = {"persist": False, **settings}
        self.notebook = BlockingNotebook.open(notebook, backend=backend, **settings)
        self._timeout = timeout
        self._setup = [f"{_MARK} = True"]
        """What made the tools and variables, for a kernel that has to be started again."""
        self._setting_up = self._over = False
        self._lock = threading.Lock()
        try:
            self._start_again()
            self.installed_packages = self.install_packages(list(additional_imports))
        except BaseException:
            self.cleanup()
            raise

    # --- its life

    def cleanup(self) -> None:
        """Remove the kernel and its sandbox. Idempotent; CodeAgent.cleanup calls it."""
        self._over = True
        self.notebook.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    # --- what smolagents calls

    def send_tools(self, tools: dict[str, Any]) -> None:
        self._remember(super().send_tools, tools)

    def send_variables(self, variables: dict[str, Any]) -> None:
        self._remember(super().send_variables, variables)

    def _remember(self, send: Any, values: dict[str, Any]) -> None:
        self._setting_up = True
        try:
            send(values)
        finally:
            self._setting_up = False

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        """Run code as a cell. AgentExecutionError if it fails, is too slow, or ends its kernel."""
        with self._lock:
            if self._over:
                raise SandboxGone(
                    f"Sandbox {self.notebook.sandbox!r} was closed. Make a new executor to go on."
                )
            if self._setting_up and code not in self._setup:
                self._setup.append(code)
            done = self.notebook.run(code, timeout=self._timeout, silent=self._setting_up)
            if lost := self._has_lost_it(done):
                self._start_again()
        error, logs = done.error, _printed(done)
        if error is not None and error.name == self.FINAL_ANSWER_EXCEPTION:
            answer = self._deserialize_final_answer(error.value, allow_pickle=False)
            return CodeOutput(output=answer, logs=logs, is_final_answer=True)
        if not done.ok:
            raise self._failed(f"{done.text}\n{_LOST if lost else ''}".strip())
        return CodeOutput(output=_value(done), logs=logs, is_final_answer=False)

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """Install what the kernel cannot import yet."""
        modules = {_MODULES.get(_module(name), _module(name)): name for name in additional_imports}
        if modules and (wanted := self._not_there(modules)):
            done = self.notebook.install(*wanted, timeout=INSTALL_TIMEOUT)
            if left := self._not_there(modules):
                raise self._failed(
                    f"{', '.join(left)} could not be installed in sandbox "
                    f"{self.notebook.sandbox!r}. {done.why} The sandbox needs a way out to the "
                    f'index: egress=["@pip"].'
                )
        return additional_imports

    def _not_there(self, modules: Mapping[str, str]) -> list[str]:
        code = _FIND.format(names=list(modules))
        found = _printed(self.notebook.run(code, timeout=self._timeout, silent=True))
        return [name for module, name in modules.items() if repr(module) in found]

    def _has_lost_it(self, done: Result) -> bool:
        """Whether the kernel ended with the cell. Another one may run already."""
        if done.status in ("ok", "error"):
            return False
        try:
            return not self.notebook.run(_MARK, timeout=self._timeout, silent=True).ok
        except KernelError:
            return True

    def _start_again(self) -> None:
        if self.notebook.state == "dead":
            self.notebook.restart()
        for code in self._setup:
            self.notebook.run(code, timeout=self._timeout, silent=True)

    def _failed(self, text: str) -> AgentExecutionError:
        return AgentExecutionError(text, self.logger)


def _printed(done: Result) -> str:
    """What a cell printed, on both streams."""
    printed = "".join(o["text"] for o in done.outputs if o["output_type"] == "stream")
    return shortened(plain(printed), MAX_PRINTED)


def _value(done: Result) -> str | None:
    """The value of a cell's last line."""
    values = [o["data"] for o in done.outputs if o["output_type"] == "execute_result"]
    found = str(values[-1].get("text/plain", "")) if values else ""
    return shortened(plain(found), MAX_PRINTED) if values else None


def _module(package: str) -> str:
    """``numpy>=2`` -> ``numpy``, ``a.b`` -> ``a``."""
    return re.split(r"[^\w-]", package, maxsplit=1)[0].replace("-", "_")
