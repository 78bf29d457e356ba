"""The model zoos: which networks of torchvision and timm can be pruned, and are they exact then?

    python tests/support/zoo.py [NAME ...]  these, or all but the giants; rewrites docs/reference/coverage.jsonl and .md

tests/models/test_zoo.py re-examines a sample and compares with the committed results; with ZOO=all it examines all but
the giants.
"""

from __future__ import annotations

import ast
import datetime
import importlib
import json
import logging
import multiprocessing
import random
import re
import resource
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from networks import compacted, lively, random_choice, relative_error
from paam import Pruner, count
from paam.errors import GraphError, one_line
from paam.graph.network import Choice, Network
from paam.models import build_model
from paam.models.zoo import import_torchvision

DOCS = Path(__file__).parents[2] / "docs" / "reference"
GIANT = 100_000_000
"""Parameters above which a model is examined only by hand."""
SECONDS, MEMORY = 300, 10 << 30
"""Limits of one examination in seconds and bytes."""
BOUND = 1e-9
"""Maximum relative error in float64."""

FAMILIES = {
    "byoanet": ("eca_halonext26ts", "lambda_resnet26t"),
    "byobnet": ("mobileone_s0", "gernet_s", "repvgg_a0", "regnetz_b16"),
    "coat": ("coat_tiny(img_size=64)",),
    "convit": ("convit_tiny",),
    "convmixer": ("convmixer_768_32",),
    "convnext": ("convnext_atto", "convnext_atto(drop_path_rate=0.1)", "convnextv2_atto"),
    "cpubone": ("cpubone_nano",),
    "crossvit": ("crossvit_9_dagger_240",),
    "csatv2": ("csatv2",),
    "cspnet": ("cs3darknet_focus_s", "darknet17", "cspresnet50"),
    "davit": ("davit_tiny",),
    "densenet": ("densenet121",),
    "dla": ("dla46x_c", "dla34"),
    "dpn": ("dpn48b",),
    "edgenext": ("edgenext_xx_small",),
    "efficientformer": ("efficientformer_l1",),
    "efficientformer_v2": ("efficientformerv2_s0",),
    "efficientnet": (
        *("mobilenetv2_050", "mnasnet_small", "efficientnet_b0", "efficientnet_b0(drop_path_rate=0.1)"),
        *("efficientnet_lite0", "tf_efficientnetv2_b0", "gc_efficientnetv2_rw_t", "tf_efficientnet_cc_b0_4e"),
    ),
    "efficientvim": ("efficientvim_m1",),
    "efficientvit_mit": ("efficientvit_b0",),
    "efficientvit_msra": ("efficientvit_m0",),
    "fasternet": ("fasternet_t0",),
    "fastvit": ("fastvit_t8",),
    "focalnet": ("focalnet_tiny_srf",),
    "gcvit": ("gcvit_xxtiny(img_size=64)",),
    "ghostnet": ("ghostnet_050",),
    "hardcorenas": ("hardcorenas_a",),
    "hgnet": ("hgnetv2_b0", "hgnet_tiny"),
    "hrnet": ("hrnet_w18_small",),
    "iformer": ("iformer_t",),
    "inception_next": ("inception_next_atto",),
    "inception_resnet_v2": ("inception_resnet_v2",),
    "inception_v3": ("inception_v3",),
    "inception_v4": ("inception_v4",),
    "lcnetv2": ("lcnetv2_small",),
    "levit": ("levit_128s", "levit_conv_128s"),
    "lowformer": ("lowformer_b0",),
    "mambaout": ("mambaout_femto",),
    "maxxvit": ("maxvit_pico_rw_256(img_size=64)", "coatnet_pico_rw_224(img_size=64)"),
    "metaformer": ("poolformerv2_s12", "poolformer_s12", "convformer_s18"),
    "mlp_mixer": ("gmlp_ti16_224",),
    "mobilenetv3": ("mobilenetv3_small_050", "mobilenetv4_conv_small_050", "fbnetv3_b"),
    "mobilenetv5": ("mobilenetv5_base",),
    "mobilevit": ("mobilevit_xxs", "mobilevitv2_050"),
    "mvitv2": ("mvitv2_tiny(img_size=64)",),
    "nasnet": ("nasnetalarge",),
    "nest": ("nest_tiny(img_size=64)",),
    "nextvit": ("nextvit_small",),
    "nfnet": (*("nf_regnet_b0", "nf_regnet_b0(drop_path_rate=0.1)", "nf_resnet26", "eca_nfnet_l0", "nfnet_l0"),),
    "pit": ("pit_ti_224",),
    "pnasnet": ("pnasnet5large",),
    "pvt_v2": ("pvt_v2_b0",),
    "rdnet": ("rdnet_tiny",),
    "regnet": ("regnetx_002", "regnety_002"),
    "repghost": ("repghostnet_050",),
    "repvit": ("repvit_m1",),
    "res2net": ("res2next50", "res2net50_26w_4s"),
    "resnest": ("resnest14d",),
    "resnet": (
        *("resnet10t", "resnet18", "resnet18(drop_path_rate=0.1)", "resnetblur18", "ecaresnet26t", "resnext50_32x4d"),
        "seresnet18",
    ),
    "resnetv2": ("resnetv2_18",),
    "rexnet": ("rexnet_100",),
    "selecsls": ("selecsls42",),
    "senet": ("legacy_seresnet18",),
    "sequencer": ("sequencer2d_s(img_size=64)",),
    "shvit": ("shvit_s1",),
    "sknet": ("skresnet18",),
    "starnet": ("starnet_s050",),
    "swiftformer": ("swiftformer_xs",),
    "tiny_vit": ("tiny_vit_5m_224",),
    "tresnet": ("tresnet_m",),
    "twins": ("twins_svt_small(img_size=64)",),
    "vgg": ("vgg11_bn",),
    "visformer": ("visformer_tiny(img_size=64)",),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224",),
    "vitamin": ("vitamin_small_224(img_size=64)",),
    "volo": ("volo_d1_224(img_size=64)",),
    "vovnet": ("ese_vovnet19b_slim_dw",),
    "xception": ("legacy_xception",),
    "xception_aligned": ("xception41p",),
    "xcit": ("xcit_nano_12_p8_224(img_size=64)",),
}
"""Every module of timm.models that is not a pure transformer, with models from it: the smallest one, and others of a
different structure. Arguments of timm.create_model may be given in parentheses. Left out: timm's test fixtures, test_*,
and halonet_h1, the smallest of byoanet, which takes minutes.
"""

_VIT = "a ViT: attention and linear layers, and one convolution that cuts the image into patches"
PURE_TRANSFORMERS = {
    "beit": _VIT,
    "cait": _VIT,
    "deepseek_vit": _VIT,
    "deit": _VIT,
    "eva": _VIT,
    "gemma4_vit": "a ViT whose patches are cut by a linear layer",
    "hiera": "a ViT that pools its tokens: one convolution, for the patches",
    "hieradet_sam2": "a ViT that pools its tokens: one convolution, for the patches",
    "naflexvit": "a ViT whose patches are cut by a linear layer",
    "qwen3_vit": _VIT,
    "swin_transformer": "attention in windows: one convolution, for the patches",
    "swin_transformer_v2": "attention in windows: one convolution, for the patches",
    "swin_transformer_v2_cr": "attention in windows: one convolution, for the patches",
    "tnt": "ViTs within a ViT: one convolution, for the patches",
    "vision_transformer": _VIT,
    "vision_transformer_relpos": _VIT,
    "vision_transformer_sam": "a ViT with attention in windows; the neck of its largest models has two convolutions",
}
"""The other modules of timm.models, with a description."""

ONCE_WRONG = (
    *("nf_regnet_b0", "nf_resnet26", "eca_nfnet_l0", "nfnet_l0"),
    *("poolformer_s12", "poolformerv2_s12", "convformer_s18", "tf_efficientnet_cc_b0_4e"),
    *("davit_tiny", "lowformer_b0", "mobilevitv2_050", "pit_ti_224", "pvt_v2_b0", "shvit_s1"),
    *("visformer_tiny(img_size=64)", "convnext_atto(drop_path_rate=0.1)", "convit_tiny"),
)
"""timm models that were once pruned wrongly, failed, or were refused for no good reason: always in the sample."""
SAMPLE = 24
"""Number of other models in the sample, drawn by a fixed seed."""

NOT_CONVOLUTIONAL = {
    "vit_": _VIT,
    "swin": "attention in windows: one convolution, for the patches",
    "maxvit": "not one, but timm's maxvit_pico_rw_256 is built alike, and stands for it",
    "mvit": "attention over pooled tokens of videos: one convolution for the patches, and depthwise ones within heads",
}
"""Name prefixes of torchvision models that are left out, with the reason: nearly all are pure transformers."""

SIDES = {"eca_halonext26ts": 256, "s3d": 224}
"""Image sides for models that do not accept smaller ones; models with a fixed side in timm get that, others 64."""
CLIPS = {"mc3_18": 4, "r2plus1d_18": 4, "r3d_18": 4, "s3d": 16}
"""Frames for video networks."""


torchvision = import_torchvision()
timm = importlib.import_module("timm")  # timm imports torchvision
logging.getLogger("timm").setLevel(logging.ERROR)


def names() -> list[str]:
    """Every CNN of torchvision that classifies or segments images or videos, and timm's families.

    Not its detectors, which return as many boxes as there are objects, nor its optical flow.
    """
    models = torchvision.models
    known = [name for kind in (models, models.segmentation, models.video) for name in models.list_models(module=kind)]
    found = [f"torchvision:{name}" for name in known if not name.startswith(tuple(NOT_CONVOLUTIONAL))]
    return [*found, *(f"timm:{name}" for members in FAMILIES.values() for name in members)]


def affordable() -> list[str]:
    """All but the giants."""
    rows = committed()
    return [name for name in names() if name not in rows or rows[name]["params"] <= GIANT]


def sample() -> list[str]:
    """Models that were once wrong, and others drawn by a fixed seed."""
    once_wrong = [f"timm:{name}" for name in ONCE_WRONG]
    drawn = random.Random(0).sample([name for name in affordable() if name not in once_wrong], SAMPLE)
    return [name for name in names() if name in (*once_wrong, *drawn)]


def build(name: str) -> torch.nn.Module:
    """The model of a name, which may include arguments: "timm:convnext_atto(drop_path_rate=0.1)"."""
    plain, arguments = _parsed(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision warns about a changed default for inception
        if arguments:
            model: torch.nn.Module = timm.create_model(plain.removeprefix("timm:"), num_classes=1000, **arguments)
            return model
        return build_model(name, num_classes=1000, in_channels=3)


def _parsed(name: str) -> tuple[str, dict[str, Any]]:
    plain, _, inside = name.removesuffix(")").partition("(")
    return plain, {key: ast.literal_eval(value) for key, value in re.findall(r"(\w+)=([^,]+)", inside)}


def example(name: str, batch: int = 1) -> Tensor:
    """Random images, or clips, of the smallest size that the model accepts."""
    plain, arguments = _parsed(name)
    zoo, _, plain = plain.partition(":")
    settings = timm.get_pretrained_cfg(plain) if zoo == "timm" else None
    if "img_size" in arguments:
        side = arguments["img_size"]
    elif settings is not None and settings.fixed_input_size:
        side = settings.input_size[-1]
    else:
        side = SIDES.get(plain, 96 if any(part in plain for part in ("inception", "alexnet")) else 64)
    clip = (CLIPS[plain],) if plain in CLIPS else ()
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, *clip, side, side, dtype=torch.float64, generator=generator)


def guarded(name: str) -> dict[str, Any]:
    """:func:`examine` in a separate process with limits on time and memory."""
    here, there = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch warns about forking a multi-threaded process
        process = multiprocessing.get_context("fork").Process(target=_examine_and_send, args=(name, there))
        process.start()
    there.close()
    row: dict[str, Any] = {"model": name, "params": 0, "status": "crash"}
    try:
        row = here.recv() if here.poll(SECONDS) else {**row, "why": f"it took longer than {SECONDS} s"}
    except EOFError:
        row["why"] = "its process died, of memory perhaps"
    process.kill()
    process.join()
    return row


def _examine_and_send(name: str, there: Connection) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    torch.set_num_threads(1)
    there.send(examine(name))


def examine(name: str) -> dict[str, Any]:
    """The result for one network: its groups and the largest error over plans and streams, or the failure.

    exact: every error is below the bound. refused: by a message with the reason. wrong: the output differs, or the
    predicted cost does. crash: any other exception.
    """
    began = time.process_time()
    torch.manual_seed(0)
    row: dict[str, Any] = {"model": name, "params": 0}
    try:
        model = build(name).double().eval()
        row["params"] = sum(p.numel() for p in model.parameters())
        found = {streams: _examine(model, name, streams) for streams in ("independent", "tied")}
        error = max(error for _, error, _ in found.values())
        groups = {streams: groups for streams, (groups, _, _) in found.items()}
        row |= {"status": "exact" if error < BOUND else "wrong", "groups": groups, "class_kept": found["tied"][2]}
        row |= {"error": error}
    except WrongError as wrong:
        row |= {"status": "wrong", "why": str(wrong)}
    except GraphError as error:
        row |= {"status": "refused", "why": str(error)}
    except Exception as error:  # reported in the row
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {one_line(error)}"
        row |= {"status": "crash", "why": what}
    return {**row, "seconds": round(time.process_time() - began, 1)}


class WrongError(Exception):
    """A pruned network is wrong in a way other than a numerical error."""


def _examine(model: torch.nn.Module, name: str, streams: str) -> tuple[int, float, bool]:
    """Number of groups, largest relative error, whether the class was kept as long as no layer was emptied.

    Traced with one image and compared on two: the graph against the model, and each compacted network against the gated
    one. The first trace is of the model as built, before its values are changed.
    """
    one, two = example(name), example(name, 2)
    pruner = Pruner(model, one, scorer="free", streams=streams, inplace=True)
    lively(model, example=two)
    with torch.inference_mode():
        truth = tree_leaves(model(two))
    worst, kept = _error(pruner.model.eval(), two, truth), True
    if worst >= BOUND:
        raise WrongError(f"the traced graph computes something else, by {worst:.0e}")
    for choice in choices(pruner.network):
        small = compacted(pruner, choice)
        with torch.inference_mode():
            worst = max(worst, _error(small, two, tree_leaves(pruner.model.eval()(two))))
        counted, cost = count(small, one), pruner.network.cost(choice)
        if (counted.params, counted.macs) != (cost.params, cost.macs):
            raise WrongError(f"{counted.params} parameters and {counted.macs} MACs where {cost} were promised")
        kept &= type(small) is type(model) or not all(mask.any() for mask in choice.values())
    return len(pruner.network.groups), worst, kept


def _error(model: torch.nn.Module, x: Tensor, truth: list[Tensor]) -> float:
    with torch.inference_mode():
        values = tree_leaves(model(x))
    if not all(bool(value.isfinite().all()) for value in truth):
        raise WrongError("the activations are not finite")
    return max(relative_error(value, right) for value, right in zip(values, truth, strict=True))


def choices(network: Network) -> list[Choice]:
    """30 % of the filters removed at random, then 70 %, then some layers emptied and some kept complete.

    With tied streams, the output may then no longer depend on the input.
    """
    choice = dict(random_choice(network, seed=0, whole=0.3, empty=0.3))
    if network.streams == "independent":
        _keep_connected(network, choice)
    return [removed_at_random(network, 0.3), removed_at_random(network, 0.7), choice]


def removed_at_random(network: Network, share: float) -> Choice:
    rng = np.random.default_rng(0)
    choice = {group.name: rng.random(group.width) >= share for group in network.groups}
    for mask in choice.values():
        mask[0] |= not mask.any()
    return choice


def _keep_connected(network: Network, choice: dict[str, NDArray[np.bool_]]) -> None:
    """Keep half of the filters that every path from the input to the output needs."""
    rng = np.random.default_rng(0)
    needed = network.strongest_path({group.name: np.ones(group.width) for group in network.groups})
    for name, filters in needed.items():
        if filters:
            if choice[name].mean() < 0.5:
                choice[name] = rng.random(len(choice[name])) < 0.5
            choice[name][list(filters)] = True


def committed() -> dict[str, dict[str, Any]]:
    path = DOCS / "coverage.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["model"]: row for row in rows}


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The text of docs/reference/coverage.md."""
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
    if "why" in row:
        return f"| {name} | {row['params'] / 1e6:.1f} M | | | | {row['status']}: {row['why']} |\n"
    groups = f"{row['groups']['independent']} / {row['groups']['tied']}"
    kept = "yes" if row["class_kept"] else ""
    return f"| {name} | {row['params'] / 1e6:.1f} M | {groups} | {kept} | {row['error']:.0e} | {note} |\n"


def main() -> None:
    torch.set_num_threads(1)
    rows = committed()
    for name in sys.argv[1:] or affordable():
        row = guarded(name)
        versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}
        rows[name] = {**row, "date": datetime.date.today().isoformat(), **versions}
        sys.stdout.write(f"{name} {row['status']} {row.get('error', row.get('why'))}\n")
        sys.stdout.flush()
        ordered = {name: rows[name] for name in names() if name in rows}
        (DOCS / "coverage.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered.values()))
    (DOCS / "coverage.md").write_text(page({name: rows[name] for name in names() if name in rows}))


if __name__ == "__main__":
    main()
