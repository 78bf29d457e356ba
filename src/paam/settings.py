"""The sections of a recipe, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from paam.data import Augmentation


@dataclass(frozen=True)
class ModelSettings:
    """``name``: a shipped network, or "module:function" for anyone's own.

    ``weights``: a safetensors file of the dense network's weights to start from, instead of at random.
    """

    name: str = "resnet56"
    weights: str | None = None


@dataclass(frozen=True)
class DataSettings:
    """``holdout``: share of the training set kept aside for choices.

    ``memory``: GiB of decoded images that may be held; a folder of more is read as it is needed, by ``workers``
    processes (one per core, eight at most, if not given). What is done to training images: see paam.data.Augmentation.
    """

    name: str = "cifar10"
    directory: str | None = None
    image_size: int | None = None
    holdout: float = 0.0
    batch_size: int = 256
    crop: int = 4
    flip: bool = True
    trivial: bool = False
    cutout: int = 0
    mixup: float = 0.0
    memory: float = 8.0
    workers: int | None = None

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.crop, self.flip, self.trivial, self.cutout, self.mixup)


@dataclass(frozen=True)
class PruneSettings:
    """The method: see paam.Pruner for each."""

    scorer: str = "kq"
    activation: str = "leaky-exponential"
    penalty: float = 5e-4
    balance: str = "area"
    placement: str = "sum"
    streams: str = "independent"
    dim_ratio: float = 1.0
    alpha: float = 1.0
    score_norm: str = "eval"
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerSettings:
    """One phase's optimiser. ``lr`` None: the scorer's default. ``ramp``: epochs of linear warm-up of the rate.

    ``reset``: start every phase with a fresh optimiser state instead of keeping it across cycles.
    ``average``: keep a running mean of the weights, of which every step leaves this share (0.999, say; 0: none). It is
    what the phase is measured by and leaves behind; of warm-up, fine-tune and dense control only.
    """

    optimizer: str = "sgd"
    lr: float | None = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    decay: str = "constant"
    ramp: int = 0
    reset: bool = False
    average: float = 0.0


@dataclass(frozen=True)
class DistillSettings:
    """The dense network as a teacher of weight phases, fine-tune and dense control.

    ``weight``: share of the loss, 0 to 1, that is the divergence from its answers, softened by ``temperature``.
    ``teacher``: a safetensors file of its weights; if not given it is the network as warm-up left it, or as it came.
    """

    weight: float = 0.0
    temperature: float = 4.0
    teacher: str | None = None


@dataclass(frozen=True)
class TrainSettings:
    """``checkpoint_every``: epochs between checkpoints. ``threads``: CPU threads, 0 leaves torch's choice.

    On a GPU only: ``bfloat16`` autocast, ``capture`` of the step in a CUDA graph, ``fused`` kernels of our own for
    batch norm and small convolutions (where a network has any), torch.``compile`` of forward and backward in their
    place (if not given: where nothing is fused and enough steps follow to make up for the minute of compiling), and
    ``masked``: fine-tune the pruned network inside the dense one, with closed gates, and cut it out at the end. That
    computes the same; it is faster where launching many small kernels of odd sizes is what costs.
    """

    checkpoint_every: int = 1
    threads: int = 0
    bfloat16: bool = True
    compile: bool | None = None
    capture: bool = True
    fused: bool = True
    masked: bool = False
