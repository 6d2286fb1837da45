"""What a sandbox must be told so that usual programs find their way out through the gateway."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sandbox_kernel.egress import EgressPolicy
from sandbox_kernel.gateway.tls import extra, roots
from sandbox_kernel.gateway.tls.roots import BUNDLE_VARIABLES

if TYPE_CHECKING:
    from sandbox_kernel.gateway.presets import Expansion

PROXY_PORT = 3128
"""In the sandbox, at 127.0.0.1: HTTP and SOCKS."""
IMAGE_BUNDLE = "/tmp/.sandbox-kernel-trust/bundle.pem"  # noqa: S108  (a path in the sandbox)
"""The certificates to trust, in a sandbox with files of its own (``SandboxHandle.trust``)."""
_PROXY = f"http://127.0.0.1:{PROXY_PORT}"
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
    found = {name: os.environ[name] for name in BUNDLE_VARIABLES if name in os.environ}
    found.update(_preset_variables(_presets(policy)))
    hidden = [name for name in BUNDLE_VARIABLES if not found.get(name, "").startswith(_SHOWN)]
    shown = {k: v for k, v in found.items() if k not in hidden}
    return {**shown, **_proxy_variables()}


def egress_variables_for_image(policy: EgressPolicy, *, reads: bool = False) -> dict[str, str]:
    """The same for a sandbox with files of its own, which knows none of the host's bundles. Where
    requests must be read for it (``reads``, or for a rule), there will be one at IMAGE_BUNDLE."""
    if not policy:
        return {}
    presets = _presets(policy)
    found = {k: v for k, v in _preset_variables(presets).items() if k not in BUNDLE_VARIABLES}
    if any(rule.host == "@pip" for rule in policy.all_rules):
        found.update(_OWN_SYSTEM)
    reads = (reads or policy.counts_requests or bool(presets.logins)) and may_end_tls(policy)
    trust = _trust_variables(IMAGE_BUNDLE) if reads else {}
    return {**found, **trust, **_proxy_variables()}


def may_end_tls(policy: EgressPolicy) -> bool:
    """Whether TLS may be ended for a sandbox with these rules, or for others that it gets later: it
    needs certificates of its own to trust."""
    return bool(policy) and extra.installed()


def with_bundle(policy: EgressPolicy, bundle: str) -> tuple[dict[str, str], bytes]:
    """As ``egress_variables``, for a sandbox that has a bundle of its own at this path; and what
    this machine trusts, to write there."""
    preset = _preset_variables(_presets(policy))
    return {**preset, **_trust_variables(bundle), **_proxy_variables()}, roots.for_sandbox(preset)


def trust_script(system: Sequence[str], bundle: str) -> str:
    """Shell that writes a bundle of the image's own certificates and what comes on stdin; also over
    the system's bundle, where it may."""
    folder = os.path.dirname(bundle)
    roots_file, new = f"{folder}/roots.pem", f"{folder}/new.pem"
    return f"""set -e
umask 022
mkdir -p {folder}
cat > {new}
system=
for file in {" ".join(system)}; do
    if [ -s "$file" ]; then system="$file"; break; fi
done
[ -e {roots_file} ] || {{ [ -z "$system" ] || cat "$system"; }} > {roots_file}
{{ cat {roots_file}; echo; cat {new}; }} > {bundle}
if [ -n "$system" ] && [ -w "$system" ]; then cat {bundle} > "$system" || true; fi
rm {new}
"""


def _trust_variables(bundle: str) -> dict[str, str]:
    return dict.fromkeys(BUNDLE_VARIABLES, bundle)


def _presets(policy: EgressPolicy) -> Expansion:
    from sandbox_kernel.gateway.presets import expand  # lazy: start-up time

    return expand(policy)


def _preset_variables(found: Expansion) -> dict[str, str]:
    from sandbox_kernel.gateway.presets import is_loopback_name  # lazy: start-up time

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
