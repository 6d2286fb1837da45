"""The Jupyter Server extension ``sandbox_kernel``; docs/server.md tells what it does.

app         the extension: settings, and what happens when the server starts and stops
claims      which server a kernel belongs to, and whether that server still lives
kept        what is on disk about a server's kernels
adoption    kernels of a server that is gone come back under the same ids
replay      output that was made while there was no server
websocket   the connection to a browser, which sends that output first
culling     idle kernels are paused, where the backend can
saving      a notebook's save saves the kernel's files
handlers    REST: what was adopted, and what was not
"""
