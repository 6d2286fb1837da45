"""The lines in which a person reads what the gateway has denied, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sandbox_kernel.jupyter.death_message import visible_log
from sandbox_kernel.kernels import SandboxedKernel
from sandbox_kernel.untrusted_text import printable

if TYPE_CHECKING:  # lazy: start-up time
    from sandbox_kernel.kernels.decision_log import Denial

MOST_LINES = 3
_MOST_LOGGED = 20


def denial_lines(denials: Sequence[Denial], sandbox: str, place: str) -> list[str]:
    """One line for each host, a few in all. ``place`` is where the rules of new sandboxes are. An
    empty ``sandbox``: it ends now, so its own rules need no change."""
    lines = [_line(denial, sandbox, place) for denial in denials[:MOST_LINES]]
    more = len(denials) - len(lines)
    if more > 0:
        hosts = "1 more host" if more == 1 else f"{more} more hosts"
        which = " ".join(filter(None, (sandbox, "--denied")))
        lines.append(f"egress denied: {hosts}; see `sandbox-kernel audit {which}`.")
    return [printable(line) for line in lines]


def _line(denial: Denial, sandbox: str, place: str) -> str:
    times = f", {denial.count} times" if denial.count > 1 and denial.port else ""
    said = f"egress denied: {denial.target} ({denial.why}{times})."
    if not denial.by_a_rule:
        return said
    if not sandbox:
        return f"{said} To allow it: {place} {denial.word}"
    # A rule without a port opens two for programs that dial by name, and theirs is not known yet.
    other = "" if denial.port else f" (for a port other than 80 and 443: +{denial.word}:PORT)"
    command = denial.command(sandbox)
    return f"{said} To allow it: `{command}`{other}; for new sandboxes: egress in {place}."


def log_denials(kernel: SandboxedKernel, place: str) -> None:
    """For clients without our server extension: the log says what is denied, each host once."""
    if kernel.way_out is None:
        return
    told: set[str] = set()

    def tell(denial: Denial) -> None:
        if denial.host not in told and len(told) < _MOST_LOGGED:
            told.add(denial.host)
            [line] = denial_lines([denial], kernel.handle.name, place)
            visible_log(kernel.log).warning("%s", line)

    kernel.way_out.decisions.on_denied = tell
