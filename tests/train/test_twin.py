"""The engine against a twin: a hand-written loop with torch alone, phase by phase, step by step, on the CPU.

The twin has its own forward pass, gates, scores, penalty, distillation, schedule and augmentation. It shares with the
engine the first weights, the random numbers of an epoch, and which filters a selection kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paam import Pruner
from paam.config.recipe import recipe_from_tree
from paam.data import Augmentation, Split
from paam.data.augment import Draws, draw
from paam.data.batches import Normalization, TrainingBatches
from paam.methods import phases_of
from paam.train.engine import Engine

STEPS, BATCH, CLASSES, SEED = 6, 16, 4, 3
PENALTY, ALPHA, TEMPERATURE, TAUGHT = 2e-3, 1.5, 2.0, 0.4
MEAN = {"warmup": 0.7, "finetune": 0.8}
RATES = {"warmup": 0.02, "score": 0.01, "weight": 1e-3, "finetune": 0.02}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, gates: tuple[Any, Any] = (1.0, 1.0)) -> Tensor:
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu() * gates[0], 2)
        x = self.bn2(self.conv2(x)).relu() * gates[1]
        return self.head(x.mean((2, 3)))


class Plain(Net):
    """What the engine is given: the same without gates."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 2)
        return self.head(self.bn2(self.conv2(x)).relu().mean((2, 3)))


def recipe():
    return recipe_from_tree(
        {
            "data": {"crop": 1, "flip": True, "cutout": 3, "mixup": 0.3},
            "prune": {"penalty": PENALTY, "alpha": ALPHA},
            "target": {"keep_filters": 0.6},
            "schedule": {"warmup": 2, "cycles": 1, "score": 1, "weight": 1, "finetune": 2, "control": True},
            "warmup": {
                "lr": RATES["warmup"],
                "decay": "step",
                "ramp": 1,
                "weight_decay": 0.01,
                "average": MEAN["warmup"],
            },
            "score": {"lr": RATES["score"]},
            "weight": {"lr": RATES["weight"], "weight_decay": 0.02},
            "finetune": {"lr": RATES["finetune"], "nesterov": True, "weight_decay": 0.01, "average": MEAN["finetune"]},
            "distill": {"weight": TAUGHT, "temperature": TEMPERATURE},
        }
    )


def pixels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(STEPS * BATCH + 5) % CLASSES
    images = torch.randint(0, 100, (len(labels), 1, 8, 8), generator=generator)
    return (images + 40 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels


# ---------------------------------------------------------------- the engine


def engine_losses() -> tuple[Net, Pruner, dict[int, list[float]], Engine]:
    torch.manual_seed(1)
    net = Plain()
    first = copy.deepcopy(net)
    given = recipe()
    pruner = Pruner(net, torch.zeros(1, 1, 8, 8), penalty=PENALTY, alpha=ALPHA, score_lr=RATES["score"], inplace=True)
    start = copy.deepcopy([list(gate.scorer.parameters()) for gate in pruner.gates.values()])
    images, labels = pixels()
    batches = TrainingBatches(
        Split(images, labels),
        Normalization((0.4,), (0.3,)),
        given.data.augmentation,
        batch_size=BATCH,
        classes=CLASSES,
        seed=SEED,
        device="cpu",
    )
    engine = Engine(pruner, given, phases_of(given), batches, seed=SEED, emit=lambda event: None)
    losses: dict[int, list[float]] = {}

    def watched(found: list[Tensor], phase: Any, epoch: int) -> None:
        losses[epoch] = torch.stack(found).tolist()

    with mock.patch("paam.train.engine.check_losses", watched):
        for epoch in range(given.schedule.total):
            engine.run_epoch(epoch, None)
    twin = Net()
    twin.load_state_dict(first.state_dict())
    twin.scorers = start  # type: ignore[assignment]
    return twin, pruner, losses, engine


# ---------------------------------------------------------------- the twin


def batch(draws: Draws, step: int) -> tuple[Tensor, Tensor]:
    """One batch, image by image and pixel by pixel."""
    images, labels = pixels()
    made, targets = [], []
    for place in range(step * BATCH, (step + 1) * BATCH):
        number = int(draws.order[place])
        image = images[number, 0].tolist()
        top, left = int(draws.shifts[0, place]) - 1, int(draws.shifts[1, place]) - 1
        middle = [math.floor(float(hole) * 8) for hole in draws.holes[:, place]]
        result = np.zeros((8, 8))
        for y in range(8):
            for x in range(8):
                row, column = y + top, (7 - x if draws.flips[place] else x) + left
                value = image[row][column] if 0 <= row < 8 and 0 <= column < 8 else 0
                hole = abs(y - middle[0]) <= 1 and abs(x - middle[1]) <= 1  # three pixels wide
                result[y, x] = 0 if hole else (value / 255 - 0.4) / 0.3
        made.append(result)
        targets.append(np.eye(CLASSES)[int(labels[number])])
    share = float(draws.mix[step])
    mixed = [share * a + (1 - share) * b for a, b in zip(made, [made[-1], *made], strict=False)]
    shares = [share * a + (1 - share) * b for a, b in zip(targets, [targets[-1], *targets], strict=False)]
    return torch.tensor(np.stack(mixed), dtype=torch.float32)[:, None], torch.tensor(np.stack(shares)).float()


def cross_entropy(logits: Tensor, shares: Tensor) -> Tensor:
    return -(shares * (logits - logits.exp().sum(1, keepdim=True).log())).sum(1).mean()


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """T^2 times sum p log(p / q), the mean over images."""
    ours, theirs = (value.div(TEMPERATURE).softmax(1) for value in (logits, wanted))
    return TEMPERATURE**2 * (theirs * (theirs / ours).log()).sum(1).mean()


def scores(net: Net) -> list[Tensor]:
    """KQ as printed: all pairs of queries and keys."""
    found = []
    for conv, (query, key) in zip((net.conv1, net.conv2), net.scorers, strict=True):  # type: ignore[arg-type]
        rows = conv.weight.detach().flatten(1)
        pairs = (rows @ query) @ (rows @ key).T
        z = pairs.mean(1) / (ALPHA * math.sqrt(query.shape[1]))
        found.append(torch.where(z < 0, z.exp(), 1 + 0.01 * z))
    return found


def train(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    optimizer: Any,
    rate: Callable[[int], float],
    epoch: int,
    after: Callable[[], None] = lambda: None,
):
    draws = draw(Augmentation(1, True, False, 3, 0.3), STEPS * BATCH + 5, STEPS, SEED * 1_000_003 + epoch)
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        loss = loss_of(*batch(draws, step))
        loss.backward()
        optimizer.step()
        after()
        losses.append(float(loss.detach()))
    return losses


def mean_of(net: Net, share: float) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Means of weights and statistics, and what is to be called after every step."""
    means = {name: value.clone() for name, value in net.state_dict().items() if value.is_floating_point()}

    def after() -> None:
        for name, mean in means.items():
            means[name] = share * mean + (1 - share) * net.state_dict()[name]

    return means, after


def gates_of(values: list[Tensor]) -> tuple[Tensor, Tensor]:
    one, two = (value.view(1, -1, 1, 1) for value in values)
    return one, two


def cut(net: Net, masks: list[Tensor]) -> Net:
    """The small network, by slicing."""
    small = copy.deepcopy(net)
    one, two = (mask.bool() for mask in masks)
    small.conv1.weight = nn.Parameter(net.conv1.weight.detach()[one])
    small.conv2.weight = nn.Parameter(net.conv2.weight.detach()[two][:, one])
    small.head.weight = nn.Parameter(net.head.weight.detach()[:, two])
    for bn, mask in ((small.bn1, one), (small.bn2, two)):
        for name in ("weight", "bias"):
            setattr(bn, name, nn.Parameter(getattr(bn, name).detach()[mask]))
        for name in ("running_mean", "running_var"):
            setattr(bn, name, getattr(bn, name)[mask])
    return small


def sgd(net: nn.Module, *, nesterov: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01, nesterov=nesterov)


def twin_losses(net: Net, masks: list[Tensor]) -> tuple[dict[int, list[float]], Net, Net]:
    losses: dict[int, list[float]] = {}
    # Warm-up: epoch 0 rises from 0 to the rate (a thousandth of an epoch at the least); epoch 1 is behind the ramp,
    # and its second half has a tenth, its last quarter a hundredth.
    optimizer = sgd(net)
    rise = [RATES["warmup"] * max(step / STEPS, 1e-3) for step in range(STEPS)]
    means, after = mean_of(net, MEAN["warmup"])
    losses[0] = train(lambda x, y: cross_entropy(net(x), y), optimizer, lambda step: rise[step], 0, after)
    fall = [RATES["warmup"] * share for share in (1, 1, 1, 0.1, 0.1, 0.01)]
    losses[1] = train(lambda x, y: cross_entropy(net(x), y), optimizer, lambda step: fall[step], 1, after)
    net.load_state_dict(means, strict=False)
    teacher = copy.deepcopy(net).eval()

    def taught(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            logits = model(x)
            return (1 - TAUGHT) * cross_entropy(logits, y) + TAUGHT * divergence(logits, teacher(x).detach())

        return loss

    net.eval()  # statistics stand still
    learned = [parameter for pair in net.scorers for parameter in pair]  # type: ignore[attr-defined]

    def penalised(x: Tensor, y: Tensor) -> Tensor:
        found = scores(net)
        # Feature maps of 8 x 8 and 4 x 4: the first layer weighs four times as much.
        penalty = PENALTY * (4 * found[0].abs().sum() + found[1].abs().sum())
        return cross_entropy(net(x, gates_of(found)), y) + penalty

    losses[2] = train(penalised, torch.optim.Adam(learned), lambda step: RATES["score"], 2)

    net.train()
    asleep = copy.deepcopy(net)
    weights = torch.optim.Adam(net.parameters(), weight_decay=0.02)
    losses[3] = train(taught(lambda x: net(x, gates_of(masks))), weights, lambda step: RATES["weight"], 3)
    with torch.no_grad():
        for number, mask in enumerate(masks, 1):
            for name in (f"conv{number}", f"bn{number}"):
                now, before = (list(model.get_submodule(name).parameters()) for model in (net, asleep))
                for parameter, value in zip(now, before, strict=True):
                    parameter[mask == 0] = value[mask == 0]

    def cosine(epoch: int, epochs: int) -> Callable[[int], float]:
        return lambda step: RATES["finetune"] / 2 * (1 + math.cos(math.pi * (epoch + step / STEPS) / epochs))

    small = cut(net, masks)
    optimizer = sgd(small, nesterov=True)
    means, after = mean_of(small, MEAN["finetune"])
    for epoch in range(2):
        losses[4 + epoch] = train(taught(small), optimizer, cosine(epoch, 2), 4 + epoch, after)
    small.load_state_dict(means, strict=False)
    control = copy.deepcopy(teacher).train()
    optimizer = sgd(control, nesterov=True)
    means, after = mean_of(control, MEAN["finetune"])
    for epoch in range(4):  # as many as both phases and the fine-tune
        losses[6 + epoch] = train(taught(control), optimizer, cosine(epoch, 4), 6 + epoch, after)
    control.load_state_dict(means, strict=False)
    return losses, small, control


def test_every_phase_is_that_of_a_hand_written_loop():
    twin, pruner, ours, engine = engine_losses()
    masks = [gate.mask.clone() for gate in pruner.gates.values()]
    assert sum(int(mask.sum()) for mask in masks) == int(0.6 * 14)
    assert all(0 < mask.sum() < len(mask) for mask in masks)
    theirs, small, control = twin_losses(twin, masks)
    phases = [phase.name for phase in phases_of(recipe()) for _ in range(phase.epochs)]
    assert phases == ["warmup"] * 2 + ["score", "weight"] + ["finetune"] * 2 + ["control"] * 4
    for epoch, phase in enumerate(phases):
        assert ours[epoch] == pytest.approx(theirs[epoch], rel=1e-5), (epoch, phase)
    for truth, network in ((small, engine.networks.small), (control, engine.networks.control)):
        found = network.state_dict()
        for name, value in truth.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_scores_after_the_phase_are_those_of_the_twin():
    """Scores of the end differ from 1 by what six steps did; the twin's must have gone the same way."""
    twin, pruner, _, _ = engine_losses()
    first = [score.clone() for score in scores(twin)]
    assert all(torch.equal(score, torch.ones_like(score)) for score in first)
    twin_losses(twin, [gate.mask.clone() for gate in pruner.gates.values()])
    for theirs, ours in zip(scores(twin), pruner.scores().values(), strict=True):
        assert (ours - 1).abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)
