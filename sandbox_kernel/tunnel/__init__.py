"""The host half of the wire.

background      the event loop, in its own thread, on which everything below lives
clock           a clock that goes on while the machine sleeps
links           one stream to the agent: a socket, or a provider's exec stream
tunnel          the session over links that come and go
control_client  control calls to the agent
endpoints       local sockets whose connections become streams
download        all bytes of one stream
"""
