"""BoxLite: sandboxes that are microVMs on this machine, or on a BoxLite server.

client       BoxliteClient: what users have; talks to the broker, or to a server
direct       the boxes, through the SDK; runs in the broker
handle       one box
sizes        what a VM is made of
runtime      the SDK itself: boxes, their processes, errors in our words
image        from a spec's image to what BoxLite makes a box of
link         the one way into a box, and the commands that go over it
supervisor   runs in the box: its process 1
relay        runs in the box: hands the SDK's streams to the supervisor
notes        what is kept about a box that has ended
facts        capabilities and names; imports no SDK
"""

from sandbox_kernel.sandboxes.boxlite.client import BoxliteClient

__all__ = ["BoxliteClient"]
