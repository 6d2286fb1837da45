"""What the benchmark of ways out makes of its figures."""

from __future__ import annotations

from benchmarks.egress import Figures, checks, lines
from benchmarks.egress_rows import ROWS

ROW = {row.name: row for row in ROWS}


def figures() -> Figures:
    return Figures(
        columns=["sandbox", "mitmproxy", "no proxy"],
        rounds={
            "download": {"sandbox": [300.0, 80.0, 90.0], "mitmproxy": [100.0], "no proxy": [900.0]},
            "new_http": {"sandbox": [2.0], "mitmproxy": [4.0]},
            "cell_slow": {"sandbox": [5.0]},
        },
        cells={"cell_slow": {"sandbox": [1.4, 1.2, 1.5]}},
    )


def test_shares_say_how_fast_the_sandbox_is() -> None:
    """The median of the rounds; more is better, for rates and for times."""
    found = figures()
    assert found.speed_ratio(ROW["download"], "mitmproxy") == 0.9
    assert found.speed_ratio(ROW["new_http"], "mitmproxy") == 2.0
    assert found.speed_ratio(ROW["new_http"], "no proxy") is None


def test_the_table_has_only_rows_that_were_measured() -> None:
    assert [line[0] for line in lines(figures())] == [
        *("", ROW["download"].about, ROW["new_http"].about, ROW["cell_slow"].about)
    ]


def test_aims_are_those_for_mitmproxy_and_for_cells() -> None:
    assert [(check.figures, check.ok) for check in checks(figures())] == [
        *(("0.90", True), ("1.40 x", False))
    ]


def test_nothing_measured_is_no_failure() -> None:
    assert list(checks(Figures())) == []
