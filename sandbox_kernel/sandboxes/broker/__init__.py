"""A broker: one process a user that owns a backend, for all processes that use it.

For SDKs that let only one process use their state at a time. The first client starts the broker;
it ends when no client has been connected for a while. Sandboxes do not depend on it.

protocol   the messages
server     the broker: serves any SandboxClient
main       the broker as a process: its lock, its log, its end
startup    finds the broker, or starts it
client     a SandboxClient whose sandboxes are the broker's
"""
