"""A few of the networks of test_generated.py, one test each: mutants.py runs them, and stops at the first failure."""

from __future__ import annotations

import pytest

from generator.check import EXACT, REFUSED, check_seed

SEEDS = range(200, 260)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_generated_network_is_exact_or_refused(seed: int) -> None:
    outcome = check_seed(seed)
    assert outcome.verdict in (EXACT, REFUSED), outcome


def test_few_generated_networks_are_refused() -> None:
    assert sum(check_seed(seed).verdict == REFUSED for seed in SEEDS) < 0.1 * len(SEEDS)
