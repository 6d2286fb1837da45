"""Signals of a process that was started with some of them ignored."""

from __future__ import annotations

import signal


def heed_signals() -> None:
    """Stop ignoring what nohup and background jobs of a script ignore. Tests send these signals to
    processes they start, which inherit what is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
