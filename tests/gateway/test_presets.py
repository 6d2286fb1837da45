"""@pip, @npm and @conda: read from what the host is set up for, without its credentials."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from sandbox_kernel.egress import EgressPolicy, EgressRule
from sandbox_kernel.errors import SpecError
from sandbox_kernel.gateway import conda_channels, npm_registry, pip_index
from sandbox_kernel.gateway.index_logins import Login
from sandbox_kernel.gateway.names import Target
from sandbox_kernel.gateway.pip_index import PipSettings, source_of
from sandbox_kernel.gateway.presets import expand, without_credentials

INDEX, FILES = "https://index.example/simple", "files.example"
INDEXES = ((INDEX, FILES), ("https://test.example/simple", "test-files.example"))


def pip(**options: str) -> PipSettings:
    return PipSettings({key.replace("_", "-"): value for key, value in options.items()}, INDEXES)


def hosts(settings: PipSettings) -> list[str]:
    return sorted(str(target) for target in source_of(settings).targets)


def test_the_default_index_has_its_files_elsewhere() -> None:
    source = source_of(pip())
    assert hosts(pip()) == ["files.example:443", "index.example:443"]
    assert source.env == {}
    assert source.private_names == {"files.example", "index.example"}, "a mirror may be anywhere"
    assert hosts(pip(index_url="https://test.example/simple/")) == [
        "test-files.example:443",
        "test.example:443",
    ]


def test_a_companys_index() -> None:
    settings = pip(
        index_url="https://me:p%40ss@pip.corp.example:8443/simple",
        extra_index_url=f"{INDEX}\nfile:///opt/wheels http://10.1.2.3/simple",
        find_links="/opt/wheels https://links.example/x.html",
        trusted_host="10.1.2.3 other.example",
    )
    source = source_of(settings)
    assert hosts(settings) == [
        *("10.1.2.3:80", "files.example:443", "index.example:443", "links.example:443"),
        "pip.corp.example:8443",
    ]
    assert source.env == {
        "PIP_INDEX_URL": "https://pip.corp.example:8443/simple",
        "PIP_EXTRA_INDEX_URL": f"{INDEX} http://10.1.2.3/simple",
        "PIP_FIND_LINKS": "https://links.example/x.html",
        "PIP_TRUSTED_HOST": "10.1.2.3",
    }
    assert source.logins == {Target("pip.corp.example", 8443): Login("me", "p@ss")}
    assert "p@ss" not in repr(source.logins)
    named = {"pip.corp.example", "links.example"}
    assert source.private_names == {*named, "files.example", "index.example"}
    assert "p%40ss" not in str(source.env)


def test_an_index_on_this_machine_is_trusted_by_its_port() -> None:
    source = source_of(pip(index_url="http://localhost:3141/root/simple"))
    assert source.private_names == {"localhost", "localhost:3141"}


def test_no_index() -> None:
    assert hosts(pip(no_index="1", find_links="https://links.example/")) == ["links.example:443"]


def test_presets_become_rules_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip_index, "load_settings", pip)
    rule = {"host": "@pip", "rate_limit_rpm": 9}
    found = expand(EgressPolicy.of("!a.example", rule, "b.example", default="allow"))
    assert found.policy == EgressPolicy(
        (
            EgressRule("a.example", action="deny"),
            EgressRule("files.example", ports=(443,), rate_limit_rpm=9),
            EgressRule("index.example", ports=(443,), rate_limit_rpm=9),
            EgressRule("b.example"),
        ),
        "allow",
    )
    assert expand(found.policy).policy == found.policy


def test_pips_own_configuration_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, its variables, and its own idea of a default; by import and by another Python."""
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nextra-index-url = https://a.example/s\n  https://b.example/s\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://c.example/simple")
    imported = pip_index.load_settings()
    assert imported.options["extra-index-url"].split() == [
        "https://a.example/s",
        "https://b.example/s",
    ]
    assert imported.options["index-url"] == "https://c.example/simple"
    assert imported.indexes[0][0].startswith("https://")
    monkeypatch.setitem(sys.modules, "pip._internal.configuration", None)
    asked = pip_index.load_settings()
    assert asked.options["index-url"] == imported.options["index-url"]
    assert asked.indexes == imported.indexes
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(sys, "_base_executable", None)
    assert source_of(pip_index.load_settings()).env == {"PIP_INDEX_URL": "https://c.example/simple"}
    monkeypatch.delenv("PIP_INDEX_URL")
    with pytest.raises(SpecError, match="no pip on this machine"):
        pip_index.load_settings()


def test_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("NPM_CONFIG_REGISTRY", "npm_config_registry"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(SpecError, match="neither installed nor configured"):
        npm_registry.read()
    (tmp_path / ".npmrc").write_text(
        "registry=https://npm.example/\n//npm.example/:_authToken=x\n@us:registry = http://b.example:81/\n"
    )
    source = npm_registry.read()
    assert sorted(map(str, source.targets)) == ["b.example:81", "npm.example:443"]
    assert source.env == {"NPM_CONFIG_REGISTRY": "https://npm.example/"}
    (tmp_path / ".npmrc").write_text("@us:registry=http://b.example:81/\n")
    source = npm_registry.read()  # all other scopes have the registry that everybody has
    assert sorted(map(str, source.targets)) == ["b.example:81", "registry.npmjs.org:443"]
    assert source.env == {}
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://u:p@c.example/npm/")
    assert npm_registry.read().env == {"NPM_CONFIG_REGISTRY": "https://c.example/npm/"}


def test_conda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CONDARC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(SpecError, match="conda is not installed"):
        conda_channels.read()
    (tmp_path / ".condarc").write_text(
        "channels:\n  - https://conda.example/forge\n  - defaults\n"
        "proxy_servers:\n  http: http://proxy.example:3128\n"
        "channel_alias: https://alias.example/\n# channels: http://no.example\n"
    )
    found = sorted(map(str, conda_channels.read().targets))
    assert found == ["alias.example:443", "conda.example:443"]


@pytest.mark.parametrize(
    ("url", "plain", "login"),
    [
        ("https://a.example/x@y", "https://a.example/x@y", None),
        ("https://u:p@a.example/", "https://a.example/", ("u", "p")),
        ("https://token@a.example:1", "https://a.example:1", ("token", "")),
        ("https://u:p@q@a.example/", "https://a.example/", ("u", "p@q")),
    ],
)
def test_credentials_are_taken_out(url: str, plain: str, login: tuple[str, str] | None) -> None:
    assert without_credentials(url) == (plain, login)
