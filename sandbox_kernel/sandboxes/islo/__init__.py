"""Hosted sandboxes at Islo, through its SDK: pausing, and rules for what may get out.

client            IsloClient: making, finding and removing sandboxes
handle            one sandbox: commands, pausing, stopping, resuming
stream            the streams of a command; sse reads the exec stream, pushes write to it
relay             runs inside: gives a command stdin, signals and an exact end
relay_calls       runs the relay to its end by POST, and asks for the result
plan              a spec as Islo's fields
gateway_profiles  our egress rules as gateway profiles: made, checked and deleted
options           the keys of a spec's ``options``
api               the SDK: tokens, retries, errors as ours
"""

from sandbox_kernel.sandboxes.islo.client import IsloClient

__all__ = ["IsloClient"]
