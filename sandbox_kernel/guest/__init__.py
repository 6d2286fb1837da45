"""All that runs inside the sandbox. Standard library only, Python 3.9+, relative imports only.

wire/       the protocol, as state machines without I/O (both sides use it)
loop        a small event loop with the part of asyncio's interface that is needed here
fdlink      a link over file descriptors (both sides)
peer        session + multiplexer + link: one side of a running connection (both sides)
pump        a stream of the multiplexer <-> a local socket (both sides)
control     control calls from the host
kernel      the kernel process
warmstart   keeps an interpreter with ipykernel imported, to fork kernels from (warmprocess
            starts it, warm/ is its inside)
agent       the daemon in the sandbox: owns the kernel and the session
connector   the command that the host runs to reach the agent; it only passes its stdio on
jailinit    PID 1 of the local jail
jailspawn   how it starts processes
landlock    a second wall behind the jail's mounts
jailwatch   its watch over memory, processes and disk where nothing better holds them
jailview    the /proc/meminfo that the jail sees
jaildisk    counts what the jail's folders hold, for that watch
"""
