"""Targets beyond one budget: two budgets at once, floors, the same share of every group, widths of another run."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from paam import Pruner, count
from paam.config.recipe import load_recipe
from paam.config.target import Target
from paam.errors import ArtifactError, PaamError, TargetError
from paam.graph.network import Choice, Network, prepare
from paam.models import resnet20, vgg16_bn
from paam.pruning.select import Selection, check_reachable, select
from scored import IMAGE, NETWORKS, random_scores


def kept_by_group(chosen: Selection) -> dict[str, set[int]]:
    return {name: set(kept.filters) for name, kept in chosen.plan.groups.items()}


def with_filter(network: Network, chosen: Selection, group: str, number: int) -> Choice:
    choice = {name: mask.copy() for name, mask in network.choice(chosen.plan).items()}
    assert not choice[group][number]
    choice[group][number] = True
    return choice


def select_or_skip(network: Network, scores: dict[str, torch.Tensor], target: Target) -> Selection:
    try:
        return select(network, scores, target)
    except TargetError as error:
        assume("cannot be reached" not in str(error))
        raise


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1, bias=False)
        self.narrow = nn.Conv2d(8, 8, 1, bias=False)
        self.wide = nn.Conv2d(8, 8, 7, padding=3, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        return self.head(torch.cat([self.narrow(x).relu(), self.wide(x).relu()], 1).mean((2, 3)))


# ---------------------------------------------------------------- two budgets


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), macs=st.floats(0.35, 1.0), params=st.floats(0.35, 1.0))
@example(seed=0, macs=1 - 2**-53, params=1.0)
def test_both_budgets_are_met_and_one_of_them_is_tight(name: str, seed: int, macs: float, params: float) -> None:
    network, scores = NETWORKS[name], random_scores(NETWORKS[name], seed)
    chosen = select_or_skip(network, scores, Target(keep_macs=macs, keep_params=params))
    dense, small = count(network.traced.model, IMAGE), count(network.compact(chosen.plan), IMAGE)
    assert small.macs / dense.macs <= macs + 1e-12  # shares are quotients: they are met up to their rounding
    assert small.params / dense.params <= params + 1e-12
    assert (chosen.kept_macs, chosen.kept_params) == (small.macs / dense.macs, small.params / dense.params)
    # The filter that fell last has the best score of all that fell: back with it, and one limit breaks.
    fallen = [
        (float(scores[group][number]), group, number)
        for group, stays in kept_by_group(chosen).items()
        for number in range(len(scores[group]))
        if number not in stays
    ]
    if fallen:
        best = max(fallen)[0]
        costs = [network.cost(with_filter(network, chosen, g, n)) for score, g, n in fallen if score == best]
        assert any(cost.macs > macs * dense.macs or cost.params > params * dense.params for cost in costs)


def test_two_budgets_are_the_stricter_of_both() -> None:
    """Filters fall in one order, so that the pair is whichever single budget removes more."""
    network = NETWORKS["resnet20"]
    scores = random_scores(network, 5)
    macs, params = (select(network, scores, Target(**{kind: 0.6})) for kind in ("keep_macs", "keep_params"))
    both = select(network, scores, Target(keep_macs=0.6, keep_params=0.6))
    assert both == min(macs, params, key=lambda chosen: chosen.plan.kept_filters)
    assert macs.plan != params.plan


@pytest.mark.parametrize("limit", ["keep_macs", "keep_params"])
def test_of_two_budgets_the_unreachable_one_is_named(limit: str) -> None:
    network = NETWORKS["resnet20"]
    shares = {"keep_macs": 0.9, "keep_params": 0.9, limit: 1e-5}
    with pytest.raises(TargetError, match=f"{limit} = 1e-05 cannot be reached"):
        select(network, random_scores(network, 0), Target(**shares))


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["keep_macs", "keep_params", "keep_filters"]))
@example(seed=90, kind="keep_macs")  # on a stream each group filled its step with other filters
@pytest.mark.parametrize("round_to", [1, 8])
def test_what_is_within_reach_is_so_for_all_scores(name: str, round_to: int, seed: int, kind: str) -> None:
    """Checked once, before training: the scores that training will find must not make it impossible."""
    network = NETWORKS[name]
    with pytest.raises(TargetError) as caught:
        check_reachable(network, Target(**{kind: 1e-6}, round_to=round_to))
    least = float(re.search(r"between ([\d.]+) and 1", str(caught.value))[1]) + 1e-4  # it has four digits
    target = Target(**{kind: least}, round_to=round_to)
    check_reachable(network, target)
    chosen = select(network, random_scores(network, seed), target)
    shares = {"keep_macs": chosen.kept_macs, "keep_params": chosen.kept_params}
    shares["keep_filters"] = chosen.plan.kept_filters / sum(group.width for group in network.groups)
    assert 0 < shares[kind] <= least


def test_a_budget_that_the_strongest_path_does_not_meet_is_met_by_another() -> None:
    """Two ways, one of 49 taps and one of a single one: with the costly one scored best a tiny budget has the other."""
    network = prepare(Ways(), torch.zeros(1, 3, 8, 8))
    scores = {
        group.name: torch.full((group.width,), 0.5 if group.name == "narrow" else 0.9) for group in network.groups
    }
    assert len(select(network, scores, Target(threshold=2.0)).plan.groups["wide"].filters) == 1
    cheap = select(network, {**scores, "narrow": torch.ones(8)}, Target(threshold=2.0))
    target = Target(keep_macs=cheap.kept_macs + 1e-6)
    check_reachable(network, target)
    chosen = select(network, scores, target)
    assert chosen.plan.groups["wide"].filters == ()
    with pytest.raises(TargetError, match=f"between {cheap.kept_macs:.4f} and 1 of its MACs"):
        select(network, scores, Target(keep_macs=cheap.kept_macs / 2))


# ---------------------------------------------------------------- every shape of target


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    limits=st.dictionaries(st.sampled_from(["keep_macs", "keep_params"]), st.floats(0.3, 1), min_size=1)
    | st.fixed_dictionaries({"keep_filters": st.floats(0.2, 1)}),
    floor=st.sampled_from([0.0, 0.0, 0.1, 0.25, 0.5]),
    uniform=st.booleans(),
    round_to=st.sampled_from([1, 1, 2, 8]),
)
def test_costs_never_exceed_limits_and_floors_always_hold(
    seed: int, limits: dict[str, float], floor: float, uniform: bool, round_to: int
) -> None:
    network = NETWORKS[("resnet20", "resnet20 tied", "vgg16_bn")[seed % 3]]
    target = Target(**limits, floor=floor, uniform=uniform, round_to=round_to)
    chosen = select_or_skip(network, random_scores(network, seed), target)
    shares = {
        "keep_macs": chosen.kept_macs,
        "keep_params": chosen.kept_params,
        "keep_filters": chosen.plan.kept_filters / chosen.plan.all_filters,
    }
    assert all(shares[name] <= share + 1e-12 for name, share in limits.items())
    cost = network.cost(network.choice(chosen.plan))
    assert chosen.kept_macs == cost.macs / network.dense.macs
    for kept in chosen.plan.groups.values():
        assert len(kept.filters) >= floor * kept.width - 1e-9
        assert len(kept.filters) % round_to == 0 or len(kept.filters) == kept.width


# ---------------------------------------------------------------- floor


def test_a_floor_keeps_the_best_filters_of_a_group_that_would_empty() -> None:
    """One layer scores far below all others; without a floor it loses nearly all, with one exactly what it may."""
    network = NETWORKS["vgg16_bn"]
    generator = torch.Generator().manual_seed(0)
    scores = {g.name: 1 + torch.rand(g.width, generator=generator) for g in network.groups}
    weak = network.groups[4]
    scores[weak.name] = torch.rand(weak.width, generator=generator) / 10
    bare, floored = (select(network, scores, Target(keep_filters=0.7, floor=floor)) for floor in (0.0, 0.3))
    assert len(kept_by_group(bare)[weak.name]) == 1
    wanted = -(-3 * weak.width // 10)
    assert kept_by_group(floored)[weak.name] == set(scores[weak.name].argsort(descending=True)[:wanted].tolist())
    assert floored.plan.kept_filters == int(0.7 * floored.plan.all_filters)  # others make up for it


def test_a_floor_holds_for_a_threshold_too_and_one_of_1_keeps_all() -> None:
    network = NETWORKS["resnet20"]
    scores = random_scores(network, 3)
    chosen = select(network, scores, Target(threshold=5.0, floor=0.5))
    path = network.strongest_path({name: value.double().numpy() for name, value in scores.items()})
    for name, kept in chosen.plan.groups.items():
        assert kept.width // 2 <= len(kept.filters) <= kept.width // 2 + len(path[name])
    assert select(network, scores, Target(threshold=5.0, floor=1.0)).kept_macs == 1
    with pytest.raises(TargetError, match="keep_macs = 0.5 cannot be reached"):
        select(network, scores, Target(keep_macs=0.5, floor=1.0))


# ---------------------------------------------------------------- uniform


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), share=st.floats(0.2, 1.0), kind=st.sampled_from(["filters", "macs", "params"]))
def test_uniform_widths_are_proportional_whatever_the_scores(seed: int, share: float, kind: str) -> None:
    network = NETWORKS["vgg16_bn" if seed % 2 else "resnet20"]
    one, other = random_scores(network, seed), random_scores(network, seed + 1)
    target = Target(**{f"keep_{kind}": share}, uniform=True)
    chosen = select_or_skip(network, one, target)
    parts = [len(kept.filters) / kept.width for kept in chosen.plan.groups.values()]
    finest = 1 / min(kept.width for kept in chosen.plan.groups.values())
    assert max(parts) - min(parts) <= finest + 1e-9  # as equal as whole filters can be
    if kind == "filters":
        assert chosen.plan.kept_filters == int(share * chosen.plan.all_filters + 1e-9)
    # Other scores choose other filters, but no other widths (but for the path that must stay).
    widths = {name: len(stays) for name, stays in kept_by_group(chosen).items()}
    again = {name: len(stays) for name, stays in kept_by_group(select_or_skip(network, other, target)).items()}
    assert all(abs(widths[name] - again[name]) <= 1 for name in widths)


@pytest.mark.parametrize("criterion", ["l1", "random", None])
def test_scores_decide_within_a_group_of_a_uniform_target(criterion: str | None) -> None:
    torch.manual_seed(0)
    pruner = Pruner(vgg16_bn(), IMAGE, criterion=criterion)
    scores = pruner.scores()
    chosen = kept_by_group(pruner.select(keep_filters=0.5, uniform=True))
    path = pruner.network.strongest_path({name: value.double().numpy() for name, value in scores.items()})
    for group in pruner.network.groups:
        stays = chosen[group.name]
        assert abs(len(stays) - group.width / 2) <= 1
        if criterion is None:
            continue  # untrained, all scores are equal
        gone = set(range(group.width)) - stays
        lowest = min(float(scores[group.name][i]) for i in stays - path[group.name])
        assert max(float(scores[group.name][i]) for i in gone) <= lowest
    if criterion == "l1":
        conv = pruner.network.traced.model.get_submodule("features.0")
        norms = conv.weight.detach().abs().sum((1, 2, 3))
        best = set(norms.argsort(descending=True)[: len(chosen["features.0"])].tolist())
        assert len(best & chosen["features.0"]) >= len(best) - len(path["features.0"])


def test_uniform_contradicts_a_threshold() -> None:
    with pytest.raises(TargetError, match="uniform needs a share"):
        Target(threshold=0.5, uniform=True)


# ---------------------------------------------------------------- widths of another run


@pytest.fixture
def plan_file(tmp_path):
    network = NETWORKS["resnet20"]
    plan = select(network, random_scores(network, 1), Target(keep_macs=0.6, floor=0.2)).plan
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), "utf-8")
    return path, plan


def test_widths_are_those_of_the_plan_and_scores_choose_the_filters(plan_file) -> None:
    path, plan = plan_file
    network = NETWORKS["resnet20"]
    scores = random_scores(network, 2)
    chosen = select(network, scores, Target(widths=str(path)))
    protected = network.strongest_path({name: value.double().numpy() for name, value in scores.items()})
    different = 0
    for name, kept in plan.groups.items():
        stays = set(chosen.plan.groups[name].filters)
        assert len(stays) == max(len(kept.filters), len(protected[name]))
        best = scores[name].double().numpy()
        gone = set(range(kept.width)) - stays
        if gone and stays - protected[name]:
            assert max(best[list(gone)]) <= min(best[list(stays - protected[name])])
        different += stays != set(kept.filters)
    assert different > len(plan.groups) / 2
    # Widths alone do not fix what stays independent in streams, but cost that near.
    assert np.isclose(chosen.kept_params, network.cost(network.choice(plan)).params / network.dense.params, rtol=0.2)


def test_the_plan_of_another_network_is_refused(plan_file, tmp_path) -> None:
    path, _ = plan_file
    scores = random_scores(NETWORKS["resnet20"], 0)
    for other in (prepare(resnet20(num_classes=7), IMAGE), NETWORKS["vgg16_bn"]):
        with pytest.raises(ArtifactError, match="another architecture"):
            select(other, random_scores(other, 0), Target(widths=str(path)))
    tied = prepare(resnet20(), IMAGE, streams="tied")
    with pytest.raises(ArtifactError, match="streams 'independent', here .*'tied'; set .*prune.streams"):
        select(tied, random_scores(tied, 0), Target(widths=str(path)))
    with pytest.raises(PaamError, match="nowhere.json"):
        select(NETWORKS["resnet20"], scores, Target(widths=str(tmp_path / "nowhere.json")))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PaamError, match="plan.json"):
        select(NETWORKS["resnet20"], scores, Target(widths=str(path)))


def test_widths_are_a_whole_target(plan_file) -> None:
    path, _ = plan_file
    for limit in ({"keep_macs": 0.5}, {"threshold": 0.5}, {"keep_macs": 0.5, "keep_params": 0.5}):
        with pytest.raises(TargetError, match="and widths"):
            Target(widths=str(path), **limit)
    for shape in ({"round_to": 8}, {"floor": 0.2}, {"uniform": True}):
        with pytest.raises(TargetError, match="leave out round_to, floor and uniform"):
            Target(widths=str(path), **shape)


def test_widths_in_the_place_of_a_recipes_target_take_its_shape_away_too(plan_file) -> None:
    path, _ = plan_file
    shipped = load_recipe("cifar10-resnet56-strong")
    assert shipped.target.floor == 0.25
    assert load_recipe("cifar10-resnet56-strong", {"target.keep_macs": 0.3}).target == Target(keep_macs=0.3, floor=0.25)
    changed = load_recipe("cifar10-resnet56-strong", {"target.widths": str(path)})
    assert changed.target == Target(widths=str(path))
