"""HTTP/2 inside TLS that is ended: each request of a connection is decided on its own.

heads     what a request, a response or trailers say, read strictly; no I/O
budget    bounds what is kept for all connections of one gateway
floods    bounds what a peer may send that costs it nothing
peer      one side's connection: frames to streams, and back
exchange  one request and its response
session   a client's connection, and those to its server
"""
