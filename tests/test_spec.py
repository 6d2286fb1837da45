"""SandboxSpec: reading a request, and refusing nonsense with a message that helps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox_kernel.errors import SpecError, SpecRefused
from sandbox_kernel.sandboxes.capabilities import Capabilities
from sandbox_kernel.settings import settings_of, values_from_environment
from sandbox_kernel.spec import SandboxSpec


def test_a_spec_needs_nothing() -> None:
    """Two specs without a name get different ones."""
    assert SandboxSpec().name != SandboxSpec().name


def test_round_trip_through_json_types() -> None:
    """What a kernelspec stores is read back as it was."""
    spec = SandboxSpec(name="a", memory_mib=128, env={"A": "1"}, readable=("/opt",), cpus=0.5)
    assert SandboxSpec.from_mapping(spec.to_dict()) == spec
    assert spec.to_dict().keys() == {"name", "memory_mib", "env", "readable", "cpus"}


def test_strings_are_read_as_their_field_means_them() -> None:
    """From the environment and the command line everything comes as a string."""
    spec = SandboxSpec(
        **values_from_environment(
            settings_of(SandboxSpec),
            {
                "SANDBOX_KERNEL_MEMORY_MIB": "256",
                "SANDBOX_KERNEL_CPUS": "1.5",
                "SANDBOX_KERNEL_ENV": "A=1,B=x=y",
                "SANDBOX_KERNEL_READABLE": "/opt, /srv",
                "SANDBOX_KERNEL_LABELS": '{"team": "a"}',
                "SANDBOX_KERNEL_IMAGE": "",
                "OTHER": "x",
            },
        )
    )
    assert (spec.memory_mib, spec.cpus, spec.image) == (256, 1.5, None)
    assert (spec.env, spec.labels) == ({"A": "1", "B": "x=y"}, {"team": "a"})
    assert spec.readable == ("/opt", "/srv")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"memory_mb": 1}, "unknown key 'memory_mb'. Did you mean 'memory_mib'"),
        ({"zzz": 1}, "unknown key 'zzz'. Known: "),
        ({"memory_mib": "much"}, "memory_mib takes a whole number, not 'much'"),
        ({"memory_mib": 1.5}, "memory_mib takes a whole number"),
        ({"memory_mib": True}, "memory_mib takes a whole number"),
        ({"memory_mib": 127}, "at least 128 to run a kernel, not 127"),
        ({"cpus": -1}, "cpus must be more than 0"),
        ({"cpus": "nan"}, "cpus must be more than 0"),
        ({"name": "Upper"}, "A sandbox name has"),
        ({"name": "../up"}, "A sandbox name has"),
        ({"volume": "a/b"}, "A volume name has"),
        ({"env": "A"}, "env takes NAME=VALUE"),
        ({"env": "{"}, "env is not valid JSON"),
        ({"env": {"A": 1}}, "env takes names and string values"),
        ({"env": {"A B": "1"}}, "not an environment variable"),
        ({"env": {"A": "x" * 100_000}}, "env holds more than"),
        ({"egress": 5}, "egress takes a list of hosts and rules"),
        ({"readable": ["opt"]}, "readable takes absolute paths"),
        ({"python": "python3"}, "python takes an absolute path"),
        ({"image": 5}, "image takes a string"),
        ({"options": "{"}, "options is not valid JSON"),
        ({"options": "5"}, "options takes an object"),
    ],
)
def test_nonsense_is_refused(values: dict[str, object], message: str) -> None:
    """Each error names the key and what it takes."""
    with pytest.raises(SpecError, match=message):
        SandboxSpec.from_mapping(values)


def test_a_volume_by_its_former_name() -> None:
    """Records on disk, and programs, that call a volume a workspace mean the same as before."""
    expected = SandboxSpec(name="a", volume="mine")
    assert SandboxSpec(name="a", workspace="mine") == expected
    assert SandboxSpec.from_mapping({"name": "a", "workspace": "mine"}) == expected
    assert replace(expected, cpus=1).volume == "mine"
    assert "workspace" not in expected.to_dict()


def test_what_a_backend_cannot_enforce_is_refused_by_name() -> None:
    """No silent downgrade: the error names the field, the backend and a way out."""
    backend = Capabilities(memory_mib=True, notes={"egress": "Use another backend."})
    backend.check(SandboxSpec(memory_mib=200), "tiny")
    with pytest.raises(SpecRefused, match=r"'tiny' cannot enforce egress=.*Use another backend"):
        backend.check(SandboxSpec.from_mapping({"egress": ["example.org"]}), "tiny")
    with pytest.raises(SpecRefused, match=r"cannot enforce image="):
        backend.check(SandboxSpec(image="debian"), "tiny")
