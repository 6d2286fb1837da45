"""The pace of files while cells run, given how long the link takes to answer."""

from __future__ import annotations

import pytest

from sandbox_kernel.guest.pace import LONGEST_PAUSE, Pace

FAST, SLOW = 0.0003, 0.005


def paced(*answers: float, times: int = 100) -> Pace:
    pace = Pace()
    for _ in range(times):
        for seconds in answers:
            pace.measured(seconds)
    return pace


def test_files_begin_slowly() -> None:
    """Nothing is known about the link yet."""
    assert Pace().pause == LONGEST_PAUSE


@pytest.mark.parametrize("seconds", [FAST, 0.05, 0.3])
def test_an_undisturbed_link_is_used_in_full(seconds: float) -> None:
    """A long link answers late, but not later because of the files."""
    assert paced(seconds).pause == 0.0


def test_files_back_off_when_answers_wait_and_recover_when_they_do_not() -> None:
    """A few late answers lead back to the longest pause, and a few good ones to none."""
    pace = paced(FAST)
    pauses = []
    for _ in range(10):
        pace.measured(SLOW)
        pauses.append(pace.pause)
    assert pauses == sorted(pauses)
    assert pauses[0] > 0.0
    assert pauses[-1] == LONGEST_PAUSE
    for _ in range(30):
        before = pace.pause
        pace.measured(FAST)
        assert pace.pause < before or pace.pause == 0.0
    assert pace.pause == 0.0


def test_a_single_late_answer_costs_little() -> None:
    """Schedulers are not exact."""
    assert paced(*[FAST] * 9, SLOW).pause < LONGEST_PAUSE / 10


def test_answers_that_are_late_half_of_the_time_are_too_many() -> None:
    """Backing off is faster than recovering."""
    assert paced(FAST, SLOW).pause > LONGEST_PAUSE / 2


def test_a_link_that_has_become_longer() -> None:
    """Its best time of long ago does not hold the files back for ever."""
    pace = paced(FAST)
    for _ in range(10_000):
        pace.measured(SLOW)
    assert pace.pause == 0.0
