"""A pytest plugin for the OpenAI Agents SDK's tests, which get our client for its Unix-local one.

The classes are swapped before collection, so the files stay as they are. Those tests look at the
workspace on the host. So a sandbox gets what the test has made for it, at the same path, and in its
place on the host there is then a link to the sandbox's own files, as its processes see them; for a
microVM, to a copy (``host_copy``).

``SUITE_BACKEND`` names the backend, ``SUITE_SETTINGS`` has fields of every sandbox, and
``SUITE_COPIED`` asks for copies. What ``not_applicable.txt`` lists is not run.

Not a module of this project's tests: the SDK's are called ``tests``, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest
from agents.sandbox import sandboxes
from agents.sandbox.manifest import Manifest
from agents.sandbox.sandboxes import unix_local
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.pty_types import PtyExecUpdate

from sandbox_kernel.agents.openai_agents import (
    SandboxKernelClient,
    SandboxKernelClientOptions,
    SandboxKernelSession,
    SandboxKernelSessionState,
    terminals,
)
from sandbox_kernel.agents.openai_agents.options import spec_for
from sandbox_kernel.agents.openai_agents.sandbox import SessionSandbox
from sandbox_kernel.agents.raw_exec import RawResult
from sandbox_kernel.sandboxes.backends import load_backend
from sandbox_kernel.sandboxes.base import SandboxClient, SandboxHandle
from sandbox_kernel.tunnel.background import run, submit

if TYPE_CHECKING:
    from .host_copy import HostCopy
else:
    from host_copy import HostCopy  # see above

BACKEND = os.environ["SUITE_BACKEND"]
SETTINGS = json.loads(os.environ.get("SUITE_SETTINGS", "{}"))
COPIED = bool(os.environ.get("SUITE_COPIED"))
"""Whether the host cannot see the sandbox's processes, or is taken not to."""
SLOWNESS = float(os.environ.get("SANDBOX_KERNEL_TEST_PATIENCE", "1"))
"""How many times slower than a real machine this one is."""
CLIENT: SandboxClient = load_backend(BACKEND)
ALLOWED = unix_local._HOST_ENVIRONMENT_ALLOWLIST
_rmtree = shutil.rmtree
_wait_for = asyncio.wait_for
_LOOK = ("test", "/tmp/openai-agents/bin/")
"""Commands that only look, and are every second one: the SDK checks paths by one there."""
_WAITS = "import sys, time; time.sleep(3600)"


class Place:
    """Where the running test keeps its files, and what must be tidied up after it."""

    folder: Path | None = None
    links: ClassVar[dict[Path, Path | None]] = {}
    """Workspaces -> what the test had made at their place."""
    sandboxes: ClassVar[set[str]] = set()
    copies: ClassVar[dict[tuple[str, Path], HostCopy]] = {}
    """Of each sandbox's workspace one, also if several sessions use it."""


class MirroredSandbox(SessionSandbox):
    """A sandbox whose workspace the test sees at its path on the host."""

    root: Path
    _copy: HostCopy | None = None

    async def attach(self) -> SandboxHandle:
        known = self._handle
        handle = await super().attach()
        if handle is not known:
            Place.sandboxes.add(handle.name)
            await self._mirror(handle)
        elif self._copy is not None and self.root in Place.links:
            await self._copy.give(handle)
        return handle

    async def refresh(self) -> None:
        """A command may have changed files."""
        if self._copy is not None and self._handle is not None and self.root in Place.links:
            self._show(await self._copy.take(self._handle))

    async def _mirror(self, handle: SandboxHandle) -> None:
        base = Place.folder if Place.folder in self.root.parents else self.root
        for folder in {Place.folder, base}:
            if folder is not None and folder.is_dir() and not folder.is_symlink():
                await handle.upload(str(folder), str(folder))
        await handle.exec("mkdir", ["-p", str(self.root.parent)], cwd="/")
        if COPIED:
            # An image's has login shells forget the PATH that a test gives them. A jail has none.
            await handle.exec("rm", ["-f", "/etc/profile"], cwd="/")
            key = (handle.id, self.root)
            self._copy = Place.copies.get(key) or HostCopy(self.root)
            Place.copies[key] = self._copy
        view = await (self._copy.take(handle) if self._copy else _seen_from_host(handle))
        self._show(view)

    def _show(self, view: str) -> None:
        aside = None
        if self.root.exists() and not self.root.is_symlink():
            aside = self.root.with_name(f".{secrets.token_hex(4)}")
            self.root.rename(aside)
        link = self.root.with_name(f".{secrets.token_hex(4)}")
        link.symlink_to(f"{view}{self.root}")
        link.replace(self.root)
        Place.links.setdefault(self.root, aside)

    async def rest(self, *, pause: bool) -> None:
        await super().rest(pause=pause)
        unlink(self.root)

    async def remove(self) -> None:
        await super().remove()
        unlink(self.root)


def unlink(root: Path) -> None:
    """What the test itself has put there is there again."""
    if root in Place.links and root.is_symlink():
        root.unlink()
        aside = Place.links.pop(root)
        if aside is not None:
            aside.rename(root)


def rmtree(path: Any, *args: Any, **options: Any) -> None:
    """A test removes its workspace, which may be in a sandbox."""
    unlink(Path(path))
    _rmtree(path, *args, **options)


def wait_for(awaitable: Any, timeout: float | None) -> Any:
    """A test's own limit, in the time of a slow machine."""
    of_a_test = sys._getframe(1).f_globals["__name__"].startswith("tests.")
    if timeout is not None and of_a_test:
        timeout *= SLOWNESS
    return _wait_for(awaitable, timeout)


def _slower(options: dict[str, Any]) -> dict[str, Any]:
    """So is the time in which a terminal's output is collected."""
    wanted = options.get("yield_time_s")
    return options if wanted is None else {**options, "yield_time_s": wanted * SLOWNESS}


async def _seen_from_host(handle: SandboxHandle) -> str:
    """The sandbox's root folder, as one of its processes has it."""
    mark = secrets.token_hex(8)
    await handle.spawn(["python3", "-c", _WAITS, mark])
    while True:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if mark.encode() in words and words[1:3] == [b"-c", _WAITS.encode()]:
                    return str(process / "root")
        await asyncio.sleep(0.02)


class State(SandboxKernelSessionState):
    type: Literal["unix_local"] = "unix_local"  # type: ignore[assignment]
    backend: str = BACKEND
    workspace_root_owned: bool = False


class Session(SandboxKernelSession):
    """Also made from a state alone, and with the host's environment and HOME, as theirs is."""

    state: State
    _sandbox: MirroredSandbox
    inherited: frozenset[str] | None = None

    def __init__(self, *, state: Any, **_: Any) -> None:
        super().__init__(state=state, backend=CLIENT)
        options = SandboxKernelClientOptions(backend=BACKEND, **SETTINGS)
        self._sandbox = MirroredSandbox(
            CLIENT, state.sandbox, lambda: spec_for(state, options, CLIENT.capabilities)
        )
        self._sandbox.root = Path(state.manifest.root)

    @classmethod
    def from_state(cls, state: State) -> Session:
        return cls(state=state)

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: Any
    ) -> list[str]:
        # Theirs is no login shell: that would set PATH.
        shell = ["sh", "-c"] if shell is True else shell
        return super()._prepare_exec_command(*command, shell=shell, user=user)

    async def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if self._inherits(k)}
        return {**kept, **await super()._environment(), "HOME": self.state.manifest.root}

    async def _raw(self, argv: list[str], **options: Any) -> RawResult:
        result = await super()._raw(argv, **options)
        if not argv[0].startswith(_LOOK):
            await run(self._sandbox.refresh())
        return result

    async def pty_exec_start(self, *command: str | Path, **options: Any) -> PtyExecUpdate:
        update = await super().pty_exec_start(*command, **_slower(options))
        await run(self._sandbox.refresh())
        return update

    async def pty_write_stdin(self, **options: Any) -> PtyExecUpdate:
        update = await super().pty_write_stdin(**_slower(options))
        await run(self._sandbox.refresh())
        return update

    def _inherits(self, name: str) -> bool:
        return self.inherited is None or name in self.inherited

    def _folder(self) -> str:
        return self.state.manifest.root


class Client(SandboxKernelClient):
    """Takes what theirs takes, and gives each session without a root one of its own."""

    backend_id = "unix_local"

    def __init__(
        self,
        *,
        inherit_host_environment: bool = True,
        host_environment_allowlist: Collection[str] | None = None,
        **theirs: Any,
    ) -> None:
        if inherit_host_environment and host_environment_allowlist is not None:
            raise ValueError("host_environment_allowlist requires inherit_host_environment=False")
        if isinstance(host_environment_allowlist, str):
            raise TypeError("host_environment_allowlist must be a collection of variable names")
        options = SandboxKernelClientOptions(backend=BACKEND, **SETTINGS)
        super().__init__(options=options, **theirs)
        self._inherited = None
        if not inherit_host_environment:
            self._inherited = frozenset(host_environment_allowlist or ALLOWED)

    async def create(
        self,
        *,
        snapshot: Any = None,
        manifest: Manifest | None = None,
        options: Any = None,
    ) -> SandboxSession:
        manifest = manifest or Manifest()
        owned = manifest.root == "/workspace"
        if owned:
            root = tempfile.mkdtemp(prefix="sandbox-local-")
            os.rmdir(root)
            manifest = manifest.model_copy(update={"root": root}, deep=True)
        ours = SandboxKernelClientOptions(
            backend=BACKEND,
            exposed_ports=options.exposed_ports if options else (),
            settings=SETTINGS,
        )
        made = await super().create(snapshot=snapshot, manifest=manifest, options=ours)
        made.state.workspace_root_owned = owned  # type: ignore[attr-defined]
        return made

    def _session(self, state: Any, options: Any) -> SandboxSession:
        if not isinstance(state, State):
            state = State.model_validate({**dict(state), "type": "unix_local"})
        inner = Session(state=state)
        inner.inherited = self._inherited
        return self._wrap_session(inner, instrumentation=self._instrumentation)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, State)


SWAPPED = {
    "UnixLocalSandboxClient": Client,
    "UnixLocalSandboxSession": Session,
    "UnixLocalSandboxSessionState": State,
}
for name, stand_in in SWAPPED.items():
    for module in (sandboxes, unix_local):
        if hasattr(module, name):
            setattr(module, name, stand_in)


# --- running their tests


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "asyncio: a coroutine")


def not_applicable() -> dict[str, str]:
    """Ids of tests -> why they are no tests of our client."""
    found: dict[str, str] = {}
    reason = ""
    for line in Path(__file__).with_name("not_applicable.txt").read_text().splitlines():
        if line.startswith("# "):
            reason = line.removeprefix("# ")
        elif line:
            found[line] = reason
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A listed test that does not exist is an error: the list is as true as the tests."""
    known = {item.nodeid for item in items}
    files = {nodeid.partition("::")[0] for nodeid in known}
    listed = {nodeid for nodeid in not_applicable() if nodeid.partition("::")[0] in files}
    if config.getoption("keyword") or any("::" in word for word in config.args):
        listed &= known  # only some of the tests of a file were asked for
    if unknown := sorted(listed - known):
        raise pytest.UsageError(f"not_applicable.txt lists what does not exist: {unknown}")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in listed])
    items[:] = [item for item in items if item.nodeid not in listed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On microVMs the rest may take long."""
    if COPIED and report.failed:
        print(f"\n{report.longreprtext}", flush=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Their coroutines run on a loop of their own, without a further plugin."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def place_of_the_test(tmp_path: Path) -> Iterator[None]:
    """Nothing of a test is left: neither its sandboxes nor the links to them."""
    Place.folder = tmp_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        patch.setattr(asyncio, "wait_for", wait_for)
        # A terminal gives its first output 2 s. Not much longer: a test's `sleep 30` must not end.
        patch.setattr(terminals, "_PATIENCE", terminals._PATIENCE * min(SLOWNESS, 4.0))
        yield
    for sandbox in Place.sandboxes:
        submit(CLIENT.remove(sandbox)).result()
    Place.sandboxes.clear()
    for root in list(Place.links):
        unlink(root)
    while Place.copies:
        Place.copies.popitem()[1].close()
