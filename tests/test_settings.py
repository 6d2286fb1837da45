"""Each setting is declared once; what follows from it agrees everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_kernel.errors import SpecError, SpecRefused
from sandbox_kernel.jupyter.configuration import read_configuration
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.sandboxes.capabilities import ENFORCED, Capabilities
from sandbox_kernel.settings import Setting
from sandbox_kernel.spec import SETTINGS, SandboxSpec

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
START, END = "<!-- settings -->\n", "<!-- end of settings -->\n"


def row(setting: Setting) -> str:
    default = "" if callable(setting.default) else setting.default
    shown = "" if default in (None, "", ()) else f"`{str(default).lower()}`"
    where = {"launcher": "`run`, `launch`", "provisioner": "notebooks"}.get(setting.only_for, "")
    help_ = setting.help.replace("|", "\\|")
    return f"| `{setting.name}` | {shown} | {help_} | {where} |\n"


def test_the_page_lists_every_setting() -> None:
    """docs/settings.md has one row for each setting; copy the table from this test's output."""
    heading = "| setting | default | what it does | only for |\n| --- | --- | --- | --- |\n"
    table = heading + "".join(map(row, SETTINGS.values()))
    assert PAGE.read_text().partition(START)[2].partition(END)[0] == table, table


def test_every_setting_is_a_trait() -> None:
    """All but those of launchers, with the same help."""
    traits = SandboxProvisioner.class_traits(config=True)
    for setting in SETTINGS.values():
        if setting.only_for != "launcher":
            assert traits[setting.name].help == setting.help


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_a_variable(name: str) -> None:
    """A variable is read as the value in a kernelspec is."""
    values = {"backend": "islo", "guest_transport": "tcp", "egress": "a.example", "options": "{}"}
    values |= {"python": "/bin/python", "readable": "/opt", "env": "A=1", "labels": "a=b"}
    values |= {"files": "mount-ro", "folder": "/project", "audit": "none"}
    values |= {"notebook_may_widen": "egress", "secrets": "KEY@a.example"}
    booleans = [n for n, s in SETTINGS.items() if isinstance(s.default, bool)]
    value = values.get(name, "yes" if name in booleans else "200")
    variable = {SETTINGS[name].variable: value}
    assert variable.keys() == {f"SANDBOX_KERNEL_{name.upper()}"}
    found = read_configuration(default_name="k", environ=variable)
    assert found == read_configuration({name: value}, default_name="k", environ={})


def test_a_backend_states_which_settings_it_enforces() -> None:
    """Capabilities have an attribute for each setting that a backend may refuse, and no other."""
    assert {"memory_mib", "volume", "egress"} <= set(ENFORCED)
    assert not {"name", "env", "labels", "start_timeout"} & set(ENFORCED)
    some = Capabilities(memory_mib=True, pause=True)
    assert (some.memory_mib, some.cpus, some.pause, some.fork) == (True, False, True, False)
    with pytest.raises(SpecError, match=r"unknown key .memory_mb.\. Did you mean .memory_mib."):
        Capabilities(memory_mb=True)
    with pytest.raises(AttributeError):
        _ = some.nonsense


def test_what_a_backend_cannot_do_for_a_kernel_is_refused() -> None:
    """A setting of the kernel names the capability that it needs."""
    configuration = read_configuration({"idle_pause_seconds": 5}, default_name="k", environ={})
    Capabilities(pause=True).check_kernel(configuration, "tiny")
    with pytest.raises(SpecRefused, match="'tiny' cannot pause a sandbox, so idle_pause_seconds"):
        Capabilities().check_kernel(configuration, "tiny")


def test_volumes_are_not_for_notebooks() -> None:
    """A provisioner's kernel has a saved workspace. A variable that is set for `run` changes
    nothing for it."""
    environ = {"SANDBOX_KERNEL_VOLUME": "v"}
    found = read_configuration(default_name="k", environ=environ, not_for="launcher")
    assert found.spec == SandboxSpec(name="k")
    with pytest.raises(SpecError, match="unknown key 'volume'"):
        read_configuration({"volume": "v"}, default_name="k", environ={}, not_for="launcher")
