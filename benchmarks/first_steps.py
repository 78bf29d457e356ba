"""Damage of the first steps to ResNet-56: the strong recipe's warm-up on a CPU, with and without a learning-rate ramp.

    python benchmarks/first_steps.py DATA

Prints, every 30 steps, the mean loss of the last ten and how many of the 2,032 batch-norm scales have fallen below 0.1
(all start at 1). A block whose scales have vanished passes its input on unchanged, and weight decay removes the rest.
"""

from __future__ import annotations

import itertools
import json
import sys
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import nn

from paam.data import Augmentation, load_cifar10
from paam.data.batches import Normalization, TrainingBatches
from paam.models import build_model
from paam.runs.environment import environment

STEPS, RATE = 120, 0.1


def look(data: str, seed: int, ramp: int) -> None:
    """``ramp``: epochs over which the learning rate rises to its maximum."""
    dataset = load_cifar10(data)
    torch.manual_seed(seed)
    model = build_model("resnet56", num_classes=10, in_channels=3).to(memory_format=torch.channels_last)
    batches = TrainingBatches(
        dataset.train,
        Normalization(dataset.mean, dataset.std),
        Augmentation(crop=4, flip=True, cutout=12),
        batch_size=256,
        classes=10,
        seed=seed,
        device="cpu",
    )
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    losses = []
    for step, (images, labels) in enumerate(itertools.islice(batches.epoch(0), STEPS), 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * step / (ramp * batches.steps) if ramp else RATE
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step in (10, *range(30, STEPS + 1, 30)):
            gone = sum(int((norm.weight < 0.1).sum()) for norm in norms)
            print(f"seed {seed}  ramp {ramp}  step {step:3d}  loss {fmean(losses[-10:]):.2f}  gone {gone}", flush=True)


if __name__ == "__main__":
    print(json.dumps({**environment("cpu"), "steps": STEPS, "rate": RATE}))
    for seed, ramp in itertools.product((0, 1, 2), (0, 5)):
        look(sys.argv[1], seed, ramp)
