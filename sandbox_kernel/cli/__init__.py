"""The command ``sandbox-kernel``.

parser        the options of all commands, and what they have in common
commands/     one module a command: ``add`` describes it, ``run`` does it
foreground    coroutines on the background loop, for a main thread that gets signals
streams       a command's streams to ours; terminals
find          sandboxes by name, in all backends
text          tables, ages, text that is safe to print

Exit codes: 0 worked, 1 our error (one line on stderr), 2 wrong usage, 128+N ended by signal N
(130 for Ctrl-C). ``exec``, ``shell``, ``run`` and ``launch`` give the code of what they ran.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from sandbox_kernel.cli.foreground import Interrupted
from sandbox_kernel.cli.parser import parse
from sandbox_kernel.cli.text import note
from sandbox_kernel.errors import SandboxError, SpecError, SpecRefused
from sandbox_kernel.jupyter.configuration import unknown_variables
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.sandboxes.left import all_left, in_words

PROGRAM = "sandbox-kernel"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives its exit code. Raises SystemExit(2) for wrong usage."""
    arguments = parse(sys.argv[1:] if argv is None else list(argv))
    logging.basicConfig(
        level=logging.DEBUG if arguments.debug else logging.WARNING,
        format=f"{PROGRAM}: %(message)s",
    )
    if not arguments.reads_settings:  # those that do refuse it
        for problem in unknown_variables(os.environ):
            note(problem)
    try:
        if arguments.tells_left:
            waiting = len(all_left(backend_names()))
            if waiting:
                note(in_words(waiting))
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except Interrupted as interrupted:
        if interrupted.at_once:
            # The user has asked twice: no clean-up at exit either.
            os._exit(interrupted.exit_code)
        # All is cleaned up. Another Ctrl-C has nothing left to end but would make a mess of it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output has gone, as in `... | head`. That is no error, but there is
        # nobody left to write to, also not for the interpreter when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except (SandboxError, OSError) as error:
        if arguments.debug:
            raise
        print(f"{PROGRAM}: {_one_line(error)}", file=sys.stderr)
        # A wrong value is wrong usage, whoever finds it out; what a backend cannot do is not.
        wrong = isinstance(error, SpecError) and not isinstance(error, SpecRefused)
        return 2 if wrong else 1
    return code


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
