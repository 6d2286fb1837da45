"""A kernel in a sandbox, without Jupyter's classes: sandbox + agent + tunnel + kernel process.

The provisioner, the launcher and the Python API are thin shells around SandboxedKernel. Its
methods are coroutines for the background loop (``tunnel.background.run``).

sandboxed_kernel  makes, finds, pauses and removes the sandbox of a kernel
launched_process  launches, signals and watches the kernel process
agent_session     starts the agent, or gives the agent of a copied sandbox a new token
kernel_record     what the sandbox's record says about the kernel
"""

from sandbox_kernel.kernels.kernel_record import fingerprint
from sandbox_kernel.kernels.launched_process import Log
from sandbox_kernel.kernels.sandboxed_kernel import UNUSED_LEASE, SandboxedKernel

__all__ = ["UNUSED_LEASE", "Log", "SandboxedKernel", "fingerprint"]
