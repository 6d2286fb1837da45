"""Every error that sandbox-kernel raises on purpose.

    SandboxError
    +-- SpecError                 the request itself is wrong (also a ValueError)
    |   +-- SpecRefused           the backend cannot enforce a field of it
    +-- SandboxUnavailable        the backend cannot be used on this machine
    +-- SandboxNotFound           no sandbox has that name
    +-- SandboxExists             a sandbox has that name already
    +-- SandboxGone               the sandbox ended while it was needed
    +-- SandboxPaused             the sandbox is paused, and was not asked to go on
    +-- SandboxTimeout            the sandbox did not answer in time (also a TimeoutError)
    +-- ExecFailed                a command could not be run in the sandbox
    +-- TunnelError               the wire between host and sandbox
    |   +-- LinkLost              a stream broke; the tunnel reconnects by itself
    |   +-- ProtocolError         the far side broke the protocol; the session is over
    |   +-- SessionRefused        the agent refused this session (token, version, superseded)
    |   +-- InternalError         a mistake in sandbox-kernel itself, not in the sandbox
    +-- KernelError
    |   +-- KernelLaunchFailed    the kernel process could not be started
    |   |   +-- KernelProgramMissing  its program is not there (also a FileNotFoundError)
    |   +-- KernelDied            the kernel process ended by itself
    +-- WorkspaceError
        +-- WorkspaceNotFound     no workspace or save of that name
        +-- WorkspaceExists       a workspace of that name exists already
        +-- WorkspaceRefused      a sandbox, or a damaged save, holds what must not be written
        +-- QuotaExceeded         more files or bytes than allowed
        +-- StoreError            the store cannot be read or written
        |   +-- StoreDamaged      it holds what cannot be right
        |   +-- PacksGone         what a save relied on was deleted while it was made
        +-- ExportConflict        files of the host would be written over

A message says what failed, in which sandbox, and what to do next.
"""

from __future__ import annotations


class SandboxError(RuntimeError):
    """Base of all errors of this package."""


class SpecError(SandboxError, ValueError):
    """A SandboxSpec or a piece of configuration is wrong; nothing was created."""


class SpecRefused(SpecError):
    """The spec asks for something that the chosen backend cannot enforce; nothing was created."""


class SandboxUnavailable(SandboxError):
    """The backend cannot be used here: an extra, a kernel feature or an account is missing."""


class Unsupported(SandboxError):
    """The backend has no such thing (pausing, snapshots, forks); the message says which."""


class SandboxNotFound(SandboxError):
    """No sandbox of that name (or id) exists in the backend."""


class SandboxElsewhere(SandboxError):
    """The sandbox belongs to another host, or container, that shares this one's folders."""


class SandboxExists(SandboxError):
    """A sandbox of that name exists already."""


class SandboxGone(SandboxError):
    """The sandbox ended (stopped, killed, lease over) while it was needed."""


class SandboxPaused(SandboxError):
    """The sandbox is paused. ``SandboxHandle.resume`` lets it go on; nothing else does."""


class SandboxTimeout(SandboxError, TimeoutError):
    """The sandbox or its provider did not answer within the time allowed."""


class ExecFailed(SandboxError):
    """A command could not be started in the sandbox (it does not exist, cannot be executed)."""


class TunnelError(SandboxError):
    """Something about the wire between host and sandbox."""


class LinkLost(TunnelError):
    """The stream to the sandbox broke. The tunnel handles this by reconnecting."""


class ProtocolError(TunnelError):
    """The far side sent what the protocol does not allow. Its session is ended."""


class SessionRefused(TunnelError):
    """The agent in the sandbox refused the session."""


class InternalError(TunnelError):
    """A mistake in sandbox-kernel itself has ended the session; the sandbox is not to blame."""


class KernelError(SandboxError):
    """Something about the kernel process in the sandbox."""


class KernelLaunchFailed(KernelError):
    """The kernel process could not be started."""


class KernelProgramMissing(KernelLaunchFailed, FileNotFoundError):
    """The kernel's program is not there: clients of local kernels know this error."""


class KernelDied(KernelError):
    """The kernel process ended without being asked to."""


class WorkspaceError(SandboxError):
    """Something about saved workspaces."""


class WorkspaceNotFound(WorkspaceError):
    """No workspace of that name, or no such save in it."""


class WorkspaceExists(WorkspaceError):
    """A workspace of that name exists already."""


class WorkspaceRefused(WorkspaceError):
    """A sandbox sent, or a save holds, what must not be saved or written; nothing was."""


class QuotaExceeded(WorkspaceError):
    """The workspace has more files or bytes than its quota; nothing was saved."""


class StoreError(WorkspaceError):
    """The store cannot be read or written."""


class StoreDamaged(StoreError):
    """The store holds what cannot be right: a checksum fails, something is missing."""


class PacksGone(StoreError):
    """What a save relied on was deleted from the store while it was made; it was not published."""


class ExportConflict(WorkspaceError):
    """Files that have changed on the host would be written over; nothing was written."""
