"""Saves the files of a kernel with its notebook, and moves its workspace with the notebook.

Listens to the events of the contents service. Jupyter Server runs listeners after a save, in their
own tasks, so a notebook's save never waits for ours, and does not fail with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.jupyter.kernel_workspace import KernelWorkspace, open_store
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.server_kernels import ServerKernels
from sandbox_kernel.jupyter.teardown import advice
from sandbox_kernel.sandboxes.unsaved_files import Unsaved
from sandbox_kernel.spec import NOTEBOOK
from sandbox_kernel.workspace import Store, name_for_notebook, notebook_identity

CONTENTS_EVENTS = "https://events.jupyter.org/jupyter_server/contents_service/v1"
SAVE_EVENTS = "https://sandbox-kernel.example/events/workspace_save/v1"
SCHEMA = Path(__file__).with_name("workspace_save.yaml")
_MOST_PROBLEMS = 20
_PATIENCE = 30.0
"""Seconds to wait for a running save."""


class Saver:
    """Saves each kernel's files, one save at a time."""

    def __init__(self, kernels: ServerKernels) -> None:
        self._kernels = kernels
        self._events = events = kernels.app.event_logger
        self._log = kernels.log
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._failing: set[str] = set()
        """Kernels whose last save failed, as their notebooks say."""
        self._left_out: dict[str, Sequence[str]] = {}
        """What notebooks say about files that were not written to their folders."""
        self._moving = asyncio.Lock()
        events.register_event_schema(SCHEMA)
        events.add_listener(schema_id=CONTENTS_EVENTS, listener=self.on_contents)

    async def on_contents(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        """The contents service has saved, moved, copied or deleted a file."""
        action, path = data["action"], data["path"].strip("/")
        source = data.get("source_path", "").strip("/")
        if action == "save":
            for kernel_id, (_, paths) in list(self._kernels.with_paths().items()):
                if path in paths:
                    await self._look_for_save_as(kernel_id)
                    self.save_soon(kernel_id)
        elif action in ("rename", "copy", "delete"):
            on_host = self._kernels.on_host
            async with self._moving:
                try:
                    await self._moved(action, on_host(source), on_host(path))
                except (SandboxError, OSError) as error:
                    self._log.error("The workspace of %s was not updated: %s", path, error)

    def save_soon(self, kernel_id: str) -> None:
        """Start a save. Requests during a save become one more save."""
        if kernel_id in self._saving:
            self._again.add(kernel_id)
            return
        task = asyncio.ensure_future(self._save(kernel_id))
        self._saving[kernel_id] = task
        task.add_done_callback(lambda _: self._done(kernel_id))

    def _done(self, kernel_id: str) -> None:
        del self._saving[kernel_id]
        if kernel_id in self._again:
            self._again.discard(kernel_id)
            self.save_soon(kernel_id)

    async def finish(self) -> None:
        """Before the last saves: wait for running saves, and cancel those that take too long."""
        self._again.clear()
        if self._saving:
            _, late = await asyncio.wait(list(self._saving.values()), timeout=_PATIENCE)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _save(self, kernel_id: str) -> None:
        provisioner, _ = self._kernels.with_paths().get(kernel_id, (None, []))
        workspace = provisioner.saved_workspace if provisioner is not None else None
        if provisioner is None or workspace is None or provisioner.at_rest:
            return
        event = _event(kernel_id, workspace)
        try:
            await asyncio.to_thread(_note, workspace)
            report = await provisioner.save(wake=False)
        except Exception as error:  # noqa: BLE001  (the notebook says it, whatever it is)
            known = isinstance(error, (SandboxError, OSError))
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self._log.error(
                "Kernel %s: workspace %s was not saved: %s",
                *(kernel_id, workspace.name, reason),
                exc_info=None if known else error,
            )
            self._emit({**event, "status": "failed", "message": reason})
            if kernel_id not in self._failing:  # JupyterLab saves notebooks every two minutes
                self._failing.add(kernel_id)
                self._kernels.say(
                    kernel_id,
                    f"The notebook was saved, but not the files that its cells wrote: {reason}\n"
                    f"They are still in the sandbox. Saving the notebook tries again; "
                    f"`sandbox-kernel workspace log` lists the saves.",
                )
            return
        event["workspace"] = report.save.workspace  # the notebook may have been renamed meanwhile
        if kernel_id in self._failing:
            self._failing.discard(kernel_id)
            text = f"The files of this notebook's kernel are saved again ({report})."
            self._kernels.say(kernel_id, text)
        if report.also != self._left_out.get(kernel_id, []):
            self._left_out[kernel_id] = report.also
            self._tell_left_out(kernel_id, report.also, report.save.workspace)
        for problem in report.save.problems[:_MOST_PROBLEMS]:
            self._log.warning("Workspace %s: %s", report.save.workspace, problem)
        self._emit(
            {
                **event,
                "status": "saved" if report.new else "unchanged",
                "save": report.save.id,
                "files": report.save.files,
                "bytes": report.save.bytes,
                "problems": list(report.problems[:_MOST_PROBLEMS]),
                "message": str(report),
            }
        )

    def _tell_left_out(self, kernel_id: str, problems: Sequence[str], workspace: str) -> None:
        """Say once in the notebook which results are not in its folder."""
        if problems:
            self._kernels.say(
                kernel_id,
                f"The files are saved, but {len(problems)} of them were "
                + "\n".join(problems[:_MOST_PROBLEMS])
                + f"\n`sandbox-kernel workspace export {workspace} FOLDER` writes them elsewhere.",
            )

    def tell_unsaved(self, kernel_id: str, unsaved: Unsaved) -> None:
        """Emit an event: the last save of a kernel has failed, and its sandbox is kept."""
        failed = {"status": "failed", "message": advice(unsaved)}
        self._emit({**_event(kernel_id, unsaved), **failed})

    def _emit(self, data: dict[str, Any]) -> None:
        self._events.emit(schema_id=SAVE_EVENTS, data=data)

    # --- notebooks that move

    async def _moved(self, action: str, source: str, target: str) -> None:
        subject = source or target
        running = [self._saving[i] for i, _ in self._running(subject) if i in self._saving]
        if running:
            # Let the save under the old name end first.
            _, late = await asyncio.wait(running, timeout=_PATIENCE)
            if late:
                self._log.warning("%s is moved during a save of its files", subject)
        store = await asyncio.to_thread(open_store)
        known = await asyncio.to_thread(_notebooks_at, store, subject)
        open_ = [p.saved_workspace.notebook for _, p in self._running(subject) if p.saved_workspace]
        for notebook in dict.fromkeys([*known, *open_]):
            name = name_for_notebook(notebook)
            if action == "delete":
                if await asyncio.to_thread(store.retire, name):
                    self._log.info("Workspace %s is kept until gc: %s was deleted", name, notebook)
                continue
            moved = target + notebook[len(subject) :]
            new = name_for_notebook(moved)
            follow = notebook_identity.move if action == "rename" else notebook_identity.copy
            self._warn(await asyncio.to_thread(follow, store, name, new, moved))
        if action == "rename":
            for kernel_id, provisioner in self._running(source):
                await self._follow(kernel_id, provisioner, source, target)

    async def _look_for_save_as(self, kernel_id: str) -> None:
        """ "Save as" gives the kernel to a new notebook: the path of its session changes without
        an event. Copy the workspace for the new notebook; the old one keeps its own."""
        if not self._given_to(kernel_id):
            return
        async with self._moving:  # a rename has an event, which is handled first
            notebook = self._given_to(kernel_id)
            if not notebook:
                return
            provisioner, _ = self._kernels.with_paths()[kernel_id]
            workspace = provisioner.saved_workspace
            assert workspace is not None
            try:
                id_, changes = await asyncio.to_thread(_copy_for, workspace.name, notebook)
            except (SandboxError, OSError) as error:
                what = f"the workspace of {notebook}"
                self._log.error("Kernel %s: %s was not updated: %s", kernel_id, what, error)
                return
            self._warn(changes)
            provisioner.saved_workspace = replace(workspace, id=id_)
            await self._follow(kernel_id, provisioner, workspace.notebook, notebook)

    def _given_to(self, kernel_id: str) -> str:
        """The new notebook of a kernel that its own notebook has lost; empty if there is none."""
        provisioner, paths = self._kernels.with_paths().get(kernel_id, (None, []))
        workspace = provisioner.saved_workspace if provisioner is not None else None
        if workspace is None or workspace.named or not workspace.notebook:
            return ""
        notebooks = [self._kernels.on_host(path) for path in paths if path.endswith(NOTEBOOK)]
        return notebooks[-1] if notebooks and workspace.notebook not in notebooks else ""

    def _running(self, subject: str) -> list[tuple[str, SandboxProvisioner]]:
        """Kernels of this notebook, or of notebooks in this folder."""
        return [
            (kernel_id, provisioner)
            for kernel_id, (provisioner, _) in self._kernels.with_paths().items()
            if provisioner.saved_workspace is not None
            and _is_at(provisioner.saved_workspace.notebook, subject)
        ]

    async def _follow(
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
        await provisioner.note_files(notebook)
        await self._kernels.save_workspace(kernel_id)

    def _warn(self, changes: Sequence[str]) -> None:
        for line in changes:
            self._log.warning("%s.", line)


def _event(kernel_id: str, workspace: KernelWorkspace | Unsaved) -> dict[str, Any]:
    named = {"workspace": workspace.name, "notebook": workspace.notebook}
    return {"kernel_id": kernel_id, **named}


def _note(workspace: KernelWorkspace) -> None:
    """Update the store's record of a saved notebook."""
    store = open_store()
    name = notebook_identity.place_of(store, workspace.name, workspace.id)
    notebook_identity.note(store, name, workspace.id, workspace.notebook)


def _copy_for(name: str, notebook: str) -> tuple[str, list[str]]:
    """Copy a workspace's latest save to a notebook's own, if that has none. Its id, and changes."""
    store = open_store()
    new = name_for_notebook(notebook)
    id_, changes = notebook_identity.claim(store, new, notebook)
    if not store.ids(new):
        store.copy(name, new, notebook)
    return id_, changes


def _is_at(notebook: str, subject: str) -> bool:
    return notebook == subject or notebook.startswith(subject + os.sep)


def _notebooks_at(store: Store, subject: str) -> list[str]:
    """The notebook itself; of a folder, the notebooks below it that have a workspace."""
    if subject.endswith(NOTEBOOK):
        return [subject]
    latest = [store.latest(name) for name in store.names()]
    return [s.notebook for s in latest if s is not None and _is_at(s.notebook, subject)]
