"""Every method of the library in a short run, and what each promises; and methods of a user's own."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import paam
from networks import lively
from paam.config.recipe import Recipe, recipe_from_tree
from paam.config.settings import OptimizerSettings
from paam.errors import DataError, RecipeError, StoppedError
from paam.events import End, Epoch, Selected, of_kind
from paam.graph.flows import LIVE, Pass
from paam.methods import Method, find_method, known_methods, phases_of, register_method
from paam.methods.parts import cut_by, pipeline
from paam.models import resnet20
from paam.pruning.criteria import FPGM, HRANK, L1, distances, rank
from paam.pruning.criterion import Criterion, find_criterion, register_criterion
from paam.pruning.scorers import SCORERS
from paam.runs.checkpoint import checkpoints
from paam.runs.run import run
from paam.runs.setup import make_pruner
from paam.train.engine import Engine
from paam.train.phase import Phase, total_epochs

SETTINGS: dict[str, dict[str, Any]] = {
    "paam": {"schedule": {"score": 1}},
    "free": {"schedule": {"score": 1}},
    **{name: {"schedule": {"score": 0}} for name in ("l1", "random", "fpgm", "hrank", "sfp")},
}
"""What a recipe must say for each method: every test of methods walks this."""


def recipe(method: str, **sections: Any) -> Recipe:
    tree: dict[str, Any] = {
        "model": {"name": "resnet20"},
        "data": {"name": "digits", "batch_size": 512},
        "prune": {"method": method, "streams": "tied"},
        "target": {"keep_filters": 0.5, "uniform": True},
        "schedule": {"warmup": 1, "cycles": 2, "weight": 1, "finetune": 1, **SETTINGS[method]["schedule"]},
    }
    return recipe_from_tree({**tree, **sections})


def test_the_table_has_every_method():
    assert set(SETTINGS) == set(known_methods())


@pytest.mark.parametrize("method", SETTINGS)
def test_a_run_ends_with_a_network_of_the_target(tmp_path, method):
    events = run(recipe(method), tmp_path / "run", device="cpu")
    (end,) = of_kind(events, End)
    kept = end.kept_filters
    assert all(width // 2 - 1 <= stays <= width // 2 + 1 for stays, width in kept.values())
    planned = [(phase.name, phase.cycle) for phase in phases_of(recipe(method)) for _ in range(phase.epochs)]
    assert [(epoch.phase, epoch.cycle) for epoch in of_kind(events, Epoch)] == planned
    assert len(of_kind(events, Selected)) == 2


@pytest.mark.parametrize("method", SETTINGS)
def test_the_control_trains_for_as_long_as_the_network_that_is_pruned(method):
    whole = recipe(method, schedule={"control": True, **SETTINGS[method]["schedule"]})
    by_name = {phase.name: phase for phase in phases_of(whole)}
    alternation = sum(phase.epochs for phase in phases_of(whole) if phase.cycle)
    assert by_name["control"].epochs == alternation + by_name["finetune"].epochs


# ---------------------------------------------------------------- criteria by hand


def test_l1_by_hand():
    rows = torch.tensor([[1.0, -1.0], [-3.0, 1.0], [0.0, -0.5]])
    assert L1.score(rows).tolist() == [2.0, 4.0, 0.5]


def test_the_filter_at_the_geometric_median_falls_first():
    a, b = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([4.0, 2.0, -3.0])
    scores = distances(torch.stack([a, (a + b) / 2, b]))
    assert scores.argmin() == 1
    rows = torch.randn(7, 12, dtype=torch.float64)
    by_hand = torch.tensor([sum(float((one - other).norm()) for other in rows) for one in rows], dtype=torch.float64)
    torch.testing.assert_close(distances(rows), by_hand)
    torch.testing.assert_close(distances(rows + 3), by_hand)
    order = torch.randperm(7)
    torch.testing.assert_close(distances(rows[order]), by_hand[order])


def test_ranks_of_maps_by_hand():
    maps = torch.zeros(1, 4, 3, 5)
    maps[0, 1] = 2.5
    maps[0, 2, :, :3] = torch.eye(3)
    maps[0, 3] = torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.arange(1.0, 6.0))
    assert rank(maps).tolist() == [0.0, 1.0, 3.0, 1.0]
    assert rank(-7 * maps).tolist() == [0.0, 1.0, 3.0, 1.0]
    images = torch.randn(6, 4, 3, 5)
    images[2:, 1] = 0
    assert rank(images).tolist() == [3.0, pytest.approx(1.0), 3.0, 3.0]


class Small(nn.Module):
    def __init__(self, in_channels: int = 3, num_classes: int = 2) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(in_channels, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.linear = nn.Conv2d(6, 5, 3), nn.Linear(5, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv1(x)).relu()
        return self.linear(self.conv2(y).relu().mean((2, 3)))


def test_maps_are_those_behind_norm_and_activation():
    """Against forward hooks on the model itself; the mean is over images, whatever the batches."""
    torch.manual_seed(0)
    model = lively(Small())
    pruner = paam.Pruner(model, torch.zeros(1, 3, 8, 8).double(), criterion=HRANK)
    images = torch.randn(7, 3, 8, 8).double()
    seen: list[Tensor] = []
    model.eval().norm.register_forward_hook(lambda module, inputs, output: seen.append(output.relu()))
    model(images)
    ranks = torch.linalg.matrix_rank(seen[0]).float().mean(0)
    found = pruner.scores(batches=[images[:5], images[5:]])
    torch.testing.assert_close(found["conv1"], ranks / ranks.max())
    assert set(found) == {"conv1", "conv2"}


def test_a_criterion_that_reads_maps_wants_images():
    pruner = paam.Pruner(Small(), torch.zeros(1, 3, 8, 8), criterion="hrank")
    with pytest.raises(DataError, match="'hrank' reads feature maps: pass batches"):
        pruner.select(keep_filters=0.5)
    pruner.select(keep_filters=0.5, batches=[torch.randn(2, 3, 8, 8)])


def test_random_scores_depend_on_the_seed_alone_and_lie_evenly():
    wide = nn.Sequential(nn.Conv2d(3, 4000, 1), nn.ReLU(), nn.Conv2d(4000, 2, 1))
    pruner = paam.Pruner(wide, torch.zeros(1, 3, 4, 4), criterion="random")
    first = pruner.scores()["0"]
    torch.manual_seed(99)
    assert torch.equal(pruner.scores()["0"], first)
    assert not torch.equal(pruner.scores(seed=1)["0"], first)
    assert ((torch.histc(first, 4, 0, 1) / 4000 - 0.25).abs() < 0.05).all()


# ---------------------------------------------------------------- soft pruning


def soft_engine(**target: Any) -> tuple[Engine, list[Tensor]]:
    torch.manual_seed(0)
    model = lively(Small().double())
    given = recipe("sfp", target=target, schedule={"warmup": 0, "cycles": 1, "score": 0, "weight": 2, "finetune": 0})
    pruner = paam.Pruner(model, torch.zeros(1, 3, 8, 8, dtype=torch.float64), scorer=None, inplace=True)
    images, labels = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.arange(4) % 2

    class Batches:
        steps = 2

        def epoch(self, epoch: int, start: int) -> list[tuple[Tensor, Tensor]]:
            return [(images + epoch, labels)] * 2

    return Engine(pruner, given, phases_of(given), Batches(), seed=0, emit=lambda event: None), [images, labels]


def zero_filters(model: nn.Module) -> dict[str, int]:
    return {
        name: int((layer.weight.detach().flatten(1) == 0).all(1).sum())
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Conv2d)
    }


def test_soft_filters_are_zero_after_each_epoch_and_come_alive_in_the_next():
    engine, _ = soft_engine(keep_filters=0.5, uniform=True)
    model = engine.pruner.network.traced.model
    alive: list[dict[str, int]] = []
    engine.on_step = lambda step, steps: alive.append(zero_filters(model))
    engine.run_epoch(0, None)
    closed = {name: int((gate.mask == 0).sum()) for name, gate in engine.pruner.gates.items()}
    assert zero_filters(model) == closed
    assert min(closed.values()) >= 2
    alive.clear()
    engine.run_epoch(1, None)
    assert alive[-1] == {"conv1": 0, "conv2": 0}
    assert zero_filters(model) == {name: int((gate.mask == 0).sum()) for name, gate in engine.pruner.gates.items()}


def test_soft_pruning_of_nothing_is_ordinary_training():
    engine, (images, labels) = soft_engine(keep_filters=1.0)
    twin = copy.deepcopy(engine.pruner.network.traced.model).train()
    adam = torch.optim.Adam(twin.parameters(), lr=1e-3)
    for epoch in range(2):
        engine.run_epoch(epoch, None)
        for _ in range(2):
            adam.zero_grad()
            nn.functional.cross_entropy(twin(images + epoch), labels).backward()
            adam.step()
    for one, other in zip(engine.pruner.network.traced.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- of one's own


def test_a_scorer_an_activation_and_a_criterion_of_ones_own():
    class Spread(paam.Scorer):
        """The standard deviation of a filter's weights, times a learned number per layer."""

        def __init__(self, filters: int, weights: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.zeros(1))

        def attend(self, filters_FN: Tensor, *parameters: Tensor) -> Tensor:
            (gain,) = parameters
            return gain * filters_FN.std(-1)

    image = torch.zeros(1, 3, 8, 8)
    pruner = paam.Pruner(Small(), image, scorer=Spread, activation=torch.sigmoid)
    assert torch.equal(pruner.scores()["conv1"], torch.full((6,), 0.5))
    with pruner.scoring():
        (pruner.model(torch.randn(2, 3, 8, 8)).square().sum() + pruner.penalty()).backward()
        pruner.optimizer.step()
    assert not torch.equal(pruner.scores()["conv1"], torch.full((6,), 0.5))
    smooth = Criterion("smooth", lambda rows: 1 / rows.std(1))
    model = Small()
    found = paam.Pruner(model, image).scores(smooth)["conv2"]
    expected = 1 / model.conv2.weight.detach().flatten(1).std(1)
    torch.testing.assert_close(found, expected / expected.max())


def test_a_method_of_ones_own_is_one_small_file(tmp_path, monkeypatch):
    """Registered from outside it is known to recipes: here one cut after warm-up, and nothing learned."""
    once = Method(
        "once",
        label=lambda recipe: "L1, once",
        phases=lambda recipe: pipeline(recipe, Phase("weight", 1, "weight", gates="binary", cycle=1, enter=cut_by(L1))),
    )
    monkeypatch.setattr("paam.methods.base._KNOWN", dict(known_methods()))
    register_method(once)
    tree = recipe_from_tree(
        {
            "model": {"name": "resnet20"},
            "data": {"name": "digits", "batch_size": 512},
            "prune": {"method": "once", "streams": "tied"},
            "schedule": {"warmup": 1, "score": 0, "finetune": 1},
            "target": {"keep_macs": 0.5},
        }
    )
    events = run(tree, tmp_path / "run", device="cpu")
    assert [epoch.phase for epoch in of_kind(events, Epoch)] == ["warmup", "weight", "finetune"]
    assert events[0].method == "L1, once"
    with pytest.raises(RecipeError, match="method 'once' is already registered"):
        register_method(Method("once", once.label, once.phases))


def test_a_scorer_beside_a_criterion_is_refused():
    image = torch.zeros(1, 3, 8, 8)
    for scorer in ("kq", lambda filters, weights: SCORERS["free"](filters, weights)):
        with pytest.raises(RecipeError, match="Give a scorer, .* or a criterion, .* but not both"):
            paam.Pruner(Small(), image, scorer=scorer, criterion="l1")
    assert paam.Pruner(Small(), image, scorer=None, criterion="l1").optimizer is None
    assert paam.Pruner(Small(), image, criterion="l1").optimizer is None
    assert paam.Pruner(Small(), image).optimizer is not None
    again = copy.deepcopy(paam.Pruner(Small(), image, criterion="l1"))
    assert again.criterion == L1


def test_names_that_there_are_not_and_scores_that_are_none():
    with pytest.raises(RecipeError, match="no method 'fpmg'. Did you mean 'fpgm'"):
        find_method("fpmg")
    with pytest.raises(RecipeError, match="no criterion 'l3'"):
        find_criterion("l3")
    with pytest.raises(RecipeError, match="criterion 'fpgm' is already registered"):
        register_criterion(Criterion("fpgm", lambda rows: rows.sum(1)))
    assert find_criterion("fpgm") is FPGM
    pruner = paam.Pruner(resnet20(), torch.zeros(1, 3, 16, 16), scorer=None)
    with pytest.raises(paam.PaamError, match="give a criterion, for example select"):
        pruner.select(keep_macs=0.5)
    with pytest.raises(RecipeError, match=r"'flat' must return 16 finite numbers for 'conv1'; it returned \[16, 27\]"):
        pruner.select(Criterion("flat", lambda rows: rows), keep_macs=0.5)
    with pytest.raises(RecipeError, match="not all of them finite"):
        pruner.select(Criterion("broken", lambda rows: rows.sum(1) / 0), keep_macs=0.5)
    with pytest.raises(paam.PaamError, match="no penalty without learned scores"):
        pruner.penalty()


def test_a_data_set_of_ones_own_is_known_to_recipes(tmp_path):
    from paam.data import DATASETS, Dataset, Wanted, load_digits, register_dataset

    def load_odd(wanted: Wanted) -> Dataset:
        """Of the digits, those with an odd label."""
        whole = load_digits()
        train, test = (part.take((part.labels % 2 == 1).nonzero().flatten()) for part in (whole.train, whole.test))
        return dataclasses.replace(whole, train=train, test=test)

    register_dataset("odd-digits", load_odd)
    try:
        start = run(recipe("l1", data={"name": "odd-digits", "batch_size": 512}), tmp_path / "run", device="cpu")[0]
        labels = load_digits().test.labels
        assert start.samples["test"] == int((labels % 2 == 1).sum())
        with pytest.raises(RecipeError, match="data set 'odd-digits' is already registered"):
            register_dataset("odd-digits", load_odd)
    finally:
        del DATASETS["odd-digits"]


class Odd(nn.Module):
    """With an operation of torch that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.special.log_ndtr(self.one(x)))


def test_a_rule_of_ones_own_lets_channels_through():
    from paam.graph.rules.elementwise import pointwise
    from paam.graph.rules.table import RULES, register_rule

    x = torch.randn(2, 3, 8, 8).double()
    pruner = paam.Pruner(lively(Odd()), x, criterion="l1")
    pruner.select(keep_filters=0.5)
    assert pruner.compact().two.in_channels == 6  # filled in again: without a rule an operation reads whole values
    register_rule(torch.special.log_ndtr, pointwise)
    try:
        pruner = paam.Pruner(lively(Odd()), x, criterion="l1")
        pruner.select(keep_filters=0.5)
        small = pruner.compact().eval()
        with pruner.weighting():
            pass
        assert (small.one.out_channels, small.two.in_channels) == (3, 3)
        torch.testing.assert_close(small(x), pruner.model.eval()(x), rtol=1e-9, atol=1e-12)
        with pytest.raises(RecipeError, match="a rule for .* already"):
            register_rule(torch.special.log_ndtr, pointwise)
    finally:
        del RULES[torch.special.log_ndtr]


class Summed(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.logcumsumexp(self.one(x), 1))


def test_a_rule_that_is_wrong_is_found_when_a_network_is_cut(monkeypatch):
    """Here one that says that each channel depends on itself alone, of a sum along them."""
    from paam.graph.rules.table import RULES

    monkeypatch.setitem(RULES, torch.logcumsumexp, lambda site: site.op(Pass(LIVE, LIVE)))
    network = paam.prepare(lively(Summed()), torch.randn(2, 3, 8, 8).double())
    plan = network.plan({"one": np.arange(6) > 2})  # the first channels of a running sum do not depend on the others
    with pytest.raises(paam.PaamError, match="logcumsumexp"):
        network.compact(plan)


# ---------------------------------------------------------------- extra loss, and what happens on leaving


def spread(pruner: paam.Pruner, images: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
    """Answers near zero, the same ones for images that are mirrored, and small filters of the first layer."""
    mirrored = pruner.model(images.flip(-1))
    return 0.1 * logits.square().mean() + (mirrored - logits).square().sum() + 0.01 * pruner.model.conv1.weight.norm()


def test_an_extra_loss_is_added_as_in_a_loop_by_hand():
    torch.manual_seed(0)
    images, labels = torch.randn(3, 4, 3, 8, 8).double(), torch.arange(4) % 2
    given = dataclasses.replace(Recipe(), weight=OptimizerSettings("sgd", 0.05, 0.0))
    pruner = paam.Pruner(lively(Small()), images[0, :1], criterion="l1", inplace=True)
    twin = copy.deepcopy(pruner.network.traced.model).train()

    class Batches:
        steps = 3

        def epoch(self, epoch: int, start: int) -> list[tuple[Tensor, Tensor]]:
            return [(one, labels) for one in images]

    phases = [Phase("drawn", 2, "weight", extra_loss=spread), Phase("plain", 1, "weight")]
    engine = Engine(pruner, given, phases, Batches(), seed=0, emit=lambda event: None)
    for epoch in range(3):
        engine.run_epoch(epoch, None)
        for one in images:
            twin.zero_grad()
            logits = twin(one)
            loss = nn.functional.cross_entropy(logits, labels)
            if epoch < 2:
                mirrored = twin(one.flip(-1))
                loss = loss + 0.1 * sum(value**2 for value in logits.flatten()) / logits.numel()
                loss = loss + ((mirrored - logits) ** 2).sum() + 0.01 * (twin.conv1.weight**2).sum().sqrt()
            loss.backward()
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter -= 0.05 * parameter.grad
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(pruner.network.traced.model.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def halve_and_cut(engine: Engine) -> None:
    """What shows if it is done twice, or not at all."""
    with torch.no_grad():
        for parameter in engine.pruner.network_parameters():
            parameter *= 0.5
    cut_by(L1)(engine)


def leaving_phases(recipe: Recipe) -> tuple[Phase, ...]:
    once = Phase("drawn", 2, "weight", taught=True, extra_loss=small_answers, leave=halve_and_cut)
    return pipeline(recipe, *(dataclasses.replace(once, cycle=cycle) for cycle in (1, 2)))


def small_answers(pruner: paam.Pruner, images: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
    return 0.01 * logits.square().mean()


@pytest.fixture
def leaving(monkeypatch) -> Recipe:
    monkeypatch.setattr("paam.methods.base._KNOWN", dict(known_methods()))
    register_method(Method("leaving", label=lambda recipe: "Leaving", phases=leaving_phases))
    monkeypatch.setitem(SETTINGS, "leaving", {"schedule": {"score": 0, "warmup": 0}})
    small = {"model": {"name": "test_methods:Small"}, "data": {"name": "digits", "batch_size": 700}}
    return recipe("leaving", **small, train={"checkpoint_every": 2, "threads": 1})


def record_of(events: list[Any]) -> list[Any]:
    """What may not depend on where a run was stopped: losses and cuts, in their order."""
    return [
        event.loss if isinstance(event, Epoch) else (event.kept_filters, event.accuracy)
        for event in events
        if isinstance(event, Epoch | Selected)
    ]


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(out / "model.safetensors") for out in (one, other))
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_phase_is_left_once_wherever_a_run_is_stopped(tmp_path, leaving):
    whole = run(leaving, tmp_path / "whole", device="cpu")
    assert len(of_kind(whole, Selected)) == 2
    steps = 5 * 2
    for step in range(steps):
        with pytest.raises(StoppedError):
            run(leaving, tmp_path / "run", device="cpu", resume=step > 0, stop=lambda: True)
        assert len(checkpoints(tmp_path / "run" / "checkpoints")) == min(step + 1, 2)
    found = run(leaving, tmp_path / "run", device="cpu", resume=True)
    assert record_of(found) == record_of(whole)
    assert same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("epoch", range(5))
def test_a_phase_is_left_once_where_a_run_is_killed_behind_an_epoch(tmp_path, leaving, epoch):
    """After its event, before a checkpoint: the next process does it again, on the state of before."""
    whole = run(leaving, tmp_path / "whole", device="cpu")

    def kill(event: Any) -> None:
        if isinstance(event, Epoch) and event.epoch == epoch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(leaving, tmp_path / "run", device="cpu", watch=kill)
    found = run(leaving, tmp_path / "run", device="cpu", resume=True)
    assert record_of(found) == record_of(whole)
    assert same_weights(tmp_path / "whole", tmp_path / "run")


# ---------------------------------------------------------------- stopped, measured, refused


@pytest.mark.parametrize("method", SETTINGS)
def test_every_method_goes_on_to_the_same_bits_wherever_it_stops(tmp_path, method):
    whole = run(recipe(method), tmp_path / "whole", device="cpu")
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps % 4 == 0

    for attempt in range(20):
        with contextlib.suppress(StoppedError):
            found = run(recipe(method), tmp_path / "run", device="cpu", resume=attempt > 0, stop=stop)
            break
    assert attempt > 1
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    losses = [[epoch.loss for epoch in of_kind(events, Epoch)] for events in (whole, found)]
    assert losses[0] == losses[1]
    cuts = [[cut.kept_filters for cut in of_kind(events, Selected)] for events in (whole, found)]
    assert cuts[0] == cuts[1]


@pytest.mark.parametrize("method", SETTINGS)
def test_what_measures_is_told_where_gates_are_not_the_phases_own(method):
    """An evaluation that was captured with open gates must not be replayed when a cut is measured."""
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8)
    seen: dict[str, set[str]] = {}
    given = recipe(method)
    pruner = make_pruner(resnet20(), images[:1], given)

    class Batches:
        steps = 1

        def epoch(self, epoch: int, start: int) -> list[tuple[Tensor, Tensor]]:
            return [(images, labels)]

    def measure(network: nn.Module, name: str) -> float:
        seen.setdefault(name, set()).add(pruner.gate_mode if network is pruner.model else "none")
        return 50.0

    engine = Engine(pruner, given, phases_of(given), Batches(), seed=0, emit=lambda event: None)
    for epoch in range(total_epochs(engine.phases)):
        engine.run_epoch(epoch, measure)
    assert all(len(modes) == 1 for modes in seen.values())
    assert ("soft, binary gates" in seen) == any(phase.name == "soft" for phase in engine.phases)


def test_maps_are_made_through_the_gates_as_they_are():
    """Weights that were trained with closed gates say nothing when these are open."""
    torch.manual_seed(0)
    model, images = lively(Small()), torch.randn(5, 3, 8, 8).double()
    pruner = paam.Pruner(model, images[:1], criterion="hrank")
    pruner.select("l1", keep_filters=0.5)
    with pruner.weighting():
        pass
    seen: list[Tensor] = []
    inner = pruner.network.traced.model
    inner.conv2.register_forward_hook(lambda module, inputs, output: seen.append(output.relu()))
    pruner.model.eval()(images)
    ranks = torch.linalg.matrix_rank(seen[0].float()).float().mean(0)
    inner.conv2._forward_hooks.clear()
    torch.testing.assert_close(pruner.scores(batches=[[images, torch.zeros(5)]])["conv2"], ranks / ranks.max())


def phase(name: str = "weight", **changes: Any) -> Phase:
    return Phase(name, 1, **{"settings": "weight", "gates": "binary", **changes})


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([phase(), phase(taught=True)], "Two phases are called 'weight', but differ in taught"),
        ([phase(), phase(gates="open")], "differ in gates"),
        ([phase(), phase(extra_loss=spread)], "differ in extra_loss"),
        (
            [phase("finetune", network="small"), phase()],
            "'weight' trains the gated network after 'finetune' compacted it",
        ),
        ([phase(settings="weights")], "'weight' has settings 'weights', which no recipe has"),
        ([phase(settings="model")], "settings 'model'"),
    ],
)
def test_phases_that_no_run_could_go_through_are_refused_before_training(phases, message):
    pruner = paam.Pruner(Small(), torch.zeros(1, 3, 8, 8), criterion="l1")
    with pytest.raises(RecipeError, match=message):
        Engine(pruner, Recipe(), phases, [], seed=0, emit=lambda event: None)


def test_a_method_that_selects_nothing_is_told_so(monkeypatch):
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4) % 2
    nothing = Method("nothing", lambda recipe: "nothing", lambda recipe: (phase(gates="open"),))
    monkeypatch.setattr("paam.methods.base._KNOWN", dict(known_methods()))
    register_method(nothing)
    given = dataclasses.replace(Recipe(), prune=dataclasses.replace(Recipe().prune, method="nothing"))
    with pytest.raises(RecipeError, match="'nothing' made no selection"):
        paam.prune(Small(), [(images, labels)], keep_macs=0.5, recipe=given, device="cpu")


def test_an_ema_of_a_phase_that_comes_again_begins_anew():
    """Two phases of one name: the mean of the second is that of its own steps."""
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 8, 8).double(), torch.arange(4) % 2
    given = dataclasses.replace(Recipe(), finetune=OptimizerSettings("sgd", 0.1, 0.0, average=0.5))
    pruner = paam.Pruner(lively(Small()), images[:1], criterion="l1", inplace=True)
    again = [Phase("again", 2, "finetune") for _ in range(2)]

    class Batches:
        steps = 1

        def epoch(self, epoch: int, start: int) -> list[tuple[Tensor, Tensor]]:
            return [(images, labels)]

    model = copy.deepcopy(pruner.network.traced.model).train()
    engine = Engine(pruner, given, again, Batches(), seed=0, emit=lambda event: None)
    for epoch in range(4):
        engine.run_epoch(epoch, None)
    for _ in range(2):
        mean = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(2):
            model.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            with torch.no_grad():
                for average, parameter in zip(mean, model.parameters(), strict=True):
                    parameter -= 0.1 * parameter.grad
                    average += 0.5 * (parameter - average)
        with torch.no_grad():
            for average, parameter in zip(mean, model.parameters(), strict=True):
                parameter.copy_(average)
    for one, other in zip(pruner.network.traced.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_recipe_made_in_python_is_checked_as_one_that_is_read():
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4) % 2
    for changes, message in (
        ({"finetune": OptimizerSettings("adamw", 0.1)}, "finetune.optimizer cannot be 'adamw'"),
        ({"weight": OptimizerSettings("adam", -1.0)}, "weight.lr must be from 0"),
        ({"weight": OptimizerSettings("adam", 1e-3, average=0.9)}, "weight.average must be 0"),
    ):
        given = dataclasses.replace(Recipe(), **changes)
        with pytest.raises(RecipeError, match=message):
            paam.prune(Small(), [(images, labels)], keep_macs=0.5, recipe=given, device="cpu")


# ---------------------------------------------------------------- what criteria return, and of what


def test_criteria_take_functions_low_precision_and_whole_numbers():
    image = torch.zeros(1, 3, 8, 8)
    model = Small()
    counts = paam.Pruner(model, image, criterion=lambda rows: (rows > 0).sum(1)).scores()["conv1"]
    expected = (model.conv1.weight.detach().flatten(1) > 0).sum(1).float()
    torch.testing.assert_close(counts, expected / expected.max())
    half = paam.Pruner(Small().bfloat16(), image.bfloat16(), criterion="fpgm", check=False)
    assert half.scores()["conv1"].dtype == torch.float32
    assert half.select(keep_filters=np.float64(0.5)).plan.kept_filters <= 6
    for broken, message in (
        (lambda rows: rows.sum(1).tolist(), "must return a tensor, not list"),
        (lambda rows: rows, r"must return 6 finite numbers for 'conv1'; it returned \[6, 27\]"),
    ):
        with pytest.raises(RecipeError, match=message):
            paam.Pruner(model, image, criterion=broken).scores()
    with pytest.raises(RecipeError, match="reads weights, maps, noise, not 'map'"):
        Criterion("mine", lambda maps: maps, reads="map")


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_soft_pruning_of_computed_weights_stays_finite(norm):
    model = Small()
    model.conv1 = getattr(nn.utils.parametrizations, norm)(model.conv1)
    pruner = paam.Pruner(model, torch.zeros(1, 3, 8, 8), scorer=None, inplace=True)
    pruner.select("l2", keep_filters=0.5, uniform=True)
    pruner.zero_closed_filters()
    closed = pruner.gates["conv1"].mask == 0
    weight = pruner.network.traced.model.eval().conv1.weight.detach()
    assert weight.isfinite().all()
    assert (weight[closed] == 0).all()
    assert (weight[~closed].flatten(1) != 0).any(1).all()


def test_a_rule_that_fails_is_refused_by_name_and_not_passed_over(monkeypatch):
    from paam.graph.rules.table import RULES, register_rule

    monkeypatch.setattr("paam.graph.rules.table.RULES", dict(RULES))
    register_rule(torch.special.log_ndtr, lambda site: site.op(Pass(site.nothing)))
    with pytest.raises(paam.PaamError, match=r"log_ndtr.*the rule that was registered for it fails \(AttributeError"):
        paam.prepare(lively(Odd()), torch.randn(2, 3, 8, 8).double())
