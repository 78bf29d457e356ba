"""Detectors of ultralytics and torchvision: half of the filters gone, and still exact, trainable, of their own class.

ultralytics is under the AGPL-3.0: ``make test-detectors`` installs it beside paam, which never imports it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

import paam
from detection_ops import supply
from networks import compacted, lively, relative_error
from paam import Pruner
from paam.graph.network import Choice, Network, prepare
from yolo import ultralytics

pytestmark = pytest.mark.zoo

CLASSES = 7
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "detectors.md"


def noise(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def images(*sizes: tuple[int, int], seed: int) -> list[Tensor]:
    return [noise(3, *size, seed=100 * seed + place) for place, size in enumerate(sizes)]


@dataclass(frozen=True)
class Detector:
    """``example``: forward()'s arguments, one image. ``others``: other images, more of them, of another size.

    ``loss``: of a network of this kind, in training mode, from targets that fit ``batch``.
    """

    name: str
    build: Callable[[], nn.Module]
    example: tuple[Any, ...]
    others: dict[str, tuple[Any, ...]]
    loss: Callable[[nn.Module], Tensor]
    gated_loss: Callable[[nn.Module, nn.Module], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    weights_of: str = ""
    """Another detector whose weights fit, where this one cannot be given any of its own."""


def yolo(name: str, **options: Any) -> Detector:
    def build() -> nn.Module:
        tasks = ultralytics()
        model = tasks.DetectionModel(f"{name}.yaml", nc=CLASSES, verbose=False)
        model.args = sys.modules["ultralytics.utils"].DEFAULT_CFG  # weights of the parts of the loss
        return model

    def batch() -> dict[str, Tensor]:
        boxes = [[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.2, 0.5], [0.6, 0.5, 0.5, 0.8]]
        return {
            "img": noise(2, 3, 64, 96, seed=4),
            "batch_idx": torch.tensor([0.0, 0.0, 1.0]),
            "cls": torch.tensor([[1.0], [2.0], [3.0]]),
            "bboxes": torch.tensor(boxes),
        }

    def loss(model: nn.Module) -> Tensor:
        parts, _ = model(batch())
        return parts.sum()

    def gated_loss(model: nn.Module, gated: nn.Module) -> Tensor:
        """The class's own criterion, of what the gated network predicts."""
        targets = batch()
        parts, _ = model.loss(targets, gated(targets["img"]))
        return parts.sum()

    example = (noise(1, 3, 64, 64, seed=1),)
    others = {"more images": (noise(3, 3, 64, 64, seed=2),), "another size": (noise(2, 3, 96, 160, seed=3),)}
    return Detector(name, build, example, others, loss, gated_loss, options)


def of_torchvision(name: str, build: Callable[[], nn.Module], weights_of: str = "") -> Detector:
    def arguments() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        boxes = [[[5.0, 5.0, 60.0, 60.0], [20.0, 10.0, 80.0, 90.0]], [[30.0, 30.0, 90.0, 70.0]]]
        labels = [[1, 2], [3]]
        targets = [
            {"boxes": torch.tensor(box, dtype=torch.float64), "labels": torch.tensor(label)}
            for box, label in zip(boxes, labels, strict=True)
        ]
        return images((96, 128), (96, 128), seed=4), targets

    def loss(model: nn.Module) -> Tensor:
        return sum(model(*arguments()).values(), torch.zeros(()))

    def gated_loss(model: nn.Module, gated: nn.Module) -> Tensor:
        return loss(gated)

    example = (images((96, 128), seed=1),)
    others = {
        "more images": (images((96, 128), (96, 128), (96, 128), seed=2),),
        "another size": (images((128, 96), (96, 160), seed=3),),
    }
    # What follows the first decision by the values of tensors is the class's own code.
    return Detector(name, build, example, others, loss, gated_loss, {"on_decision": "stop"}, weights_of)


def detection() -> Any:
    return supply().models.detection


def fresh(builder: str, **options: Any) -> nn.Module:
    return getattr(detection(), builder)(weights=None, weights_backbone=None, num_classes=CLASSES, **options)


def as_pretrained() -> nn.Module:
    """retinanet_resnet50_fpn as its builder makes it for pretrained weights: with frozen batch norms."""
    models = supply().models
    frozen = sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d
    utils = sys.modules["torchvision.models.detection.backbone_utils"]
    blocks = sys.modules["torchvision.ops.feature_pyramid_network"]
    body = models.resnet50(weights=None, norm_layer=frozen)
    backbone = utils._resnet_fpn_extractor(
        body, 3, returned_layers=[2, 3, 4], extra_blocks=blocks.LastLevelP6P7(256, 256)
    )
    return detection().RetinaNet(backbone, CLASSES, **SMALL, score_thresh=0.0)


SMALL = {"min_size": 96, "max_size": 160}
EVERY_BOX = {"box_score_thresh": 0.0}
DETECTORS = {
    detector.name: detector
    for detector in (
        yolo("yolov8n"),
        yolo("yolo11n", keep_class=True),  # its attention views channels by numbers of its own
        yolo("yolov5n"),
        of_torchvision("retinanet_resnet50_fpn", lambda: fresh("retinanet_resnet50_fpn", **SMALL, score_thresh=0.0)),
        of_torchvision("retinanet_resnet50_fpn, frozen norms", as_pretrained, "retinanet_resnet50_fpn"),
        of_torchvision("ssdlite320_mobilenet_v3_large", lambda: fresh("ssdlite320_mobilenet_v3_large")),
        of_torchvision(
            "fasterrcnn_resnet50_fpn", lambda: fresh("fasterrcnn_resnet50_fpn", **SMALL, box_score_thresh=0.0)
        ),
    )
}


def random_weights(detector: Detector) -> nn.Module:
    """A network in which every channel counts: signals neither die away nor saturate, whatever the image.

    Its batch norms have seen a batch, and were then moved away from it: each removed channel leaves a constant behind.
    """
    if detector.weights_of:
        model = detector.build().double().eval()
        model.load_state_dict(random_weights(DETECTORS[detector.weights_of]).state_dict(), strict=False)
        return model
    torch.manual_seed(0)
    model = detector.build()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.requires_grad:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu" if module.bias is None else "linear")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    model = lively(model).train()
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        detector.loss(model)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.running_mean += torch.empty_like(norm.running_mean).uniform_(-0.5, 0.5) * norm.running_var.sqrt()
            norm.running_var *= torch.empty_like(norm.running_var).uniform_(0.5, 2.0)
    return model.eval()


def half_removed(network: Network) -> Choice:
    """Of every group, a random half stays: the larger one where its width is odd."""
    rng = np.random.default_rng(0)
    return {group.name: rng.permutation(group.width) >= group.width // 2 for group in network.groups}


@dataclass(frozen=True)
class Pruned:
    model: nn.Module
    pruner: Pruner
    choice: Choice
    small: nn.Module


@functools.cache
def pruned(name: str) -> Pruned:
    detector = DETECTORS[name]
    model = random_weights(detector)
    pruner = Pruner(model, example_inputs=detector.example, scorer="free", streams="tied", **detector.options)
    choice = half_removed(pruner.network)
    return Pruned(model, pruner, choice, compacted(pruner, choice))


@pytest.fixture(params=DETECTORS)
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def convolutions(model: nn.Module) -> dict[str, int]:
    """Filters of every convolution, those that none can be taken from among them."""
    return {name: layer.out_channels for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)}


def row(name: str) -> str:
    """A detector in the table of docs/guide/detectors.md: what has a gate, and what half of that is of the whole."""
    found = pruned(name)
    before, after = convolutions(found.model), convolutions(found.small)
    gated = {layer for group in found.pruner.network.groups for layer in group.layers} & before.keys()
    network = found.pruner.network
    cost, dense = network.cost(found.choice), network.dense
    removed = 1 - sum(after.values()) / sum(before.values())
    shares = f"{removed:.0%} | {1 - cost.params / dense.params:.0%} | {1 - cost.macs / dense.macs:.0%}"
    return f"| {name.partition(',')[0]} | {len(gated)} of {len(before)} | {shares} |\n"


def test_half_of_the_filters_are_removed(name: str) -> None:
    """Of the convolutions with a gate, as the network is built; the guide says how much that is of all."""
    found = pruned(name)
    before, after = convolutions(found.model), convolutions(found.small)
    gated = {layer for group in found.pruner.network.groups for layer in group.layers} & before.keys()
    assert 0.49 <= 1 - sum(after[layer] for layer in gated) / sum(before[layer] for layer in gated) <= 0.5
    assert len(gated) > 0.5 * len(before)
    cost = found.pruner.network.cost(found.choice)
    assert sum(parameter.numel() for parameter in found.small.parameters()) == cost.params
    assert row(name) in GUIDE.read_text()


def test_open_gates_leave_the_network_as_it_is(name: str) -> None:
    """Boxes and scores of the gated network, all of whose gates are open, are those of the model itself."""
    detector, found = DETECTORS[name], pruned(name)
    model = copy.deepcopy(found.model)  # a YOLO keeps the anchors of the size that it saw last
    try:
        with found.pruner.dense(), torch.no_grad():
            for arguments in (detector.example, *detector.others.values()):
                same(found.pruner.model.eval()(*arguments), model.eval()(*arguments))
    finally:
        with found.pruner.weighting():  # the other tests compare with closed gates
            pass


def test_class_and_names_are_kept(name: str) -> None:
    found = pruned(name)
    assert type(found.small) is type(found.model)
    more = found.small.state_dict().keys() ^ found.model.state_dict().keys()
    assert all(name.endswith(".bias") for name in more)  # what removed channels added as constants


def same(found: Any, expected: Any) -> None:
    (values, structure), (truths, wanted) = tree_flatten(found), tree_flatten(expected)
    assert structure == wanted
    for value, truth in zip(values, truths, strict=True):
        assert value.shape == truth.shape
        if not truth.is_floating_point():
            assert torch.equal(value, truth)
        elif truth.numel():
            assert relative_error(value, truth) < 1e-9


@pytest.mark.parametrize("images", ["example", "more images", "another size"])
def test_exact(name: str, images: str) -> None:
    """Boxes, scores, labels, and whatever else is returned."""
    detector, found = DETECTORS[name], pruned(name)
    arguments = detector.example if images == "example" else detector.others[images]
    with torch.no_grad():
        small, gated = found.small.eval()(*arguments), found.pruner.model.eval()(*arguments)
    same(small, gated)


def test_images_make_a_difference(name: str) -> None:
    """Or else the test above would compare constants."""
    detector, found = DETECTORS[name], pruned(name)
    with torch.no_grad():
        result = found.small.eval()(*detector.others["more images"])
    if isinstance(result, tuple):  # of a YOLO: every box with its scores, [N, 4 + classes, boxes]
        boxes, scores = result[0].split((4, CLASSES), 1)
        pairs = [(boxes[0], boxes[1]), (scores[0], scores[1])]
    else:
        fewest = min(len(detections["scores"]) for detections in result)
        assert fewest > 4
        assert all(len(detections["boxes"].unique(dim=0)) > 4 for detections in result)
        pairs = [(result[0][key][:fewest], result[1][key][:fewest]) for key in ("boxes", "scores")]
    for one, other in pairs:
        assert relative_error(one, other) > 1e-5


def test_trains_with_the_loss_of_its_class(name: str) -> None:
    """Forward and backward; every parameter that is trained in the whole network is trained in the small one."""
    detector, found = DETECTORS[name], pruned(name)
    torch.manual_seed(0)
    small = copy.deepcopy(found.small).train()
    loss = detector.loss(small)
    assert loss.isfinite()
    loss.backward()
    trained = {name for name, parameter in found.model.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in small.named_parameters() if parameter.requires_grad} >= trained
    for parameter in small.parameters():
        assert not parameter.requires_grad or (parameter.grad is not None and parameter.grad.isfinite().all())


@pytest.mark.parametrize("phase", ["scoring", "weighting"])
def test_gated_network_trains(name: str, phase: str) -> None:
    """Scorers in score phases, the network's own parameters in weight phases, with the loss of the class."""
    detector, found = DETECTORS[name], pruned(name)
    torch.manual_seed(0)
    pruner = Pruner(found.model, example_inputs=detector.example, scorer="free", streams="tied", **detector.options)
    trained = pruner.scorer_parameters() if phase == "scoring" else pruner.network_parameters()
    with pruner.scoring() if phase == "scoring" else pruner.weighting(keep_filters=0.5):
        loss = detector.gated_loss(copy.deepcopy(found.model), pruner.model)
        assert loss.isfinite()
        loss.backward()
        learning = [parameter for parameter in trained if parameter.requires_grad]
        assert learning
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in learning)
        assert sum(parameter.grad is not None for parameter in learning) > 0.9 * len(learning)


def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    detector, found = DETECTORS[name], pruned(name)
    paam.save(found.small, tmp_path)
    loaded = paam.load(tmp_path, detector.build().double())
    assert type(loaded) is type(found.small)
    with torch.no_grad():
        pairs = zip(
            tree_leaves(loaded(*detector.example)), tree_leaves(found.small.eval()(*detector.example)), strict=True
        )
    assert all(torch.equal(value, truth) for value, truth in pairs)


def test_model_is_left_as_it_was(name: str) -> None:
    """Recording runs the model, which keeps what it computed in attributes: anchors, scales, sizes."""
    detector = DETECTORS[name]
    torch.manual_seed(0)
    model = detector.build().double()
    before = {part: dict(vars(module)) for part, module in model.named_modules()}
    prepare(model, detector.example, streams="tied", **detector.options)
    for part, module in model.named_modules():
        assert vars(module).keys() == before[part].keys(), part
        assert all(value is before[part][key] for key, value in vars(module).items() if key != "training"), part
