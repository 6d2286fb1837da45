"""A broker: one process a user that owns a backend, for all processes that use it.

For SDKs that let only one process use their state at a time. The broker is started by whoever
needs it first and ends when nobody has been connected for a while; sandboxes do not depend on it.

protocol   messages with descriptors over a Unix socket
server     the broker: serves any SandboxClient
process    the broker as a process: its lock, its log, its end
launch     finding the broker, and starting it
client     a SandboxClient whose sandboxes are the broker's
"""
