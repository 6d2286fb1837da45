"""The host half of the wire.

background  the one event loop, in its own thread, on which everything below lives
program     the guest program, packed to be sent into a sandbox
clock       goes on while the machine sleeps
links       one stream to the agent: a socket, or a provider's exec stream
tunnel      the session over links that come and go
control     control calls to the agent
endpoints   local sockets whose connections become streams
"""
