"""One CUDA graph for a whole training step: for a small network, kernel launches dominate.

The first calls run eagerly, on the capture stream, as real training steps; then the step is captured once and
replayed. All of its inputs must keep their memory: parameters, optimiser state, gate masks and learning rates do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]
"""Images and labels of one batch -> the detached loss; includes the optimiser's update."""

PLAIN_STEPS = 4
"""Eager steps before the capture, for lazy initialization: optimiser state, autotuning, compilation."""


class CapturedStep:
    """A step that is replayed from a CUDA graph. Batches of other shapes than the first one run eagerly."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.calls = 0
        self.looks: object = None
        self.images: Tensor | None = None
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        looks = [(one.shape, one.dtype) for one in (images, labels)]
        self.looks = self.looks or looks
        self.calls += looks == self.looks
        if self.calls <= PLAIN_STEPS or looks != self.looks:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.step(images, labels)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.images is None:
            self.images, self.labels = images.clone(), labels.clone()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.loss = self.step(self.images, self.labels)
        assert self.images is not None
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.loss.clone()
