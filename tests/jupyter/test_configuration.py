"""Settings of a kernel, from the kernelspec, the configuration and the environment."""

from __future__ import annotations

import pytest

from sandbox_kernel.errors import SpecError
from sandbox_kernel.jupyter.configuration import read_configuration


def test_layers_of_settings() -> None:
    """The kernelspec is the weakest, then configuration, then the environment."""
    found = read_configuration(
        {"memory_mib": 150, "cpus": 1, "processes": 50},
        {"memory_mib": 200, "cpus": 2},
        default_name="kernel-x",
        environ={"SANDBOX_KERNEL_MEMORY_MIB": "300", "SANDBOX_KERNEL_WARM_START": "no"},
    )
    assert (found.spec.memory_mib, found.spec.cpus, found.spec.processes) == (300, 2, 50)
    assert (found.spec.name, found.named, found.warm_start) == ("kernel-x", False, False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"memory": 1}, "Did you mean 'memory_mib'"),
        ({"guest_transport": "udp"}, "guest_transport is 'ipc' or 'tcp'"),
        ({"keep_on_exit": "perhaps"}, "keep_on_exit is true or false"),
        ({"pool_size": -1}, "pool_size must be at least 0, not -1"),
        ({"pool_size": "many"}, "pool_size takes a whole number"),
    ],
)
def test_nonsense_is_refused(values: dict[str, object], message: str) -> None:
    """Each error names the key and says what it takes."""
    with pytest.raises(SpecError, match=message):
        read_configuration(values, default_name="k", environ={})
