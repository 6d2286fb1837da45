"""What a cell says at its end of hosts that it could not reach."""

from __future__ import annotations

from sandbox_kernel.jupyter import network_hints
from sandbox_kernel.jupyter.configuration import place_of
from sandbox_kernel.jupyter.denial_lines import denial_lines
from sandbox_kernel.jupyter.envelopes import Envelope
from sandbox_kernel.jupyter.provisioner import SandboxProvisioner
from sandbox_kernel.jupyter.server.kernel_start import in_lines
from sandbox_kernel.settings import ENV_PREFIX

_HEARD = ("stream", "error")


class CellLines:
    """For one kernel. Hears the output of its cells on the way to a client."""

    def __init__(self) -> None:
        self._no_network = ""
        self._said = False
        """The output itself says that there is no network."""

    def hear(self, provisioner: SandboxProvisioner, envelope: Envelope) -> None:
        """A message of a cell's output. What it says itself is not said again."""
        kernel = provisioner.kernel
        if kernel is None or envelope.kind not in _HEARD:
            return
        if kernel.way_out is not None:
            self._find_shown(provisioner, envelope.content_part)
        elif not kernel.handle.spec.egress:
            self._look_for_a_missing_network(kernel.handle.backend, envelope)

    def _look_for_a_missing_network(self, backend: str, envelope: Envelope) -> None:
        if network_hints.SAID_BY_PIP in envelope.content_part:
            self._said = True
        elif network_hints.may_concern(envelope.content_part):
            text = network_hints.text_of(envelope.content())
            variable = f"{ENV_PREFIX}EGRESS"
            found = network_hints.hint(text, backend, variable)
            # A later message may name the host, or that pip looks for a package.
            if found and (not self._no_network or " a host: " in self._no_network):
                self._no_network = found

    @staticmethod
    def _find_shown(provisioner: SandboxProvisioner, content: bytes) -> None:
        assert provisioner.kernel is not None
        assert provisioner.kernel.way_out is not None
        decisions = provisioner.kernel.way_out.decisions
        if decisions.has_unseen and b"egress denied: " in content:
            hosts = [denial.host for denial in decisions.unseen]
            decisions.seen(h for h in hosts if f"egress denied: {h}".encode() in content)

    def at_end(self, provisioner: SandboxProvisioner) -> str:
        """What to say now that a cell ends; empty if nothing was denied."""
        kernel, lines = provisioner.kernel, []
        if self._no_network and not self._said:
            lines.append(self._no_network)
        self._no_network, self._said = "", False
        if kernel is not None and kernel.way_out is not None:
            decisions = kernel.way_out.decisions
            if denials := decisions.unseen:
                decisions.seen(denial.host for denial in denials)
                place = place_of("egress", provisioner)
                lines += denial_lines(denials, kernel.handle.name, place)
        return "\n".join(map(in_lines, lines))
