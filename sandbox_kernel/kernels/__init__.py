"""A kernel in a sandbox, without Jupyter's classes: sandbox + agent + tunnel + kernel process.

The provisioner, the launcher and the Python API are thin shells around SandboxedKernel. Its
methods are coroutines for the background loop (``tunnel.background.run``).

sandboxed_kernel  makes, finds, pauses and removes the sandbox of a kernel, with its agent
launched_process  launches, signals and watches the kernel process
kernel_record     what the sandbox's record says about the kernel
spare             a sandbox that is made ahead for a kernel to come
spare_shelf       how one process takes a spare of another
spare_holder      the process that has one
"""

from sandbox_kernel.kernels.kernel_record import fingerprint
from sandbox_kernel.kernels.launched_process import Log
from sandbox_kernel.kernels.sandboxed_kernel import UNUSED_LEASE, SandboxedKernel

__all__ = ["UNUSED_LEASE", "Log", "SandboxedKernel", "fingerprint"]
