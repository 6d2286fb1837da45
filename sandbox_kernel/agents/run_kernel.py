"""Which kernel a notebook is run with, and whether that speaks the notebook's language.

A notebook may come from anywhere, so it does not choose: another kernel of ours may grant more. It
runs with the default kernel of the backend, or with the one that the caller names.
"""

from __future__ import annotations

from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from sandbox_kernel.agents.prepared_notebook import PreparedNotebook
from sandbox_kernel.errors import SpecError
from sandbox_kernel.jupyter.kernelspec import PROVISIONER

PYTHON = "python"


def language_of(kernel: str) -> str:
    """The language of a kernel of ours. SpecError if it is none, or does not exist. Blocks."""
    try:
        spec = KernelSpecManager().get_kernel_spec(kernel)
    except NoSuchKernel:
        raise SpecError(
            f"Jupyter has no kernel {kernel!r}. `sandbox-kernel install local` makes one; "
            f"`jupyter kernelspec list` names those that there are."
        ) from None
    provisioner = spec.metadata.get("kernel_provisioner", {})
    if provisioner.get("provisioner_name") != PROVISIONER:
        raise SpecError(
            f"The kernel {kernel!r} does not run in a sandbox. Name one that `sandbox-kernel "
            f"install` has made (`sandbox-kernel list`)."
        )
    return str(spec.language) or PYTHON


def check_language(notebook: PreparedNotebook) -> None:
    """SpecError if the notebook's language is not that of the default kernel, Python."""
    if not notebook.language.lower().startswith((PYTHON, "ipython")):
        raise SpecError(
            f"{notebook.path.name} was not run: its language is {notebook.language!r}, and the "
            f"default kernel runs Python. Install a kernel of that language into a sandbox "
            f"(`sandbox-kernel install --help`), and name it with --kernel."
        )
