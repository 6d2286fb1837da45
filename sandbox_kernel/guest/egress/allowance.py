"""How many streams may be opened on which the sandbox says nothing.

The host ends a session that keeps it busy with frames that move nothing (wire/session.py). No
program of the sandbox may be able to bring that about, by asking for names or by connecting and
hanging up, so the agent does less of that than the host endures.
"""

from typing import Callable

BURST, A_SECOND = 1024.0, 50.0


class Allowance:
    def __init__(self, clock: "Callable[[], float]") -> None:
        self._clock = clock
        self._left, self._at = BURST, clock()

    def take(self) -> bool:
        """Whether one more may be opened now."""
        now = self._clock()
        self._left = min(BURST, self._left + (now - self._at) * A_SECOND)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """One that was opened carries data."""
        self._left += 1
