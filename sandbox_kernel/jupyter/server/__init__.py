"""The Jupyter Server extension ``sandbox_kernel``; docs/server.md says what it does.

app                 the extension: settings, start and stop
server_kernels      the kernels of the server: on disk, their output, their notebooks
kernel_events       what happens when a kernel starts, dies or ends
kernel_start        readable errors, and no kernel outside of a sandbox
adoption            kernels of a dead server come back under the same ids; REST: which did
saved_kernels       what is on disk about servers and their kernels, and who of them lives
missed_output       output that no client has received
websocket           the connection to a browser, which sends that output first
notices             what the server itself says in a notebook
used_kernels        which kernels somebody has used
culling             idle kernels are paused, where the backend can
save_hooks          a notebook's save saves the kernel's files
shutdown            which kernels end with the server, and which wait for the next one
"""
