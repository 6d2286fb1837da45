"""Every error that sandbox-kernel raises on purpose, as one tree below SandboxError.

A message says what failed, in which sandbox, and what to do next.
"""

from __future__ import annotations


class SandboxError(RuntimeError):
    """Base of all errors of this package."""


class SpecError(SandboxError, ValueError):
    """The request is wrong: a setting, a name, a file. Nothing was created."""


class SpecRefused(SpecError):
    """The chosen backend cannot enforce a setting of the request. Nothing was created."""


class SandboxUnavailable(SandboxError):
    """The backend cannot be used here: an extra, a kernel feature or an account is missing."""


class Unsupported(SandboxError):
    """The backend cannot do this (pause, snapshot, fork)."""


class SandboxNotFound(SandboxError):
    """The backend has no sandbox of that name or id."""


class SandboxElsewhere(SandboxError):
    """The sandbox belongs to another host or container that shares our folders."""


class SandboxExists(SandboxError):
    """A sandbox of that name exists already."""


class SandboxGone(SandboxError):
    """The sandbox ended (stopped, killed, lease over) while it was needed."""


class SandboxPaused(SandboxError):
    """The sandbox is paused. Only ``SandboxHandle.resume`` lets it continue."""


class SandboxTimeout(SandboxError, TimeoutError):
    """The sandbox or its provider did not answer within the time allowed."""


class ExecFailed(SandboxError):
    """A command could not be run in the sandbox."""


class TunnelError(SandboxError):
    """The wire between host and sandbox failed."""


class LinkLost(TunnelError):
    """The stream to the sandbox broke. The tunnel reconnects."""


class ProtocolError(TunnelError):
    """The far side violated the protocol. Its session is over."""


class SessionRefused(TunnelError):
    """The agent refused the session (token, version, superseded)."""


class InternalError(TunnelError):
    """A bug in sandbox-kernel ended the session, not the sandbox."""


class KernelError(SandboxError):
    """The kernel process in the sandbox failed."""


class KernelLaunchFailed(KernelError):
    """The kernel process could not be started."""


class KernelProgramMissing(KernelLaunchFailed, FileNotFoundError):
    """The kernel's program does not exist; clients of local kernels expect FileNotFoundError."""


class CellFailed(KernelError):
    """A cell ended with an error, was cancelled, or its kernel died. ``result`` has its outputs."""

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class CellTimeout(CellFailed, SandboxTimeout):
    """A cell did not end within the time that it was given."""


class WorkspaceError(SandboxError):
    """A saved workspace cannot be read or written."""


class WorkspaceNotFound(WorkspaceError):
    """No workspace or save has that name."""


class FileMissing(WorkspaceError, FileNotFoundError):
    """A file or folder is not there in the sandbox."""


class WorkspaceExists(WorkspaceError):
    """A workspace of that name exists already."""


class WorkspaceRefused(WorkspaceError):
    """A sandbox sent, or a save holds, something forbidden; nothing was written."""


class QuotaExceeded(WorkspaceError):
    """The workspace has more files or bytes than its quota; nothing was saved."""


class StoreError(WorkspaceError):
    """The store cannot be read or written."""


class StoreDamaged(StoreError):
    """The store is damaged: a checksum fails, or a file is missing."""


class PacksGone(StoreError):
    """Packs that a save relied on were deleted while it was made; it was not published."""


class ExportConflict(WorkspaceError):
    """The export would overwrite files that have changed on the host; nothing was written."""
