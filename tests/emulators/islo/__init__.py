"""Islo, emulated for the unmodified ``islo`` SDK (written against 0.3.20).

state      sandboxes, commands and gateway profiles, with their states and timers
compute    the compute plane (``ISLO_COMPUTE_URL``): sandboxes, exec, exec streams, files
control    the control plane (``ISLO_BASE_URL``): tokens and gateway profiles
multipart  reads the uploads

Followed is the SDK's own source, which is generated from the service's OpenAPI document; the path
behind each route names the method. What it does not say is marked "assumed".

Not emulated: images other than their names, sizes (but for the disk), snapshots, sessions, shares,
environments, and name servers in the network of a sandbox (``outside.py`` has the rest of it, and
``state.decide`` says what a profile lets out).
"""
