"""microVMs on this machine, through microsandbox: images, pausing, snapshots and live forks.

client     MicrosandboxClient: making, finding and removing sandboxes, and snapshots
handle     one sandbox: commands, pausing, stopping, forking
stream     the streams of a command
machine    one VM by its name: its state, its processes, its console, its end
scripts    the few lines of shell and Python that run inside
images     images as the SDK knows them; loads OCI layouts
"""

from sandbox_kernel.sandboxes.microsandbox.client import MicrosandboxClient

__all__ = ["MicrosandboxClient"]
