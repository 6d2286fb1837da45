"""Commands that the host runs inside a sandbox.

    start        start one, in a session of its own; signals, terminals, logs
    stdio        carry bytes to its stdin and from its outputs, on ``guest/loop.py``
    process_one  process 1 of a sandbox of ours: serves requests, reaps, keeps the lease

The fronts are ``jail/init.py`` (requests on a socket, with descriptors), ``box.py`` (requests on
streams of the wire), ``single.py`` (one command, its streams are the program's own) and
``pushed.py`` (one command whose input arrives as numbered files). ``guest_program.program`` makes
a front with all that it imports into the text of a ``python3 -c``.
"""
