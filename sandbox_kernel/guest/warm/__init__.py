"""The inside of a warm process. The folder itself is put on its PYTHONPATH."""

FD_VARIABLE = "SANDBOX_KERNEL_WARM_FD"
"""Descriptor of the socket to the agent."""
SAVED_VARIABLE = "SANDBOX_KERNEL_SAVED_PYTHONPATH"
"""What PYTHONPATH was, and will be again."""
MAX_REQUEST = 2**20
