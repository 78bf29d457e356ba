"""Training of small networks: they compute, and keep as statistics, what the gated network does in training mode."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_leaves, tree_structure

from networks import compacted, lively, random_choice, relative_error
from paam import Pruner
from paam.graph.network import Choice
from paam.graph.rewired import RewiredModel

GENERATOR = torch.Generator().manual_seed(0)


def images(batch: int, size: int = 8) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64, generator=GENERATOR)


def unit(inputs: int, outputs: int, **options: Any) -> nn.Sequential:
    """What is closed behind it leaves no constant: such a network trains as the gated one does."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, **options), nn.BatchNorm2d(outputs), nn.ReLU())


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)).mean((2, 3)))


class Streams(Chain):
    """Two blocks add into one stream, which keeps other channels than they do."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = unit(8, 8), unit(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + self.b(x)
        x = x + self.d(self.c(x))
        return self.head(x.mean((2, 3)))


class Joined(Chain):
    """A U-Net: down, up again, and what was there before beside it, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.up, self.last = unit(8, 8, stride=2), nn.ConvTranspose2d(8, 8, 2, 2), unit(16, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        y = F.relu(self.up(self.deep(x)))
        return self.head(self.last(torch.cat([y, x.flip(1)], 1)).mean((2, 3)))


class Excited(Chain):
    """Squeeze and excitation around a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.squeeze, self.excite = unit(8, 8, groups=8), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.each(self.a(x))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))[:, :, None, None]
        return self.head(self.b(x).mean((2, 3)))


class Again(Chain):
    """One unit is called twice, and its norm counts both calls."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head((self.b(self.b(x)) + x).mean((2, 3)))


class Shuffled(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = F.channel_shuffle(self.a(x), 2)
        first, second = x.chunk(2, 1)
        return self.head(self.b(torch.cat([second, first], 1)).mean((2, 3)))


class Answer(NamedTuple):
    main: Tensor
    auxiliary: Tensor | None
    features: dict[str, Tensor]


class Auxiliary(Chain):
    """As in GoogLeNet: an auxiliary head in training, and a namedtuple always."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.aside, self.other = unit(8, 8), unit(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Answer:
        x = self.a(x)
        auxiliary = self.other(self.aside(x).mean((2, 3))) if self.training else None
        x = x + self.b(x)
        x = self.c(x)
        return Answer(self.head(x.mean((2, 3))), auxiliary, {"last": x})


def trained_alike(small: nn.Module, gated: nn.Module, x: Tensor, bound: float = 1e-9) -> Any:
    """A training forward of both, and an evaluation with the statistics that it left. Returns the answers."""
    answers = []
    for mode in (True, False):
        with torch.no_grad() if not mode else torch.enable_grad():
            found, truth = small.train(mode)(x), gated.train(mode)(x)
        assert tree_structure(found) == tree_structure(truth)
        for value, wanted in zip(tree_leaves(found), tree_leaves(truth), strict=True):
            assert (value is wanted is None) or relative_error(value.detach(), wanted.detach()) < bound
        answers.append(found)
    return answers[0]


def learns(small: nn.Module, answer: Any) -> None:
    """Backward, from all that was answered, into every parameter."""
    sum(value.square().mean() for value in tree_leaves(answer) if isinstance(value, Tensor)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in small.parameters())
    assert any(bool(p.grad.abs().max() > 0) for p in small.parameters())


def some_kept(choice: Choice) -> Choice:
    """Groups that were emptied keep one filter."""
    return {name: mask | (np.arange(len(mask)) == 0) & ~mask.any() for name, mask in choice.items()}


STRUCTURES = [Chain, Streams, Joined, Excited, Again, Shuffled, Auxiliary]


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize("kind", STRUCTURES)
def test_training_is_that_of_the_gated_network(kind: type[nn.Module], streams: str) -> None:
    pruner = Pruner(lively(kind()), images(2), scorer="free", streams=streams)
    kinds = set()
    for seed in range(6):
        small = compacted(pruner, some_kept(random_choice(pruner.network, seed)))
        kinds.add(isinstance(small, RewiredModel))
        gated = copy.deepcopy(pruner.model)
        answer = trained_alike(small, gated, images(4))
        learns(small, answer)
    if kind in (Chain, Streams, Again, Auxiliary):
        assert (streams == "independent" and kind is not Chain) in kinds  # with index maps, and without


@pytest.mark.parametrize("streams", ["independent", "tied"])
def test_statistics_are_those_of_the_kept_channels(streams: str) -> None:
    """The gated network's, of the filters that stay; moved from where they were."""
    pruner = Pruner(lively(Streams()), images(2), scorer="free", streams=streams)
    choice = some_kept(random_choice(pruner.network, 1, empty=0))
    small, gated, x = compacted(pruner, choice), pruner.model, images(4)
    before = {
        name: norm.running_var.clone() for name, norm in small.named_modules() if isinstance(norm, nn.BatchNorm2d)
    }
    for _ in range(3):
        small.train()(x), gated.train()(x)
    kept = {
        layer: mask
        for group in pruner.network.groups
        for layer, mask in ((n, choice[group.name]) for n in group.layers)
    }
    assert len(before) == 4
    for name, old in before.items():
        norm, whole = small.get_submodule(name), gated.get_submodule(name)
        mask = torch.from_numpy(kept[name.replace(".1", ".0")])
        assert relative_error(norm.running_mean, whole.running_mean[mask]) < 1e-9
        assert relative_error(norm.running_var, whole.running_var[mask]) < 1e-9
        assert not torch.allclose(norm.running_var, old)
        assert norm.num_batches_tracked == 3


@pytest.mark.parametrize(("streams", "rewired"), [("independent", True), ("tied", False)])
def test_a_namedtuple_stays_one(streams: str, rewired: bool) -> None:
    """Whether the class is kept or not; in training with the auxiliary head, in evaluation without."""
    pruner = Pruner(lively(Auxiliary()), images(2), scorer="free", streams=streams)
    choice = {
        group.name: np.arange(group.width) % (2 + place % 2) == 0 for place, group in enumerate(pruner.network.groups)
    }
    small = compacted(pruner, choice)
    assert isinstance(small, RewiredModel) == rewired
    assert isinstance(small, Auxiliary) != rewired
    for mode in (True, False):
        answer = small.train(mode)(images(3))
        assert type(answer) is Answer
        assert (answer.auxiliary is not None) == mode
        assert set(answer.features) == {"last"}


class Normed(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.b[0] = spectral_norm(self.b[0])


def test_a_spectral_norm_is_left_alone_until_it_trains() -> None:
    """In training whoever reads its weight moves its vectors: neither recording, nor scorers, nor score phases do."""
    model = lively(Normed()).train()
    before = {name: vector.clone() for name, vector in model.named_buffers()}
    pruner = Pruner(model, images(2), scorer="kq", inplace=True)
    with pruner.scoring():
        pruner.model.train()
        for _ in range(2):
            pruner.optimizer.zero_grad()
            (pruner.model(images(4)).square().mean() + pruner.penalty()).backward()
            pruner.optimizer.step()
    pruner.select(keep_filters=0.5)
    pruner.compact()
    assert all(torch.equal(vector, before[name]) for name, vector in model.named_buffers())


def test_a_spectral_norm_trains_before_it_is_written_out() -> None:
    """In training it moves its vectors; the small network holds the weight that it computes in the end."""
    model = lively(Normed())
    pruner = Pruner(model, images(2), scorer="free", inplace=True)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), images(4)
    before = {name: value.clone() for name, value in model.b[0].state_dict().items()}
    with pruner.weighting(keep_filters=0.5):
        for _ in range(3):
            twin = copy.deepcopy(model).train()
            optimizer.zero_grad()
            pruner.model(x).square().mean().backward()
            twin(x)  # its norm takes the same step, whatever comes behind it
            optimizer.step()
            for name, vector in twin.b[0].named_buffers():
                assert torch.allclose(vector, dict(model.b[0].named_buffers())[name], atol=1e-12)
    after = model.b[0].state_dict()
    moved = {name.rpartition(".")[2] for name in before if not torch.allclose(before[name], after[name])}
    assert moved == {"original", "_u", "_v"}  # the bias does not matter before a batch norm
    small = pruner.compact().eval()
    whole = model.eval().b[0].weight.detach()
    kept = [torch.from_numpy(mask) for _, mask in sorted(pruner.network.choice(pruner.selection.plan).items())]
    assert relative_error(small.b[0].weight.detach(), whole[kept[1]][:, kept[0]]) < 1e-12
    y = images(3)
    with torch.no_grad():
        assert relative_error(small(y), pruner.model.eval()(y)) < 1e-9
    learns(small, small.train()(y))


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "size"), [("googlenet", 96), ("inception_v3", 299)])
def test_auxiliary_heads(name: str, size: int) -> None:
    """torchvision's, whose training forward answers with two or three sets of logits in a namedtuple."""
    from paam.models.zoo import import_torchvision
    from zoo import removed_at_random

    models = import_torchvision().models
    options = {"dropout_aux": 0.0} if name == "googlenet" else {}
    model = getattr(models, name)(
        weights=None, num_classes=10, aux_logits=True, init_weights=False, dropout=0.0, **options
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # noise would be drawn in the same order, but costs
    x = images(2, size)
    model = lively(model, example=x)
    pruner = Pruner(model, x[:1], scorer="free")
    gated = {group.name.partition(".")[0] for group in pruner.network.groups}
    assert {head for head in gated if head.lower().startswith("aux")}
    small = compacted(pruner, removed_at_random(pruner.network, 0.5))
    with torch.no_grad():
        assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9
    answer = trained_alike(small, pruner.model, x, 1e-8)
    assert type(answer).__name__ in ("GoogLeNetOutputs", "InceptionOutputs")
    assert [len(logits) for logits in answer] == [2] * (3 if name == "googlenet" else 2)
    learns(small, answer)
