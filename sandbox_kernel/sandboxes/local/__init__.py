"""The local jail: a sandbox of namespaces, a seccomp filter and limits, through bubblewrap.

client        LocalClient and its handles: the sandbox surface
launch        starts a jail
control       one request to jailinit, process 1 of the jail
stream        the streams of a command
limits        what a jail may use, and the cgroups that hold it to that
folders       the host folders of a sandbox
environment   what the jail sees of the host's Python and system
private       what must stay hidden of that
bubblewrap    the command line of a jail
seccomp       its system call filter
syscalls      the calls that it allows, and their numbers
"""

from sandbox_kernel.sandboxes.local.client import LocalClient

__all__ = ["LocalClient"]
