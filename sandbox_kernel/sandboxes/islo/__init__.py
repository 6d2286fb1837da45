"""Hosted sandboxes at Islo, through its SDK: pausing, and rules for what may get out.

client            IsloClient: making, finding and removing sandboxes
handle            one sandbox: commands, pausing, stopping, resuming
stream            the streams of a command, from the exec stream; pushes write to them
plan              a spec, with its ``options``, as Islo's fields
gateway_profiles  our egress rules as gateway profiles: made, checked and deleted
api               the SDK: tokens, retries, errors as ours
"""

from sandbox_kernel.sandboxes.islo.client import IsloClient

__all__ = ["IsloClient"]
