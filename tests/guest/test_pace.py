"""The pace of files while cells run, given how long the link takes to answer."""

from __future__ import annotations

import pytest

from sandbox_kernel.guest.pace import LONGEST_PAUSE, Pace

BEST, DELAYED, LATE = 0.0002, 0.001, 0.02


def settled(*answers: float, times: int = 100, pace: Pace | None = None) -> Pace:
    pace = pace or Pace()
    for _ in range(times):
        for seconds in answers:
            pace.measured(seconds)
    return pace


def test_files_begin_slowly() -> None:
    """Nothing is known about the link yet."""
    assert Pace().pause == LONGEST_PAUSE


@pytest.mark.parametrize("seconds", [BEST, 0.05, 0.3])
def test_an_undisturbed_link_is_used_in_full(seconds: float) -> None:
    """A long link answers late, but not later because of the files."""
    assert settled(seconds).pause < LONGEST_PAUSE / 1000


def test_files_rest_for_longer_than_they_delay_messages() -> None:
    """So cells have the greater part of the way."""
    pause = settled(BEST, *[DELAYED] * 9).pause
    assert 1.5 * DELAYED < pause < 3 * DELAYED


def test_files_back_off_when_answers_wait_and_recover_when_they_do_not() -> None:
    """Gradually, and never beyond the longest pause."""
    pace = settled(BEST)
    for answer, grows in ((LATE, True), (BEST, False)):
        for _ in range(100):
            before = pace.pause
            pace.measured(answer)
            assert (pace.pause > before) == grows
            assert pace.pause <= LONGEST_PAUSE
        assert pace.pause == pytest.approx(LONGEST_PAUSE if grows else 0.0, abs=1e-5)


def test_a_single_late_answer_costs_little() -> None:
    """Schedulers are not exact."""
    pace = settled(BEST)
    pace.measured(60.0)
    assert pace.pause < LONGEST_PAUSE / 5


def test_a_link_that_has_become_longer() -> None:
    """Its best time of long ago does not hold the files back for ever."""
    assert settled(DELAYED, times=5000, pace=settled(BEST)).pause < LONGEST_PAUSE / 100
