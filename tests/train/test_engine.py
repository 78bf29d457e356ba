"""Steps and networks of the engine: distillation by hand, the teacher, fine-tuning inside the gated network."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import lively, relative_error
from paam import Pruner
from paam.config.recipe import DistillSettings, Recipe, recipe_from_tree
from paam.errors import DivergedError
from paam.events import Vanished
from paam.methods import phases_of
from paam.runs.checkpoint import read_newest_checkpoint, write_checkpoint
from paam.train.divergence import check_epoch, vanished_scales
from paam.train.ema import EMA
from paam.train.engine import Engine
from paam.train.flat import FlatParameters
from paam.train.phase import Phase
from paam.train.state import engine_state, restore_engine
from paam.train.steps import distillation, make_loss

# ---------------------------------------------------------------- distillation


def test_distillation_by_hand():
    """Two classes, temperature 2: logits 0 and 2 ln 3 soften to 1/4 and 3/4, those of the network to 1/2 each."""
    wanted = torch.tensor([[0.0, 2 * math.log(3)]])
    ours = torch.tensor([[5.0, 5.0]])
    divergence = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert float(distillation(ours, wanted, 2.0)) == pytest.approx(4 * divergence, rel=1e-6)
    # The mean over images, not the sum; and nothing for what agrees.
    pair = distillation(torch.cat([ours, wanted]), torch.cat([wanted, wanted + 7]), 2.0)
    assert float(pair) == pytest.approx(4 * divergence / 2, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_is_the_weighted_sum_of_both(weight):
    torch.manual_seed(0)
    network, teacher = nn.Linear(3, 4), nn.Linear(3, 4)
    images, labels = torch.randn(5, 3), torch.arange(5) % 4
    loss = make_loss(network, teacher=teacher, distill=DistillSettings(weight, 3.0))(images, labels)
    plain = F.cross_entropy(network(images), labels)
    p, q = (teacher(images) / 3).softmax(1), (network(images) / 3).softmax(1)
    expected = (1 - weight) * plain + weight * 9 * (p * (p.log() - q.log())).sum(1).mean()
    torch.testing.assert_close(loss, expected)
    if weight == 0:
        assert torch.equal(loss, plain)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


# ---------------------------------------------------------------- networks in a run


class Block(nn.Module):
    """A residual block between two layers: a stream, inner filters, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 10, 3, 1, 1, bias=False), nn.BatchNorm2d(10)
        self.conv3, self.bn3 = nn.Conv2d(10, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.conv4, self.bn4 = nn.Conv2d(8, 9, 3, 2, 1, bias=True), nn.BatchNorm2d(9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.bn3(self.conv3(F.relu(self.bn2(self.conv2(x))))))
        return self.head(F.relu(self.bn4(self.conv4(x))).mean((2, 3)))


class Batches:
    """float64 images of three kinds, new ones in every step."""

    steps = 4

    def epoch(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(start, self.steps):
            generator = torch.Generator().manual_seed(100 * epoch + step)
            labels = torch.arange(12) % 3
            noise = torch.randn(12, 1, 6, 6, generator=generator, dtype=torch.float64)
            yield noise + labels.view(-1, 1, 1, 1), labels


def recipe(**changes) -> Recipe:
    tree = {
        "target": {"keep_filters": 0.6, "floor": 0.3},
        "schedule": {"warmup": 1, "cycles": 1, "score": 1, "weight": 1, "finetune": 2},
        "warmup": {"lr": 0.05},
        "score": {"lr": 0.05},
        "weight": {"lr": 1e-3, "weight_decay": 0.1},
        "finetune": {"lr": 0.05, "weight_decay": 0.02, "nesterov": True},
    }
    return recipe_from_tree({**tree, **changes})


def engine(given: Recipe, *, masked: bool = False, channels_last: bool = False) -> Engine:
    torch.manual_seed(0)
    model = lively(Block())
    if channels_last:  # as on GPUs
        model = model.to(memory_format=torch.channels_last)
    pruner = Pruner(model, torch.zeros(1, 1, 6, 6, dtype=torch.float64), inplace=True, score_lr=0.05)
    made = Engine(pruner, given, phases_of(given), Batches(), seed=0, emit=lambda event: None)
    if masked:  # the engine itself does so on GPUs only
        made.networks.masked = True
    return made


def run(made: Engine, first: int, last: int) -> Engine:
    for epoch in range(first, last):
        made.run_epoch(epoch, None)
    return made


def test_the_teacher_is_the_network_after_warm_up_and_stays_it():
    made = run(engine(recipe(distill={"weight": 0.5})), 0, 1)
    after_warmup = copy.deepcopy(made.pruner.network.traced.model.state_dict())
    teacher = made.networks.teacher(fused=False)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    run(made, 1, 5)
    moved = made.pruner.network.traced.model.state_dict()
    assert not torch.equal(moved["conv4.weight"], after_warmup["conv4.weight"])
    for copied in (teacher, made.networks.teacher(fused=False)):
        for name, value in copied.state_dict().items():
            assert torch.equal(value, after_warmup[name]), name


def test_a_network_that_is_partly_dead_after_warm_up_is_told_of(monkeypatch):
    made = engine(recipe())
    told = []
    made.emit = told.append
    norms = {name: m for name, m in made.pruner.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    usual = vanished_scales(made.pruner.model, 0)
    name, norm = next(iter(norms.items()))
    total = sum(m.num_features for m in norms.values())
    nn.init.constant_(norm.weight, -0.019)
    found = vanished_scales(made.pruner.model, 3)
    assert usual is None
    assert found == Vanished(epoch=3, scales=norm.num_features, of=total, layers=name)
    monkeypatch.setattr("paam.train.divergence.VANISHED", 100.0)  # then all of them have
    run(made, 0, made.recipe.schedule.total)
    assert [event.epoch for event in told if isinstance(event, Vanished)] == [made.recipe.schedule.warmup - 1]


def test_without_warm_up_the_teacher_is_the_network_as_it_came():
    given = recipe(distill={"weight": 0.5}, schedule={"warmup": 0, "cycles": 1, "score": 1, "weight": 1, "finetune": 1})
    made = engine(given)
    came = copy.deepcopy(made.pruner.network.traced.model.state_dict())
    run(made, 0, 3)
    for name, value in made.networks.teacher(fused=False).state_dict().items():
        assert torch.equal(value, came[name]), name


def test_a_weight_of_zero_changes_nothing_and_one_above_does():
    runs = [run(engine(recipe(**changes)), 0, 5) for changes in ({}, {"distill": {"weight": 0.0, "temperature": 9.0}})]
    states = [made.result().state_dict() for made in runs]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    taught = run(engine(recipe(distill={"weight": 0.5})), 0, 5)
    assert not torch.equal(taught.result().state_dict()["head.bias"], states[0]["head.bias"])


# ---------------------------------------------------------------- fine-tuning inside the gated network


def test_fine_tuning_inside_the_gated_network_gives_the_small_one():
    """Closed channels, and all that reads them alone, are the only difference; the small network has none of them."""
    given = recipe(distill={"weight": 0.3})
    plain, masked = run(engine(given), 0, 5), run(engine(given, masked=True), 0, 5)
    assert plain.pruner.selection == masked.pruner.selection
    widths = {name: (len(kept.filters), kept.width) for name, kept in plain.pruner.selection.plan.groups.items()}
    assert all(0 < kept < width for kept, width in widths.values())
    left, right = plain.result().state_dict(), masked.result().state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    before = run(engine(given), 0, 3).pruner.compact().state_dict()
    assert not torch.equal(before["head.bias"], left["head.bias"])  # it did train


def test_what_is_cut_out_at_the_end_computes_what_the_gated_network_does():
    made = run(engine(recipe(), masked=True), 0, 5)
    small = made.networks.small
    assert small is made.result()
    images, _ = next(Batches().epoch(99, 0))
    with torch.no_grad():
        gated = made.pruner.model.eval()(images)
        assert relative_error(small.eval()(images), gated) < 1e-9
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in made.pruner.network_parameters())


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("stop", [4, None])
def test_a_masked_fine_tune_goes_on_to_the_same_bits(stop, average):
    """Between two of its epochs, and inside one."""
    given = recipe(finetune={"lr": 0.05, "average": average})
    whole = run(engine(given, masked=True), 0, 5)
    begun = run(engine(given, masked=True), 0, 4)
    if stop is None:
        taken = []
        begun.on_step, begun.stop = lambda step, steps: taken.append(step), lambda: len(taken) == 2
        assert not begun.run_epoch(4, None)
    tensors, header = engine_state(begun, 4)
    resumed = engine(given, masked=True)
    restore_engine(resumed, 4, {key: value.clone() for key, value in tensors.items()}, header)
    run(resumed, 4, 5)
    for name, value in whole.result().state_dict().items():
        assert torch.equal(value, resumed.result().state_dict()[name]), name


def test_scorers_may_only_be_missing_once_they_are_not_needed():
    made = run(engine(recipe(), masked=True), 0, 2)
    tensors, header = engine_state(made, 2)
    tensors = {name: value for name, value in tensors.items() if not name.startswith("gated/scorers")}
    header["layouts"] = {part: layout for part, layout in header["layouts"].items() if part != "gated/scorers"}
    with pytest.raises(RuntimeError, match="Missing key"):
        restore_engine(engine(recipe(), masked=True), 2, tensors, header)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("epoch", range(1, 7))
def test_a_checkpoint_goes_on_in_another_memory_layout(tmp_path, epoch, masked):
    """As when a run begun on a GPU goes on on a CPU: in every phase, the dense control among them."""
    given = recipe(
        schedule={"warmup": 1, "cycles": 1, "score": 1, "weight": 1, "finetune": 2, "control": True},
        finetune={"lr": 0.05, "average": 0.8},
    )
    whole = run(engine(given, masked=masked, channels_last=True), 0, epoch)
    tensors, header = engine_state(whole, epoch)
    assert len(tensors) < 20 < len(whole.pruner.model.state_dict())  # blocks, not one tensor per layer
    write_checkpoint(tmp_path, (epoch, 0), tensors, header)
    (stored, told), _ = read_newest_checkpoint(tmp_path)
    resumed = engine(given, masked=masked)
    for value in resumed.pruner.model.state_dict().values():
        value.fill_(9)
    restore_engine(resumed, epoch, stored, told)
    pairs = [(resumed.networks.dense_state, whole.networks.dense_state)]
    networks = [(made.networks.small or made.pruner.model, made.networks.control) for made in (resumed, whole)]
    for one, other in zip(*networks, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            pairs.append((one.state_dict(), other.state_dict()))
    learned = {id(parameter) for parameter in whole.pruner.scorer_parameters()}
    scorers = {name for name, parameter in whole.pruner.model.named_parameters() if id(parameter) in learned}
    over = scorers if epoch > 3 else set()  # the fine-tune needs none of them: they would be most of the file
    assert any(scorers <= layout.keys() for layout in header["layouts"].values()) == (epoch <= 3)
    for one, other in pairs:
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items() if name not in over)
    run(whole, epoch, given.schedule.total)
    run(resumed, epoch, given.schedule.total)
    for network in ("small", "control"):
        left, right = (getattr(made.networks, network).state_dict() for made in (whole, resumed))
        for name, value in left.items():
            torch.testing.assert_close(right[name], value, rtol=1e-7, atol=1e-9)


def test_what_is_measured_and_left_is_the_mean_and_training_goes_on_from_the_weights():
    """Each epoch's measure sees the mean of all weights since the phase began; the steps are those without one."""
    seen: dict[float, list[dict[str, Tensor]]] = {0.0: [], 0.5: []}
    for decay, measured in seen.items():
        made = run(engine(recipe(finetune={"lr": 0.05, "average": decay})), 0, 3)
        steps = []

        def note(step, steps_in_all, steps=steps, made=made):
            steps.append({name: value.clone() for name, value in made.networks.small.state_dict().items()})

        def measure(network, phase, measured=measured):
            measured.append({name: value.clone() for name, value in network.state_dict().items()})
            return 0.0

        made.on_step = note
        for epoch in (3, 4):
            made.run_epoch(epoch, measure)
        seen[decay] = [*steps, *measured, {name: v.clone() for name, v in made.result().state_dict().items()}]
    steps, plain = seen[0.0][:8], seen[0.0][8:]
    others, means = seen[0.5][:8], seen[0.5][8:]
    assert all(torch.equal(one[name], other[name]) for one, other in zip(steps, others, strict=True) for name in one)
    for name in ("conv1.weight", "bn1.running_var", "head.bias"):
        first = run(engine(recipe()), 0, 3).pruner.compact().state_dict()[name]
        by_hand = first
        for number, step in enumerate(steps, 1):
            by_hand = 0.5 * by_hand + 0.5 * step[name]
            if number in (4, 8):
                torch.testing.assert_close(means[number // 4 - 1][name], by_hand, rtol=1e-9, atol=1e-12)
        assert torch.equal(means[2][name], means[1][name])  # what the phase leaves
        assert torch.equal(plain[1][name], steps[-1][name])


def test_a_mean_of_bfloat16_weights_moves_by_less_than_they_can_tell():
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(layer.weight, 1.0)
    average = EMA(FlatParameters({"weight": layer.weight}), layer, 0.999)
    nn.init.constant_(layer.weight, 2.0)
    for _ in range(1000):
        average.update()
    with average.in_place():
        assert layer.weight.item() == pytest.approx(2 - 0.999**1000, abs=2**-7)  # 1.63; neighbours are 2**-7 apart
    assert layer.weight.item() == 2.0


@pytest.mark.parametrize(
    ("losses", "exploded"),
    [
        ([1000.0] + [500.0] * 20, False),  # a bad start that gets better
        ([0.2] + [90.0] * 20, False),
        ([0.2] + [120.0] * 20, True),
        ([0.2] * 400 + [1e5] * 5, True),  # at the very end
        ([1e5] * 5 + [0.2] * 400, False),
    ],
)
def test_a_loss_has_exploded_where_an_epoch_ends_far_above_its_beginning(losses, exploded):
    values = [torch.ones(3)]
    with pytest.raises(DivergedError, match="exploded in epoch 8") if exploded else nullcontext():
        check_epoch([torch.tensor(loss) for loss in losses], values, Phase("finetune", 9, "finetune"), 7, losses[0])
