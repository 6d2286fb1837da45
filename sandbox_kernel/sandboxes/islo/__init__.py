"""Hosted sandboxes at Islo, through its SDK: pausing, and rules for what may get out.

client     IsloClient: making, finding and removing sandboxes
handle     one sandbox: commands, pausing, stopping, resuming
stream     the streams of a command; sse reads the exec stream, pushes write to it
relay      what runs inside: it gives a command stdin, signals and an exact end
gateway    gateway profiles: our egress rules translated, made and deleted
options    what a spec's ``options`` may say
api        the SDK: tokens, what is tried again, errors as ours
"""

from sandbox_kernel.sandboxes.islo.client import IsloClient

__all__ = ["IsloClient"]
