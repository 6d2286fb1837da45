"""Finding a backend by name: entry points in the group ``sandbox_kernel.backends``, which name
SandboxClient classes. Any distribution may have some."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from sandbox_kernel.errors import SandboxUnavailable, SpecError
from sandbox_kernel.sandboxes.base import SandboxClient
from sandbox_kernel.suggestions import did_you_mean

GROUP = "sandbox_kernel.backends"


def _found() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def backend_names() -> list[str]:
    """Names of all known backends, whether or not they can be used here."""
    return sorted(_found())


def no_backend(name: str) -> SpecError:
    """The error for a name that no backend has."""
    return SpecError(
        f"There is no sandbox backend {name!r}. {did_you_mean(name, backend_names())} "
        f"`sandbox-kernel doctor` says which of them can be used here."
    )


def load_backend(name: str) -> SandboxClient:
    """A client of the named backend. SpecError if there is none, SandboxUnavailable if its SDK is
    missing."""
    entry = _found().get(name)
    if entry is None:
        raise no_backend(name)
    try:
        client = entry.load()
    except ImportError as error:
        raise SandboxUnavailable(
            f"The backend {name!r} needs its SDK: pip install 'sandbox-kernel[{name}]' ({error})."
        ) from error
    made = client()
    if not isinstance(made, SandboxClient):
        raise SpecError(f"The entry point {entry.value!r} of backend {name!r} is no SandboxClient.")
    return made
