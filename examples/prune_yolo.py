"""Prune a YOLO of ultralytics: remove filters, check that nothing else changed, fine-tune it with their own trainer.

    python examples/prune_yolo.py yolov8n.pt --data coco8.yaml --keep-macs 0.5 --epochs 100 --out runs/yolov8n-half

ultralytics is under the AGPL-3.0 and no part of paam: install it yourself (pip install ultralytics). Any detector that
is built from one of its YAML files will do; without --data nothing is trained.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from ultralytics import YOLO
from ultralytics.data.utils import check_det_dataset
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.nn.modules import C2f
from ultralytics.nn.tasks import DetectionModel

import paam


def main() -> None:
    options = arguments()
    yolo = YOLO(options.model, task="detect")
    model = dense(yolo, options.data)
    small, before, after = pruned(model, options)
    say(f"parameters {before.params / 1e6:.2f} M -> {after.params / 1e6:.2f} M")
    say(f"MACs       {before.macs / 1e9:.2f} G -> {after.macs / 1e9:.2f} G at {options.imgsz} x {options.imgsz}")
    yolo.model = small
    common = {"imgsz": options.imgsz, "device": options.device, "project": str(options.out.resolve()), "exist_ok": True}
    if options.data:
        training = {"epochs": options.epochs, "batch": options.batch, "workers": options.workers, "plots": False}
        yolo.train(trainer=trainer_of(small), data=options.data, name="train", **training, **common)
    paam.save(yolo.model, options.out)  # of a trained one: the best epoch's
    say(f"plan and weights are in {options.out}; paam.load reads them into a network like the one that was pruned")
    if options.data:
        metrics = yolo.val(data=options.data, name="val", plots=False, workers=options.workers, **common)
        say(f"mAP50-95 {metrics.box.map:.4f}, mAP50 {metrics.box.map50:.4f}")
    if options.export:
        yolo.model.pt_path = str(options.out / "model.pt")  # exports are put beside it
        say(f"exported to {yolo.export(format=options.export, imgsz=options.imgsz, device=options.device)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="yolov8n.pt, yolo11n.pt, yolov5n.yaml, ...: a checkpoint, or a fresh one")
    parser.add_argument("--data", help="a data set as ultralytics describes them, such as coco8.yaml")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--keep-filters", type=float, help="share of the filters that stays (default: 0.5)")
    target.add_argument("--keep-macs", type=float, help="share of the multiply-accumulates that stays")
    target.add_argument("--keep-params", type=float, help="share of the parameters that stays")
    parser.add_argument("--round-to", type=int, default=1, help="widths in steps of so many filters; GPUs like 8")
    parser.add_argument(
        "--global", dest="uniform", action="store_false", help="compare filters of different layers, too"
    )
    parser.add_argument(
        "--criterion", default="l1", choices=("l1", "l2", "fpgm", "random"), help="what says which filters go"
    )
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--export", help="a format of ultralytics, such as onnx or openvino")
    parser.add_argument("--out", type=Path, default=Path("runs/yolo"))
    return parser.parse_args()


def dense(yolo: YOLO, data: str | None) -> DetectionModel:
    """The network to prune, with as many classes as the data set has, and with gradients, which checkpoints lack.

    It is what ``DetectionModel(yaml, nc=classes)`` builds, so that paam.load can be given another of its kind. What
    does not fit another number of classes starts afresh.
    """
    given: Any = yolo.model
    classes = check_det_dataset(data)["nc"] if data else given.yaml["nc"]
    model = DetectionModel(given.yaml, nc=classes, verbose=False)
    own = model.state_dict()
    fitting = {name: value for name, value in given.state_dict().items() if own[name].shape == value.shape}
    model.load_state_dict(fitting, strict=False)
    model.args, model.task = given.args, given.task  # what YOLO(...) has set; export reads it
    return model


def pruned(model: DetectionModel, options: argparse.Namespace) -> tuple[nn.Module, paam.Counted, paam.Counted]:
    """The small network, and the cost of both. Checked in float64, where rounding hides nothing."""
    image = torch.rand(1, 3, options.imgsz, options.imgsz, dtype=torch.float64)
    pruner = paam.Pruner(
        model.double().eval(), example_inputs=image, criterion=options.criterion, streams="tied", keep_class=True
    )
    target = {"keep_macs": options.keep_macs, "keep_params": options.keep_params, "keep_filters": options.keep_filters}
    target = {name: share for name, share in target.items() if share is not None} or {"keep_filters": 0.5}
    pruner.select(**target, round_to=options.round_to, uniform=options.uniform)
    small = pruner.compact().eval()
    for block in small.modules():
        if isinstance(block, C2f):
            block.c = block.cv1.conv.out_channels // 2  # their export splits by this number instead of in halves
    if type(small) is not type(model):
        sys.exit("The pruned network did not keep its class; ultralytics' trainer knows no other. Please report this.")
    with pruner.weighting():  # binary gates: the whole network with closed gates
        pass
    with torch.no_grad():
        (expected, _), (found, _) = pruner.model.eval()(image), small(image)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < 1e-9:
        sys.exit(f"The pruned network differs from the gated one by {error:.0e}: please report this.")
    say(f"predictions of the pruned and of the gated network differ by {error:.0e}")
    before, after = paam.count(model, image), paam.count(small, image)
    return small.float(), before, after


def trainer_of(small: nn.Module) -> type[DetectionTrainer]:
    """Their trainer, but for the network: it would build the whole one anew from its YAML file."""

    class PrunedTrainer(DetectionTrainer):
        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
            return small.requires_grad_(True)  # the trainer freezes what it does not train

    return PrunedTrainer


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
