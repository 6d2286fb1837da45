"""The local jail: a sandbox of namespaces, a seccomp filter and limits, through bubblewrap.

client         LocalClient: makes, finds, removes and sweeps jails
handle         one jail: commands and their streams, its end, its state
jail_request   one request to jailinit, process 1 of the jail
jail_state     the jail's processes, state, usage and end, seen from outside
jail_start     starts a jail
jail_folders   the host folders of a jail
bubblewrap     which bwrap to use, and the command line of a jail
mounts         what the jail sees, and in which order it is mounted
system_mounts  the system in the jail: the host's, its own user and its own size
environment    a Python environment of the host, and what the jail sees of it
overlay_venv   the jail's own virtual environment on top, and its pip
hidden_paths   what must stay hidden in folders that are shown
limits         what a jail may use, and how that is enforced
cgroup         cgroups of our own; systemd_scope asks systemd for one
disk_image     a file system for a jail's files
seccomp        its system call filter; syscalls lists the calls
"""

from sandbox_kernel.sandboxes.local.client import LocalClient

__all__ = ["LocalClient"]
