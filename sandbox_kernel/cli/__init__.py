"""The command ``sandbox-kernel``.

parser          all commands, and the command behind ``--``
options         what commands have in common: help, options, settings
commands/       ``add`` declares a command; the function that does it has its help
foreground      runs coroutines on the background loop while the main thread gets signals
streams         connects a command's streams with ours; terminals
find_sandboxes  sandboxes by name, in all backends
formatting      tables, ages, notes, JSON, progress

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
from sandbox_kernel.cli.formatting import note
from sandbox_kernel.cli.parser import parse
from sandbox_kernel.errors import SandboxError, SpecError, SpecRefused
from sandbox_kernel.jupyter.configuration import unknown_variables
from sandbox_kernel.sandboxes.backends import backend_names
from sandbox_kernel.sandboxes.unattended import all_left, in_words

PROGRAM = "sandbox-kernel"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives its exit code. Raises SystemExit(2) for wrong usage."""
    arguments = parse(sys.argv[1:] if argv is None else list(argv))
    logging.basicConfig(
        level=logging.DEBUG if arguments.debug else logging.WARNING,
        format=f"{PROGRAM}: %(message)s",
    )
    if not arguments.reads_settings:  # commands that do refuse unknown ones
        for problem in unknown_variables(os.environ):
            note(problem)
    try:
        if arguments.tells_left:
            waiting = len(all_left(backend_names()))
            if waiting:
                note(in_words(waiting))
        code: int = arguments.run(arguments) or 0
        sys.stdout.flush()
    except Interrupted as interrupted:
        if interrupted.at_once:
            # The user has asked twice: no clean-up at exit either.
            os._exit(interrupted.exit_code)
        # Everything is cleaned up; another Ctrl-C could only interrupt the exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has ended, as in `... | head`. That is no error, but the
        # interpreter must not write to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except (SandboxError, OSError) as error:
        if arguments.debug:
            raise
        note(str(error) or type(error).__name__)
        # A wrong value is wrong usage; a request that a backend cannot enforce is not.
        wrong = isinstance(error, SpecError) and not isinstance(error, SpecRefused)
        return 2 if wrong else 1
    return code
