"""Real kernels over links on which everything goes wrong that can, by seeded plans.

``SANDBOX_KERNEL_TEST_SEEDS=100 pytest tests/faults/test_plans.py`` tries more of them.
"""

from __future__ import annotations

import os

import pytest

from tests.kernels.conftest import KernelStarter

from .shaped import FAULTS, Faults, Plan, Shape, install
from .traffic import Traffic

SEEDS = int(os.environ.get("SANDBOX_KERNEL_TEST_SEEDS", "12"))


def run_over(shape: Shape, start_kernel: KernelStarter, summary: list[str]) -> Faults:
    with install(shape) as faults:
        try:
            live = start_kernel()
            traffic = Traffic(live, shape.plan.seed)
            traffic.round()
        except BaseException:
            print(f"To see this again: {faults!r}")
            raise
        summary.append(f"{faults!r}: {traffic.messages} messages, all once and in order")
        return faults


@pytest.mark.parametrize("byte_exact", [True, False], ids=["raw", "base64"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("impatient")
def test_each_fault_alone(
    fault: str, byte_exact: bool, start_kernel: KernelStarter, summary: list[str]
) -> None:
    """Everything arrives once and in order, whatever happens a dozen times on the way."""
    shape = Shape(byte_exact=byte_exact, plan=Plan((fault,), seed=1, every=150_000, limit=12))
    faults = run_over(shape, start_kernel, summary)
    assert faults.faults[fault] >= 5


@pytest.mark.parametrize("delay", [0.001, 0.05, 0.3])
def test_delays(delay: float, start_kernel: KernelStarter, summary: list[str]) -> None:
    """A distant sandbox is slow, and that is all."""
    run_over(Shape(delay=delay), start_kernel, summary)


def test_narrow_link(start_kernel: KernelStarter, summary: list[str]) -> None:
    """One megabyte a second, as text."""
    run_over(Shape(bandwidth=1e6, byte_exact=False), start_kernel, summary)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.usefixtures("impatient")
def test_random_plan(seed: int, start_kernel: KernelStarter, summary: list[str]) -> None:
    """Several faults at once, on links of any kind."""
    run_over(Shape.random(seed), start_kernel, summary)
