"""Real kernels over links on which everything goes wrong that can, by seeded plans.

``SANDBOX_KERNEL_TEST_SEEDS=100 pytest tests/faults/test_plans.py`` tries more of them.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.kernels.conftest import KernelStarter

from .shaped import FAULTS, Faults, Plan, Shape, install
from .traffic import Traffic, at_once

SEEDS = int(os.environ.get("SANDBOX_KERNEL_TEST_SEEDS", "12"))
BATCH = 4


def talk_over(
    shapes: list[Shape], start_kernel: KernelStarter, tally: Counter[str]
) -> list[Faults]:
    """A kernel for each shape, and a round of everything with all of them at once."""
    talks = []
    for shape in shapes:
        with install(shape) as faults:
            talks.append((faults, start_kernel()))

    def talk(number: int) -> None:
        faults, live = talks[number]
        try:
            traffic = Traffic(live, faults.shape.plan.seed)
            traffic.round()
        except BaseException:
            print(f"To see this again: {faults!r}")
            raise
        tally.update(
            kernels=1,
            messages=traffic.messages,
            links=faults.links,
            faults=faults.faults.total(),
        )

    at_once(talk, len(talks))
    return [faults for faults, _ in talks]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("impatient")
def test_each_fault_alone(fault: str, start_kernel: KernelStarter, tally: Counter[str]) -> None:
    """Everything arrives once and in order, whatever happens a dozen times on the way."""
    plan = Plan((fault,), seed=1, every=150_000, limit=12)
    shapes = [Shape(byte_exact=exact, plan=plan) for exact in (True, False)]
    for faults in talk_over(shapes, start_kernel, tally):
        assert faults.faults[fault] >= 5


def test_delays_and_narrow_links(start_kernel: KernelStarter, tally: Counter[str]) -> None:
    """A distant sandbox is slow, and that is all; also with one megabyte a second, as text."""
    shapes = [Shape(delay=delay) for delay in (0.001, 0.05, 0.3)]
    talk_over([*shapes, Shape(bandwidth=1e6, byte_exact=False)], start_kernel, tally)


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
@pytest.mark.usefixtures("impatient")
def test_random_plans(first: int, start_kernel: KernelStarter, tally: Counter[str]) -> None:
    """Several faults at once, on links of any kind."""
    seeds = range(first, min(first + BATCH, SEEDS))
    talk_over([Shape.random(seed) for seed in seeds], start_kernel, tally)
