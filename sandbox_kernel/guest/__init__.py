"""Everything that runs only inside the sandbox. Standard library, Python 3.9, relative imports.

loop            a small event loop with the part of asyncio's interface that ``wire/`` needs
agent           the daemon in the sandbox: owns the kernel and the session; it consists of
agent_socket    connectors and their HELLO,
sessions        the token and the present session,
targets         what the session's streams lead to, and
control_calls   what the host can ask for (control_server speaks the protocol)
connector       the command that the host runs to reach the agent; it only passes its stdio on
rekey           gives a copied agent a token of its own
kernel_process  the kernel process
listeners       clients that must hear a new kernel from its first message
recorder        keeps the kernel's latest output
warm_start      keeps an interpreter with ipykernel imported, to fork kernels from (warm_process
                starts it, warm/ runs in it)
landlock        a second wall behind the jail's mounts
commands/       runs commands, as process 1 of a jail or a box and where a provider has no stdin
copy_stream     files as one stream
tool_command    one command of an agent framework, and
tool_files      one of its reads and writes
workspace/      the sandbox's half of persist and hydrate
jail/           what only the local jail needs
"""
