"""Superserve, emulated for the unmodified ``superserve`` SDK (written against 0.11.4).

state      sandboxes and snapshots with their states and timers
control    the control plane: what ``SUPERSERVE_BASE_URL`` answers
data       the data plane: exec over a websocket, and files, under the service's own names

Followed are the SDK's source, the service's published OpenAPI document and its public docs pages
(lifecycle, networking, command sessions, create). What none of them says is marked "assumed".

Not emulated: memory in snapshots (a sandbox made from one has the files, and no process), templates
other than their names, name servers in the network of a sandbox and changes of its rules (for the
rest of it see ``outside.py``), preview ports, desktops, and ``/exec`` and ``/exec/stream``, which
sandbox-kernel does not use.
"""
