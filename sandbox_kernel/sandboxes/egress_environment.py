"""What a sandbox must be told so that usual programs find their way out through the gateway."""

from __future__ import annotations

import os

from sandbox_kernel.egress import EgressPolicy

PROXY_PORT = 3128
"""In the sandbox, at 127.0.0.1: HTTP and SOCKS."""
_PROXY = f"http://127.0.0.1:{PROXY_PORT}"
_BUNDLES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "PIP_CERT"),
)
"""Variables that name a file with certificates to trust."""
_SHOWN = ("/etc/ssl/certs/", "/etc/pki/", "/etc/ca-certificates/", "/usr/")
"""Where the system has such files, which a local jail sees, too."""
_OWN_SYSTEM = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
"""For pip in an image: it may install beside the packages of Debian and others (PEP 668), since
nobody but the kernel uses that system."""


def egress_variables(policy: EgressPolicy) -> dict[str, str]:
    """The environment of a local sandbox with these rules; empty without. May start a process: call
    it in a thread. SpecError if a preset cannot be resolved."""
    if not policy:
        return {}
    found = {name: os.environ[name] for name in _BUNDLES if name in os.environ}
    found.update(_preset_variables(policy))
    hidden = [name for name in _BUNDLES if not found.get(name, "").startswith(_SHOWN)]
    return {**{k: v for k, v in found.items() if k not in hidden}, **_proxy_variables()}


def egress_variables_for_image(policy: EgressPolicy) -> dict[str, str]:
    """The same for a sandbox with files of its own, which knows none of the host's bundles."""
    if not policy:
        return {}
    found = {k: v for k, v in _preset_variables(policy).items() if k not in _BUNDLES}
    if any(rule.host == "@pip" for rule in policy.all_rules):
        found.update(_OWN_SYSTEM)
    return {**found, **_proxy_variables()}


def _preset_variables(policy: EgressPolicy) -> dict[str, str]:
    if not any(rule.is_preset for rule in policy.all_rules):
        return {}
    from sandbox_kernel.gateway.presets import expand, is_loopback_name  # lazy: start-up time

    found = expand(policy)
    env = dict(found.env)
    if any(is_loopback_name(name.partition(":")[0]) for name in found.private_names):
        # NO_PROXY names the sandbox's own localhost, and this is the host's.
        env["PIP_PROXY"] = _PROXY
    return env


def _proxy_variables() -> dict[str, str]:
    """For programs that look for a proxy in their environment, in either case. The others ask for
    the name, and the sandbox's own resolver answers."""
    # Not socks5h for ALL_PROXY: httpx refuses to work with it unless an extra is installed.
    found = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _PROXY)
    found["NO_PROXY"] = "localhost,127.0.0.1,::1"
    return {**found, **{name.lower(): value for name, value in found.items()}}
