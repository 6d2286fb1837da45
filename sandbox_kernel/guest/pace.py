"""Pace: how fast files may travel while cells run.

Files and messages share the processors, the agent, the link and the host's thread. What files cost
a message shows in the time that the link takes to answer a PING, which overtakes queued data as a
message does. Files go faster as long as that time stays near its best, and back off at once when it
does not.
"""

LONGEST_PAUSE = 0.008
"""Seconds between two portions of files on a link that is never fast."""
_SHORTEST_PAUSE = 0.0001
_ALLOWED, _ALLOWED_SHARE = 0.00125, 0.25
"""How much longer than the best an answer may take: in seconds, or as a share of the best."""
_AGING = 1.001
"""The best is forgotten slowly: a link may become longer."""


class Pace:
    """``pause`` is the time between two portions, for whoever reads the files."""

    def __init__(self) -> None:
        self.pause = LONGEST_PAUSE
        self._best = 0.0

    def measured(self, seconds: float) -> None:
        """The link has answered after this time, with files under way at the present pace."""
        self._best = min(seconds, self._best * _AGING) if self._best else seconds
        if seconds > self._best + max(_ALLOWED, _ALLOWED_SHARE * self._best):
            self.pause = min(2 * max(self.pause, _SHORTEST_PAUSE), LONGEST_PAUSE)
        else:
            self.pause = 0.8 * self.pause if self.pause > _SHORTEST_PAUSE else 0.0
