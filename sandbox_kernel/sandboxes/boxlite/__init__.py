"""BoxLite: sandboxes that are microVMs on this machine, or on a BoxLite server.

client       BoxliteClient: for users; talks to the broker, or to a server
sdk_client   the boxes, through the SDK; runs in the broker
handle       one box, and what is known of it when it has ended
sdk_runtime  the SDK itself: boxes, their processes, its errors in our words
image        from a spec's image to BoxLite's options
link         the one way into a box, and the commands that go over it
backend      capabilities and names; imports no SDK

``guest/commands/box.py`` is process 1 of a box.
"""

from sandbox_kernel.sandboxes.boxlite.client import BoxliteClient

__all__ = ["BoxliteClient"]
