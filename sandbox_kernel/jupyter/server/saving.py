"""Saving: when a notebook is saved, so are the files of its kernel; when it moves, they follow.

It listens to the events of the contents service. Jupyter Server runs listeners after the save, in
tasks of their own, so a save never waits for us, and our failure is not the save's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_server.utils import ApiPath, to_os_path

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.keeping import advice
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.workspaces import KernelWorkspace, open_store
from sandbox_kernel.kernels import Log
from sandbox_kernel.sandboxes.unsaved import Unsaved
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.workspace import Store, identity, name_for_notebook

CONTENTS_EVENTS = "https://events.jupyter.org/jupyter_server/contents_service/v1"
SAVE_EVENTS = "https://sandbox-kernel.example/events/workspace_save/v1"
SCHEMA = Path(__file__).with_name("workspace_save.yaml")
_PATIENCE = 30.0
"""Seconds that others wait for a save that runs."""


class Saver:
    """``kernels`` gives the running kernels of the server that are in sandboxes, by id, each with
    the paths of its sessions as the contents service says them. ``say`` shows a text in a kernel's
    notebooks: that a save has failed, and that one has not any more."""

    def __init__(
        self,
        events: Any,
        root_dir: str,
        kernels: Callable[[], Mapping[str, tuple[SandboxProvisioner, list[str]]]],
        changed: Callable[[str], object],
        say: Callable[[str, str], object],
        log: Log,
    ) -> None:
        self._events = events
        self._root_dir = root_dir
        self._kernels = kernels
        self._changed = changed
        self._say = say
        self._log = log
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._failing: set[str] = set()
        """Kernels whose last save has failed, which has been said in their notebooks."""
        self._moving = asyncio.Lock()
        events.register_event_schema(SCHEMA)
        events.add_listener(schema_id=CONTENTS_EVENTS, listener=self.on_contents)

    async def on_contents(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        """Told by the contents service, after it has done something."""
        action, path = data["action"], data["path"].strip("/")
        source = data.get("source_path", "").strip("/")
        if action == "save":
            for kernel_id, (_, paths) in list(self._kernels().items()):
                if path in paths:
                    await self._look_for_save_as(kernel_id)
                    self.save_soon(kernel_id)
        elif action in ("rename", "copy", "delete"):
            async with self._moving:
                try:
                    await self._moved(action, self._on_host(source), self._on_host(path))
                except (SandboxError, OSError) as error:
                    self._log.error("The workspace of %s did not follow: %s", path, error)

    def save_soon(self, kernel_id: str) -> None:
        """One save at a time for a kernel: those that are asked for meanwhile become one more."""
        if kernel_id in self._saving:
            self._again.add(kernel_id)
            return
        task = asyncio.ensure_future(self._save(kernel_id))
        self._saving[kernel_id] = task
        task.add_done_callback(lambda done: self._done(kernel_id, done))

    def _done(self, kernel_id: str, task: asyncio.Task[None]) -> None:
        self._saving.pop(kernel_id, None)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self._log.error(
                "Saving the files of kernel %s failed: %r", kernel_id, error, exc_info=error
            )
            self._say_failed(kernel_id, f"{type(error).__name__}: {error}")
        if kernel_id in self._again:
            self._again.discard(kernel_id)
            self.save_soon(kernel_id)

    async def finish(self) -> None:
        """Wait for the saves that run, as far as they end."""
        self._again.clear()
        if self._saving:
            await asyncio.wait(list(self._saving.values()), timeout=_PATIENCE)

    async def _save(self, kernel_id: str) -> None:
        provisioner, _ = self._kernels().get(kernel_id, (None, []))
        workspace = provisioner.saved_workspace if provisioner is not None else None
        if provisioner is None or workspace is None or provisioner.at_rest:
            return
        told: dict[str, Any] = {
            "kernel_id": kernel_id,
            "workspace": workspace.name,
            "notebook": workspace.notebook,
        }
        try:
            await asyncio.to_thread(_note, workspace)
            report = await provisioner.save(wake=False)
        except (SandboxError, OSError) as error:
            self._log.error("Workspace %s was not saved: %s", workspace.name, error)
            self._tell({**told, "status": "failed", "message": str(error)})
            self._say_failed(kernel_id, str(error))
            return
        told["workspace"] = report.save.workspace  # the notebook may have been renamed meanwhile
        if kernel_id in self._failing:
            self._failing.discard(kernel_id)
            self._say(kernel_id, f"The files of this notebook's kernel are saved again ({report}).")
        for problem in report.save.problems[:20]:
            self._log.warning("Workspace %s: %s", workspace.name, problem)
        self._tell(
            {
                **told,
                "status": "saved" if report.new else "unchanged",
                "save": report.save.id,
                "files": report.save.files,
                "bytes": report.save.bytes,
                "problems": list(report.problems[:20]),
                "message": str(report),
            }
        )

    def tell_unsaved(self, kernel_id: str, unsaved: Unsaved) -> None:
        """The last save of a kernel has failed, and its sandbox is kept."""
        self._tell(
            {
                "kernel_id": kernel_id,
                "workspace": unsaved.name,
                "notebook": unsaved.notebook,
                "status": "failed",
                "message": advice(unsaved),
            }
        )

    def _say_failed(self, kernel_id: str, reason: str) -> None:
        """Once, until a save succeeds: notebooks are saved every two minutes by themselves."""
        if kernel_id in self._failing:
            return
        self._failing.add(kernel_id)
        self._say(
            kernel_id,
            f"The notebook was saved, but not the files that its cells wrote: {reason}\n"
            f"They are still in the sandbox. Saving the notebook tries again; what has been saved "
            f"is listed by `sandbox-kernel workspace log`.",
        )

    def _tell(self, data: dict[str, Any]) -> None:
        self._events.emit(schema_id=SAVE_EVENTS, data=data)

    # --- notebooks that move

    async def _moved(self, action: str, source: str, target: str) -> None:
        subject = source or target
        running = [self._saving[i] for i, _ in self._running(subject) if i in self._saving]
        if running:
            # What is being saved under the old name is there first.
            _, late = await asyncio.wait(running, timeout=_PATIENCE)
            if late:
                self._log.warning("%s moves while a save of its files goes on", subject)
        store = await asyncio.to_thread(open_store)
        known = await asyncio.to_thread(_notebooks_at, store, subject)
        open_ = [p.saved_workspace.notebook for _, p in self._running(subject) if p.saved_workspace]
        for notebook in dict.fromkeys([*known, *open_]):
            name = name_for_notebook(notebook)
            if action == "delete":
                if await asyncio.to_thread(store.retire, name):
                    self._log.info("Workspace %s is kept until gc: %s is gone", name, notebook)
                continue
            moved = target + notebook[len(subject) :]
            follow = identity.move if action == "rename" else identity.copy
            told = await asyncio.to_thread(follow, store, name, name_for_notebook(moved), moved)
            for line in told:
                self._log.warning("%s.", line)
        if action == "rename":
            for kernel_id, provisioner in self._running(source):
                self._follow(kernel_id, provisioner, source, target)

    async def _look_for_save_as(self, kernel_id: str) -> None:
        """ "Save as" gives the kernel to a new notebook: its session has another path, of which
        nobody tells. The workspace is copied for that one, and the old notebook keeps its own."""
        if not self._given_to(kernel_id):
            return
        async with self._moving:  # if it is a rename, that is told, and done now
            notebook = self._given_to(kernel_id)
            if not notebook:
                return
            provisioner, _ = self._kernels()[kernel_id]
            workspace = provisioner.saved_workspace
            assert workspace is not None
            try:
                id_, told = await asyncio.to_thread(_copy_for, workspace.name, notebook)
            except (SandboxError, OSError) as error:
                self._log.error("The workspace of %s did not follow: %s", notebook, error)
                return
            for line in told:
                self._log.warning("%s.", line)
            source = workspace.notebook
            provisioner.saved_workspace = replace(workspace, id=id_)
            self._follow(kernel_id, provisioner, source, notebook)

    def _given_to(self, kernel_id: str) -> str:
        """The notebook that has a kernel now whose own has it no more; empty if it is as it was."""
        provisioner, paths = self._kernels().get(kernel_id, (None, []))
        workspace = provisioner.saved_workspace if provisioner is not None else None
        if workspace is None or workspace.named or not workspace.notebook:
            return ""
        notebooks = [self._on_host(path) for path in paths if path.endswith(NOTEBOOK)]
        return notebooks[-1] if notebooks and workspace.notebook not in notebooks else ""

    def _running(self, subject: str) -> list[tuple[str, SandboxProvisioner]]:
        """Kernels of this notebook, or of notebooks in this folder."""
        return [
            (kernel_id, provisioner)
            for kernel_id, (provisioner, _) in self._kernels().items()
            if provisioner.saved_workspace is not None
            and _is_at(provisioner.saved_workspace.notebook, subject)
        ]

    def _follow(
        self, kernel_id: str, provisioner: SandboxProvisioner, source: str, target: str
    ) -> None:
        workspace = provisioner.saved_workspace
        assert workspace is not None
        notebook = target + workspace.notebook[len(source) :]
        provisioner.saved_workspace = replace(
            workspace,
            name=workspace.name if workspace.named else name_for_notebook(notebook),
            notebook=notebook,
            folder=os.path.dirname(notebook),
        )
        provisioner.note_files(notebook)
        self._changed(kernel_id)

    def _on_host(self, path: str) -> str:
        return os.path.abspath(to_os_path(ApiPath(path), self._root_dir)) if path else ""


def _note(workspace: KernelWorkspace) -> None:
    """The notebook was saved: the store remembers what it is like."""
    store = open_store()
    name = identity.place_of(store, workspace.name, workspace.id)
    identity.note(store, name, workspace.id, workspace.notebook)


def _copy_for(name: str, notebook: str) -> tuple[str, list[str]]:
    """A workspace for a notebook that begins with the latest save of another, unless it has one;
    its id, and what had to be done, in words."""
    store = open_store()
    new = name_for_notebook(notebook)
    id_, told = identity.claim(store, new, notebook)
    if not store.ids(new):
        store.copy(name, new, notebook)
    return id_, told


def _is_at(notebook: str, subject: str) -> bool:
    return notebook == subject or notebook.startswith(subject + os.sep)


def _notebooks_at(store: Store, subject: str) -> list[str]:
    """The notebook itself or, if that is a folder, the notebooks in it that have a workspace."""
    if subject.endswith(NOTEBOOK):
        return [subject]
    latest = [store.latest(name) for name in store.names()]
    return [s.notebook for s in latest if s is not None and _is_at(s.notebook, subject)]
