"""Thousands of random networks, pruned at random: each is exact, or refused by the library. See generated.py."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from generated import outcomes_of, report
from generator.check import EXACT, REFUSED
from generator.drawing import VOCABULARY
from generator.generating import generate
from generator.table import share, table

pytestmark = pytest.mark.generated

COUNT = 2000


def test_generated_networks_are_exact_or_refused(capsys) -> None:
    outcomes = [*outcomes_of(range(COUNT), len(os.sched_getaffinity(0)))]
    with capsys.disabled():
        sys.stdout.write("\n" + table(outcomes))
    wrong = [one for one in outcomes if one.verdict not in (EXACT, REFUSED)]
    assert not wrong, f"seeds {[one.seed for one in wrong]}; the first:\n{report(wrong[0].seed)}"
    assert share(outcomes, EXACT) >= 0.9
    drawn = set().union(*(one.words for one in outcomes))
    assert drawn >= set(VOCABULARY), "words that no network holds"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_is_one_network(seed: int) -> None:
    programs, networks = zip(*(generate(seed) for _ in range(2)), strict=True)
    assert programs[0].source() == programs[1].source()
    for first, second in zip(*(network.state_dict().values() for network in networks), strict=True):
        assert torch.equal(first, second)
