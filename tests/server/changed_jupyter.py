"""A Jupyter Server of a version that lacks an internal method: ``python -m`` this module."""

from __future__ import annotations

from jupyter_server.serverapp import launch_new_instance
from jupyter_server.services.kernels.kernelmanager import MappingKernelManager

if __name__ == "__main__":
    del MappingKernelManager.cull_kernel_if_idle
    launch_new_instance()
