"""The Jupyter Server extension ``sandbox_kernel``; docs/server.md tells what it does.

app         the extension: settings, and what happens when the server starts and stops
claims      which server a kernel belongs to, and whether that server still lives
kept        what is on disk about a server's kernels
adoption    kernels of a server that is gone come back under the same ids
replay      output that was made while there was no server
websocket   the connection to a browser, which sends that output first
voice       what the server itself says in a notebook
hints       what a cell misses and what lies beside the notebook
starting    errors of a start, and no kernel outside of a sandbox
culling     idle kernels are paused, where the backend can
saving      a notebook's save saves the kernel's files
farewell    which kernels end with the server, and which wait for the next one
handlers    REST: what was adopted, and what was not
"""
