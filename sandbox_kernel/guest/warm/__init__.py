"""What runs first in an interpreter that the agent starts. The folder itself is put on its
PYTHONPATH."""

FD_VARIABLE = "SANDBOX_KERNEL_WARM_FD"
"""Descriptor of the socket to the agent."""
SAVED_VARIABLE = "SANDBOX_KERNEL_SAVED_PYTHONPATH"
"""What PYTHONPATH was, and will be again."""
PACKAGES_VARIABLE = "SANDBOX_KERNEL_PACKAGES"
"""Folder of the packages that a kernel needs and the image lacks, if there is one. The agent gets
it from the host; kernels have it on ``sys.path``, but never in their environment."""
MAX_REQUEST = 2**20
READY, TAKEN = b"ready", b"taken"
"""What a spare says when it has started, and when it has become a kernel."""
