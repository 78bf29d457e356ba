"""On a GPU: the fast engine does what the plain one does, step by step, and what the CPU does in float32.

Training amplifies rounding: after a hundred steps even float32 differs in the second digit, and by how much is chance.
So the yardstick is the plain run itself with noise of rounding's size on its images, the farthest of four: another way
to compute may differ from it by twice as much.

Run by hand where there is a GPU: `python -m pytest -m gpu -s tests/train/cuda/test_gpu.py`;
benchmarks/agreement.h200.txt holds such an output.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paam.config.recipe import recipe_from_tree
from paam.data import Augmentation, Split
from paam.data.batches import Normalization, TrainingBatches
from paam.graph.modes import evaluating
from paam.methods import phases_of
from paam.models import resnet20
from paam.pruning.pruner import Pruner
from paam.train.cuda.capture import PLAIN_STEPS
from paam.train.engine import Engine
from paam.train.evaluation import Monitor
from paam.train.phase import place_of, total_epochs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # Of some versions of torch, about their own code, when torch.compile is first asked for.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

STEPS = PLAIN_STEPS + 4
PHASES = ("warmup", "score", "weight", "finetune")
PLAIN = {"capture": False, "compile": False, "fused": False}


class Noisy(Normalization):
    """Images times 1 + noise, of the size of one rounding."""

    noise, draw = 0.0, 0

    def __call__(self, pixels: Tensor) -> Tensor:
        images = super().__call__(pixels)
        generator = torch.Generator(images.device).manual_seed(self.draw)
        return images * (1 + self.noise * torch.randn(images.shape, generator=generator, device=images.device))


def tracked(device: str, noise: float = 0.0, draw: int = 0, **train: Any) -> dict[str, list[float]]:
    """Losses of every step of one epoch of each phase."""
    normalize = Noisy((0.5,) * 3, (0.25,) * 3)
    object.__setattr__(normalize, "noise", noise)
    object.__setattr__(normalize, "draw", draw)
    recipe = recipe_from_tree(
        {
            "model": {"name": "resnet20"},
            "target": {"keep_macs": 0.5},
            "schedule": {"warmup": 1, "cycles": 1, "score": 1, "weight": 1, "finetune": 1},
            # Rates low enough that rounding is not amplified beyond recognition within an epoch.
            "warmup": {"lr": 5e-3},
            "score": {"lr": 1e-3},
            "weight": {"lr": 1e-4},
            "finetune": {"lr": 5e-3},
            "distill": {"weight": 0.5},
            "train": train,
        }
    )
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(STEPS * 64) % 10
    images = torch.randint(0, 60, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=generator)
    images += (labels * 20).to(torch.uint8)[:, None, None, None]  # something to learn
    batches = TrainingBatches(
        Split(images, labels),
        normalize,
        Augmentation(crop=4, flip=True, cutout=8, mixup=0.2),
        batch_size=64,
        classes=10,
        seed=0,
        device=device,
    )
    torch.manual_seed(0)
    model = resnet20().to(device)
    if device == "cuda":
        model = model.to(memory_format=torch.channels_last)
    pruner = Pruner(model, torch.zeros(1, 3, 32, 32, device=device), inplace=True, score_lr=1e-3)
    losses: dict[str, list[float]] = {}
    engine = Engine(pruner, recipe, phases_of(recipe), batches, seed=0, emit=lambda event: None)
    for epoch in range(total_epochs(engine.phases)):
        phase = place_of(engine.phases, epoch).phase.name
        seen: list[Tensor] = []

        def watched(found: list[Tensor], *rest: Any, seen: list[Tensor] = seen) -> None:
            seen[:] = found

        with mock.patch("paam.train.engine.check_losses", watched):
            engine.run_epoch(epoch, None)
        replayed = getattr(engine.steps[phase], "images", None) is not None
        assert replayed == bool(train.get("capture")), phase
        losses[phase] = torch.stack(seen).tolist()
    return losses


def differences(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, float]:
    """The largest difference of a step's losses, relative to the loss, in each phase."""
    return {phase: max(abs(a - b) / abs(a) for a, b in zip(one[phase], other[phase], strict=True)) for phase in PHASES}


def farthest(run: dict[str, list[float]], device: str, noise: float, **train: Any) -> dict[str, float]:
    """How far noise takes a run from itself: in each phase the largest difference among four draws."""
    found = [differences(run, tracked(device, noise, draw, **train)) for draw in range(4)]
    return {phase: max(one[phase] for one in found) for phase in PHASES}


def show(label: str, found: dict[str, float]) -> None:
    print(f"{label:44}", "  ".join(f"{phase} {value:.1e}" for phase, value in found.items()))  # noqa: T201 - the output is kept


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    return tracked("cuda", **PLAIN)


@pytest.fixture(scope="module")
def allowed(plain) -> dict[str, float]:
    found = farthest(plain, "cuda", 2**-9, **PLAIN)
    show("bfloat16: plain against itself with noise", found)
    return found


@pytest.mark.parametrize(
    ("label", "train"),
    [
        ("plain again", PLAIN),
        ("captured", {**PLAIN, "capture": True}),
        ("captured and compiled", {**PLAIN, "capture": True, "compile": True}),
        ("fused", {**PLAIN, "fused": True}),
        ("captured and fused", {**PLAIN, "capture": True, "fused": True}),
        ("captured and fused inside the dense network", {**PLAIN, "capture": True, "fused": True, "masked": True}),
    ],
)
def test_fast_runs_agree_with_the_plain_one_within_bfloat16_noise(plain, allowed, label, train):
    found = differences(plain, tracked("cuda", **train))
    show(f"bfloat16: plain against {label}", found)
    assert all(found[phase] < 2 * allowed[phase] for phase in PHASES)


@pytest.mark.parametrize("phase", ["weight", "score"])
def test_gradients_of_fused_kernels_are_as_near_to_float32_as_those_of_torch(phase):
    """Layer by layer: both ways round to bfloat16, so both miss the true gradient by about as much, over eight batches.

    One batch is not enough to say so: a norm may have no more than sixteen scales.
    """
    from paam.train.cuda.fused import fused

    torch.manual_seed(0)
    batches = torch.randn(8, 64, 3, 32, 32, device="cuda")
    labels = torch.arange(64, device="cuda") % 10
    pruner = Pruner(resnet20().cuda().to(memory_format=torch.channels_last), batches[0, :1], inplace=True)
    for parameter in pruner.scorer_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model = pruner.model
    quick = fused(model)
    assert quick is not model
    leaves = pruner.network_parameters() if phase == "weight" else pruner.scorer_parameters()
    names = {parameter: name for name, parameter in model.named_parameters()}

    def gradients(network: torch.nn.Module, images: Tensor, bfloat16: bool) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            loss = torch.nn.functional.cross_entropy(network(images), labels)
        return list(torch.autograd.grad(loss, leaves))

    with pruner.weighting(keep_macs=0.5) if phase == "weight" else pruner.scoring():
        model.train()
        found = []
        for batch in batches:
            images = batch.contiguous(memory_format=torch.channels_last)
            runs = ((model, False), (model, True), (quick, True))
            found.append([gradients(network, images, bfloat16) for network, bfloat16 in runs])
    worst = 0.0
    for place, parameter in enumerate(leaves):
        exact, one, other = (torch.stack([batch[way][place] for batch in found]) for way in range(3))
        missed, allowed = float((other - exact).norm()), float((one - exact).norm())
        worst = max(worst, missed / (allowed + 1e-12))
        assert missed <= 2 * allowed + 1e-3 * float(exact.norm()) + 1e-8, names[parameter]
    show(f"{phase}: fused misses float32 by at most", {"times what torch misses": worst})


@pytest.mark.parametrize("mode", ["dense", "weighting"])
def test_fused_and_captured_evaluation_counts_as_the_plain_one_does(mode):
    """Labels are the network's own answers in float32: every count is high, and a wrong one is not.

    Images differ in colour and logits have no mean, so that answers differ too.
    """
    from paam.train.cuda.fused import fused

    torch.manual_seed(0)
    count = PLAIN_STEPS + 2
    images = torch.randn(count, 400, 3, 32, 32, device="cuda") + torch.randn(count, 400, 3, 1, 1, device="cuda")
    pruner = Pruner(resnet20().cuda().to(memory_format=torch.channels_last), images[0, :1], inplace=True)
    model, quick = pruner.model, fused(pruner.model)
    with pruner.dense():
        model.train()
        for batch in images:
            model(batch)  # running statistics
    with pruner.dense() if mode == "dense" else pruner.weighting(keep_macs=0.5):
        with evaluating(model), torch.inference_mode():
            model.linear.bias.data -= torch.cat([model(batch) for batch in images]).mean(0)
            batches = [(batch, model(batch).argmax(1)) for batch in images]
        counts = [
            Monitor(batches, bfloat16=True, capture=capture)(network, "weight")
            for network, capture in ((model, False), (quick, False), (quick, True))
        ]
    show(f"{mode}: evaluated in bfloat16", dict(zip(("plain", "fused", "captured and fused"), counts, strict=True)))
    assert max(torch.cat([labels for _, labels in batches]).bincount()) < 1600  # of 2,400
    assert counts[0] > 95
    assert counts[1] == counts[2]
    assert abs(counts[1] - counts[0]) < 1.5


def test_the_gpu_does_what_the_cpu_does_in_float32():
    allow = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        gpu = tracked("cuda", bfloat16=False, capture=True, compile=False)
    finally:
        torch.backends.cudnn.conv.fp32_precision = allow
    cpu = tracked("cpu")
    allowed = farthest(cpu, "cpu", 1e-6)
    show("float32: CPU against itself with noise", allowed)
    found = differences(cpu, gpu)
    show("float32: CPU against captured GPU", found)
    assert all(found[phase] < 2 * allowed[phase] for phase in PHASES)


def test_batches_are_the_same_on_both_devices():
    images = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8)
    split = Split(images, torch.arange(256) % 10)
    everything = Augmentation(crop=4, flip=True, trivial=True, cutout=8, mixup=0.2)
    made = [
        list(
            TrainingBatches(
                copy.copy(split),
                Normalization((0.5,) * 3, (0.25,) * 3),
                everything,
                batch_size=64,
                classes=10,
                seed=3,
                device=device,
            ).epoch(5)
        )
        for device in ("cpu", "cuda")
    ]
    for (one, labels), (other, same) in zip(*made, strict=True):
        torch.testing.assert_close(labels, same.cpu())
        # nearest neighbours of a rotated pixel may differ where two are equally near
        assert ((one - other.cpu()).abs() > 1e-5).float().mean() < 0.01
