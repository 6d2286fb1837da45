"""SandboxKernelExecutor: smolagents' code runs as cells of one kernel in a sandbox.

    with SandboxKernelExecutor(backend="local", memory_mib=1024) as executor:
        agent = CodeAgent(tools=[], model=model, executor=executor)

Variables stay in the kernel from step to step. What comes back is JSON: no pickle of the sandbox is
ever loaded on this host.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any, Self

from sandbox_kernel.agents.executor_kernel import ExecutorKernel
from sandbox_kernel.agents.extras import missing
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
_MAX_ANSWER = 16 * 2**20
_FIND = "import importlib.util as u; print([n for n in {names!r} if u.find_spec(n) is None])"
_MODULES = {"pillow": "PIL", "scikit_learn": "sklearn", "beautifulsoup4": "bs4", "pyyaml": "yaml"}
"""Packages whose modules have other names."""


class SandboxKernelExecutor(RemotePythonExecutor):
    """A kernel that starts now. ``cleanup`` removes it and its sandbox, and so does the end of this
    process. ``settings`` are those of a kernelspec (memory_mib, egress, ...); packages that tools
    need are installed if the sandbox has a way out to the index (``egress=["@pip"]``)."""

    def __init__(
        self,
        additional_imports: Sequence[str] = (),
        logger: AgentLogger | None = None,
        *,
        backend: str = DEFAULT_BACKEND,
        timeout: float = TIMEOUT,
        **settings: Any,
    ) -> None:
        super().__init__(list(additional_imports), logger or AgentLogger(level=LogLevel.ERROR))
        self.kernel = ExecutorKernel(backend, settings)
        self._timeout = timeout
        self._setup: list[str] = []
        """What made the tools and variables, for a kernel that has to be started again."""
        self._setting_up = False
        self._lock = threading.Lock()
        try:
            self.installed_packages = self.install_packages(list(additional_imports))
        except BaseException:
            self.cleanup()
            raise

    # --- its life

    def cleanup(self) -> None:
        """Remove the kernel and its sandbox. Idempotent; CodeAgent.cleanup calls it."""
        self.kernel.close()

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
            if self._setting_up and code not in self._setup:
                self._setup.append(code)
            cell = self.kernel.run(code, self._timeout)
            if cell.lost:
                self._start_again()
        if cell.error_name == self.FINAL_ANSWER_EXCEPTION:
            if len(cell.error_value) > _MAX_ANSWER:
                raise self._failed(f"The final answer has more than {_MAX_ANSWER} characters.")
            answer = self._deserialize_final_answer(cell.error_value, allow_pickle=False)
            return CodeOutput(output=answer, logs=cell.printed, is_final_answer=True)
        if cell.problem or cell.error_name:
            raise self._failed(f"{cell.printed}\n{cell.problem or cell.traceback}".strip())
        return CodeOutput(output=cell.result, logs=cell.printed, is_final_answer=False)

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """Install what the kernel cannot import yet."""
        modules = {_MODULES.get(_module(name), _module(name)): name for name in additional_imports}
        if not modules:
            return additional_imports
        found = self.kernel.run(_FIND.format(names=list(modules)), self._timeout).printed
        wanted = [name for module, name in modules.items() if repr(module) in found]
        if wanted:
            cell = self.kernel.run(f"%pip install --quiet {' '.join(wanted)}", INSTALL_TIMEOUT)
            after = self.kernel.run(_FIND.format(names=list(modules)), self._timeout).printed
            if left := [name for module, name in modules.items() if repr(module) in after]:
                raise self._failed(
                    f"{', '.join(left)} could not be installed in sandbox {self.kernel.name!r}: "
                    f"{cell.printed.strip()[-500:]} The sandbox needs a way out to the index: "
                    f'egress=["@pip"].'
                )
        return additional_imports

    def _start_again(self) -> None:
        for code in self._setup:
            self.kernel.run(code, self._timeout)

    def _failed(self, text: str) -> AgentExecutionError:
        return AgentExecutionError(text, self.logger)


def _module(package: str) -> str:
    """``numpy>=2`` -> ``numpy``, ``a.b`` -> ``a``."""
    return re.split(r"[^\w-]", package, maxsplit=1)[0].replace("-", "_")
