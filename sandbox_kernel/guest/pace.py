"""Pace: how fast files may travel while cells run.

Files and messages share the processors, the agent, the link and the host's thread. What a portion
of files costs a message shows in the time that the link takes to answer a PING that is sent with
it: the PING overtakes queued data as a message does. Files wait in proportion to that, so they take
a fixed part of the way, however fast or busy the machine is.
"""

LONGEST_PAUSE = 0.008
"""Seconds that files wait at most between two portions: a busy machine must not starve them."""
_REST = 3.0
"""Seconds of rest for each second by which files delay an answer."""
_WEIGHT = 0.1
"""Of the newest answer in the average: schedulers are not exact."""
_AGING = 1.001
"""The best time is forgotten slowly: a link may become longer."""


class Pace:
    """``pause`` is the time between two portions, for whoever reads the files."""

    def __init__(self) -> None:
        self.pause = LONGEST_PAUSE
        self._best = 0.0

    def measured(self, seconds: float) -> None:
        """The link has answered after this time, with files under way."""
        self._best = min(seconds, self._best * _AGING) if self._best else seconds
        rest = min(_REST * (seconds - self._best), LONGEST_PAUSE)
        self.pause += _WEIGHT * (rest - self.pause)
