"""Ways out of a sandbox without a network: each connection becomes a stream to the host, where the
gateway decides about it."""
