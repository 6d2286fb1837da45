"""Makes a small Debian (or Ubuntu) with Python, with mmdebstrap or debootstrap."""

from __future__ import annotations

import io
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandbox_kernel.errors import SandboxError, SandboxUnavailable
from sandbox_kernel.host_programs import find_program, host_environment, run_program
from sandbox_kernel.images.layers import Entry, fixed_time
from sandbox_kernel.images.wheels import Note

INCLUDED = ("python3", "ca-certificates")
_TIMEOUT = 1800.0
_QUIET = {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
_SUITE = re.compile(r"[a-z][a-z0-9.-]{1,40}")
# Traces of the build machine, files that change daily, and documentation. Copyright files stay.
_LEFT_OUT = re.compile(
    r"(debootstrap|var/cache/apt|var/lib/apt/lists|var/log|usr/share/(man|info|locale|lintian))/.+"
    r"|var/cache/ldconfig/aux-cache|var/lib/dpkg/.*-old|etc/[^/]+-"
    r"|etc/(hostname|resolv\.conf|machine-id|\.pwd\.lock)"
    r"|usr/share/doc/[^/]+/(?!copyright$).+"
)


def make_debian(folder: Path, note: Note) -> Path:
    """A root file system as an archive or folder. SandboxUnavailable if there is no tool for it."""
    maker, (mirror, suite) = _maker(), _source()
    root = folder / ("debian.tar" if maker == "mmdebstrap" else "debian")
    note(f"Making {suite} with {' and '.join(INCLUDED)} by {maker}: a minute or two ...")
    if maker == "mmdebstrap":
        command = [maker, "--quiet", "--mode=unshare", "--variant=minbase", "--format=tar"]
        command += [f"--include={','.join(INCLUDED)}", suite, str(root), mirror]
    else:
        # Namespaces of its own: an interrupted run leaves no mount and no process.
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", maker]
        command += ["--variant=minbase", "--force-check-gpg", f"--include={','.join(INCLUDED)}"]
        command += [suite, str(root), mirror]
    with (folder / "debian.log").open("w+b") as log:
        try:
            ran = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=_TIMEOUT,
                env={**host_environment(), **_QUIET},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SandboxError(f"{maker} did not end within {_TIMEOUT:g} s.") from None
        if ran.returncode:
            log.seek(max(0, log.tell() - 1500))
            said = log.read().decode(errors="replace").strip()
            raise SandboxError(
                f"{maker} failed (exit code {ran.returncode}). Can {mirror} be reached? "
                f"It said last: {said}"
            )
    return root


def tidied(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The files of such a system without those that are large or make two builds differ."""
    for entry, content in entries:
        if _LEFT_OUT.fullmatch(entry.name):
            continue
        if entry.name == "etc/shadow" and content is not None:
            # It contains the day on which each password was set.
            day = str(fixed_time() // 86400).encode()
            text = re.sub(rb"(?m)^([^:\n]*:[^:\n]*:)\d+", rb"\g<1>" + day, content.read())
            entry.size = len(text)
            content = io.BytesIO(text)
        yield entry, content


def _maker() -> str:
    if find_program("mmdebstrap"):
        return "mmdebstrap"
    if find_program("debootstrap") and os.geteuid() == 0:
        return "debootstrap"
    raise SandboxUnavailable(
        "An image --from debian needs mmdebstrap (as any user) or debootstrap (as root only). "
        "Install one, for example by `sudo apt install mmdebstrap`, or give a root file system "
        "or an OCI image to --from."
    )


def _source() -> tuple[str, str]:
    """Mirror and suite of this system."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"]
    try:
        ran = run_program([*command, "Created-By: Packages"], 60)
        ran.check_returncode()
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(
            f"An image --from debian uses apt's package sources, and apt-get failed ({error}). "
            f"Give a root file system or an OCI image to --from."
        ) from None
    for line in ran.stdout.splitlines():
        mirror, suite, component = [*line.split(), "", "", ""][:3]
        extra = suite.endswith(("-updates", "-security", "-backports")) or "/" in suite
        known = mirror.startswith(("http://", "https://", "file:/"))
        if component == "main" and known and not extra and _SUITE.fullmatch(suite):
            return mirror, suite
    raise SandboxUnavailable(
        "apt has no usable source here for an image --from debian. Check /etc/apt, or give a "
        "root file system or an OCI image to --from."
    )
