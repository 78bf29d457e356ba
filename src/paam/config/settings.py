"""The sections of a recipe: every key with its default and its allowed values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from paam.config.schedule import DECAYS
from paam.config.schema import InvalidError, OneOf, Plain, Range, check_field
from paam.errors import RecipeError

NOT_NEGATIVE = Range(0)
EPOCHS = Range(0, 1_000_000)
SHARE = Range(0, 1)


@dataclass(frozen=True)
class ModelSettings:
    """``name``: a shipped network, or "module:function" for your own.

    ``weights``: a safetensors file of dense weights to start from; default: random initialization.
    """

    name: str = "resnet56"
    weights: str | None = None


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images. All of it is off by default.

    ``crop``: random crops after zero padding by this many pixels. ``flip``: random horizontal flips.
    ``trivial``: TrivialAugment (wide), one random operation of random strength per image.
    ``cutout``: side, in pixels, of a square that is set to the mean. ``mixup``: alpha of the Beta distribution.
    """

    crop: int = 0
    flip: bool = False
    trivial: bool = False
    cutout: int = 0
    mixup: float = 0.0


@dataclass(frozen=True)
class DataSettings:
    """``holdout``: share of the training set held out for validation.

    ``memory``: GiB of decoded images to keep in memory; a larger folder is streamed by ``workers`` processes (default:
    one per core, at most eight). For the augmentation keys see Augmentation.
    """

    name: str = "cifar10"
    directory: str | None = None
    image_size: Annotated[int | None, Range(1, 4096)] = None
    holdout: Annotated[float, Range(0, 0.9)] = 0.0
    batch_size: Annotated[int, Range(1, 1 << 20)] = 256
    crop: Annotated[int, Range(0, 256)] = 4
    flip: bool = True
    trivial: bool = False
    cutout: Annotated[int, Range(0, 4096)] = 0
    mixup: Annotated[float, Range(0, 100)] = 0.0
    memory: Annotated[float, NOT_NEGATIVE] = 8.0
    workers: Annotated[int | None, Range(0, 1024)] = None

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.crop, self.flip, self.trivial, self.cutout, self.mixup)


@dataclass(frozen=True)
class PruneSettings:
    """``method``: name of a method in paam.methods. See paam.Pruner for the others.

    ``options``: all other keys of the section: options of scorers.
    """

    method: str = "paam"
    scorer: str = "kq"
    activation: str = "leaky-exponential"
    penalty: Annotated[float, NOT_NEGATIVE] = 5e-4
    balance: Annotated[str, OneOf("area", "side", "none", "macs", "params")] = "area"
    placement: Annotated[str, OneOf("sum", "branch")] = "sum"
    streams: Annotated[str, OneOf("independent", "tied")] = "independent"
    score_norm: Annotated[str, OneOf("eval", "train")] = "eval"
    ignore: tuple[str, ...] = ()
    options: dict[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerSettings:
    """One phase's optimiser. ``lr`` None: the scorer's default. ``ramp``: epochs of linear learning-rate warm-up.

    ``reset``: start every phase with a fresh optimiser state instead of keeping it across cycles.
    ``average``: decay of an EMA of the weights (0.999, say; 0: off), which replaces the weights in evaluation and at
    the end of the phase; for warm-up, fine-tune and dense control only.
    """

    optimizer: Annotated[str, OneOf("sgd", "adam")] = "sgd"
    lr: Annotated[float | None, Range(0, 1e6)] = 0.1
    momentum: Annotated[float, SHARE] = 0.9
    nesterov: bool = False
    weight_decay: Annotated[float, Range(0, 1e6)] = 0.0
    decay: Annotated[str, OneOf(*DECAYS)] = "constant"
    ramp: Annotated[int, EPOCHS] = 0
    reset: bool = False
    average: Annotated[float, Range(0, 0.999999)] = 0.0


@dataclass(frozen=True)
class DistillSettings:
    """Knowledge distillation from the dense network in weight phases, fine-tune and dense control.

    ``weight``: share of the distillation loss, 0 to 1; its logits are softened by ``temperature``.
    ``teacher``: a safetensors file of its weights; default: the network after warm-up, or as loaded if there is none.
    """

    weight: Annotated[float, SHARE] = 0.0
    temperature: Annotated[float, Range(1e-3, 1e3)] = 4.0
    teacher: str | None = None


@dataclass(frozen=True)
class TrainSettings:
    """``checkpoint_every``: epochs between checkpoints. ``threads``: CPU threads, 0 for torch's default.

    On a GPU only: ``bfloat16`` autocast, ``capture`` of the step in a CUDA graph, ``fused`` Triton kernels for batch
    norm and small convolutions (if the network has any), torch.``compile`` of forward and backward instead (default:
    if nothing is fused and enough steps follow to make up for the minute of compiling), and ``masked``: fine-tune the
    pruned network as the dense one with closed gates, and compact it at the end. The result is the same; it is faster
    if many small kernels of odd sizes dominate.
    """

    checkpoint_every: Annotated[int, Range(1, 1_000_000)] = 1
    threads: Annotated[int, Range(0, 1024)] = 0
    bfloat16: bool = True
    compile: bool | None = None
    capture: bool = True
    fused: bool = True
    masked: bool = False


def check_setting(kind: type, name: str, value: object) -> None:
    """Refuse an invalid value for a key of a section that was not read from a recipe."""
    try:
        check_field(kind, name, value)
    except InvalidError as error:
        raise RecipeError(str(error)) from error
