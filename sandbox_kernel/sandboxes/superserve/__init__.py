"""Hosted microVMs of Superserve, through its SDK: pausing, snapshots, egress rules and secrets.

client     SuperserveClient: making, finding and removing sandboxes, and snapshots
handle     one sandbox: commands, files, pausing, its lease
stream     the streams of a command, over the service's websocket
api        the SDK, with its private names that we need; errors
request    a spec as the service's fields: template, network rules, secrets, timeouts, labels
"""

from sandbox_kernel.sandboxes.superserve.client import SuperserveClient

__all__ = ["SuperserveClient"]
