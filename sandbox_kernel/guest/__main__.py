"""Entry point of the guest program: ``agent DIR LEASE [KERNEL...]``, ``connect DIR CODEC`` or
``rekey DIR``."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command == "agent" and len(rest) >= 2:
        # First what takes longest: the kernel's imports go on while the agent starts.
        from .warm_process import WarmProcess, kernel_command

        warm = WarmProcess.start(kernel_command(rest[2:], rest[0]))
        from .agent import main as agent

        agent(rest[0], float(rest[1]), warm)
        return 0
    if command == "connect" and len(rest) == 2:
        from .connector import main as connect

        return connect(rest[0], rest[1])
    if command == "rekey" and len(rest) == 1:
        from .rekey import main as rekey

        return rekey(rest[0])
    print("usage: agent DIR LEASE [KERNEL...] | connect DIR CODEC | rekey DIR", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
