"""The model zoos: which networks of torchvision and timm can be pruned, and are they exact then?

    python tests/zoo.py [NAME ...]      examine these (or all, giants included) and rewrite docs/coverage.jsonl and .md

tests/test_zoo.py examines all but the giants again and compares with what is committed.
"""

from __future__ import annotations

import datetime
import importlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from conftest import compacted, lively, relative_error
from paam import Pruner, count
from paam.errors import GraphError
from paam.models import build_model
from paam.models.zoo import import_torchvision
from paam.network import Choice, Network

DOCS = Path(__file__).parents[1] / "docs"
GIANT = 100_000_000
"""Parameters above which a model is examined by hand only."""
SHARES = (0.3, 0.5, 0.7)
"""Of the filters, removed at random."""

FAMILIES = {
    "resnet": ("resnet18", "resnetblur18", "ecaresnet26t"),
    "resnext": ("resnext50_32x4d",),
    "seresnet": ("seresnet18",),
    "res2net": ("res2net50_26w_4s",),
    "resnest or sknet": ("resnest14d", "skresnet18"),
    "densenet": ("densenet121",),
    "dla": ("dla34",),
    "dpn": ("dpn48b",),
    "vgg": ("vgg11_bn",),
    "inception_v3": ("inception_v3",),
    "inception_v4": ("inception_v4",),
    "xception": ("legacy_xception",),
    "mobilenetv2": ("mobilenetv2_050",),
    "mobilenetv3": ("mobilenetv3_small_050", "mobilenetv4_conv_small_050"),
    "mnasnet": ("mnasnet_small",),
    "efficientnet": ("efficientnet_b0", "efficientnet_lite0"),
    "efficientnetv2": ("tf_efficientnetv2_b0", "gc_efficientnetv2_rw_t"),
    "ghostnet": ("ghostnet_050",),
    "hardcorenas": ("hardcorenas_a",),
    "regnety": ("regnety_002", "regnetz_b16"),
    "repvgg": ("repvgg_a0",),
    "mobileone": ("mobileone_s0",),
    "convnext": ("convnext_atto", "convnextv2_atto"),
    "darknet": ("darknet17",),
    "cspresnet": ("cspresnet50",),
    "hrnet": ("hrnet_w18_small",),
    "nfnet": ("nfnet_l0",),
    "selecsls": ("selecsls42",),
    "rexnet": ("rexnet_100",),
    "fbnetv3": ("fbnetv3_b",),
}
NOT_CONVOLUTIONAL = ("vit_", "swin", "maxvit")


torchvision = import_torchvision()
timm = importlib.import_module("timm")  # it imports torchvision in its turn
logging.getLogger("timm").setLevel(logging.ERROR)


def names() -> list[str]:
    """Every classification CNN of the installed torchvision, fcn_resnet50, and timm's families."""
    classifiers = torchvision.models.list_models(module=torchvision.models)
    found = [f"torchvision:{name}" for name in classifiers if not name.startswith(NOT_CONVOLUTIONAL)]
    return [*found, "torchvision:fcn_resnet50", *(f"timm:{name}" for members in FAMILIES.values() for name in members)]


def parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in _build(name).parameters())


def _build(name: str) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision announces other defaults for inception
        return build_model(name, num_classes=1000, in_channels=3)


def example(name: str) -> Tensor:
    size = 96 if any(part in name for part in ("inception", "xception", "alexnet")) else 64
    return torch.randn(1, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def examine(name: str) -> dict[str, Any]:
    """What happens to one network: refused and why, or its groups and the largest error over plans and streams."""
    torch.manual_seed(0)
    model = lively(_build(name))
    row: dict[str, Any] = {"model": name, "params": sum(p.numel() for p in model.parameters())}
    try:
        found = {streams: _examine(model, example(name), streams) for streams in ("independent", "tied")}
    except GraphError as error:
        return {**row, "status": "refused", "why": str(error)}
    error = max(error for _, error, _ in found.values())
    groups = {streams: groups for streams, (groups, _, _) in found.items()}
    return {**row, "status": "exact", "groups": groups, "class_kept": found["tied"][2], "error": error}


def _examine(model: torch.nn.Module, x: Tensor, streams: str) -> tuple[int, float, bool]:
    """Number of groups, largest relative error of compacted against gated, whether the class was kept each time."""
    pruner = Pruner(model, x, scorer="free", streams=streams, inplace=True)
    worst, kept = 0.0, True
    for share in SHARES:
        choice = removed_at_random(pruner.network, share)
        small = compacted(pruner, choice)
        with torch.inference_mode():
            pairs = zip(tree_leaves(small(x)), tree_leaves(pruner.model.eval()(x)), strict=True)
            worst = max(worst, *(relative_error(value, truth) for value, truth in pairs))
        counted, cost = count(small, x), pruner.network.cost(choice)
        assert (counted.params, counted.macs) == (cost.params, cost.macs)
        kept &= type(small) is type(model)
    return len(pruner.network.groups), worst, kept


def removed_at_random(network: Network, share: float) -> Choice:
    rng = np.random.default_rng(0)
    choice = {group.name: rng.random(group.width) >= share for group in network.groups}
    for mask in choice.values():
        mask[0] |= not mask.any()
    return choice


def committed() -> dict[str, dict[str, Any]]:
    path = DOCS / "coverage.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["model"]: row for row in rows}


def page(rows: dict[str, dict[str, Any]]) -> str:
    """docs/coverage.md."""
    text = (DOCS / "coverage.head.md").read_text()
    for title, prefix in (("torchvision", "torchvision:"), ("timm", "timm:")):
        mine = [row for name, row in rows.items() if name.startswith(prefix)]
        exact = sum(row["status"] == "exact" for row in mine)
        text += f"\n## {title} {mine[0][title].partition('+')[0]}: {exact} of {len(mine)} exact\n\n"
        text += "| model | parameters | groups, independent / tied | tied keeps its class | largest error |  |\n"
        text += "|---|---|---|---|---|---|\n" + "".join(_line(row, prefix) for row in mine)
    return text


def _line(row: dict[str, Any], prefix: str) -> str:
    name = row["model"].removeprefix(prefix)
    note = f"once, {row['date']}" if row["params"] > GIANT else ""
    if row["status"] == "refused":
        return f"| {name} | {row['params'] / 1e6:.1f} M | | | | refused: {row['why']} |\n"
    groups = f"{row['groups']['independent']} / {row['groups']['tied']}"
    kept = "yes" if row["class_kept"] else ""
    return f"| {name} | {row['params'] / 1e6:.1f} M | {groups} | {kept} | {row['error']:.0e} | {note} |\n"


def main() -> None:
    torch.set_num_threads(1)
    rows = committed()
    for name in sys.argv[1:] or names():
        row = examine(name)
        versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}
        rows[name] = {**row, "date": datetime.date.today().isoformat(), **versions}
        sys.stdout.write(f"{name} {row['status']} {row.get('error', row.get('why'))}\n")
        sys.stdout.flush()
        ordered = {name: rows[name] for name in names() if name in rows}
        (DOCS / "coverage.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered.values()))
    (DOCS / "coverage.md").write_text(page({name: rows[name] for name in names() if name in rows}))


if __name__ == "__main__":
    main()
