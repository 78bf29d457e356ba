"""Rows of docs/reference/coverage.md examined again: a sample, with ZOO=all all but the giants'; real exports."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

pytestmark = pytest.mark.zoo
zoo = pytest.importorskip("zoo", reason="torchvision and timm are not installed: make test-zoo installs them")

import paam  # noqa: E402
import paam.cli  # noqa: E402
from networks import compacted, lively  # noqa: E402
from paam.data.augment import OPERATIONS, trivial_augment  # noqa: E402
from paam.models import build_model, resnet56  # noqa: E402
from paam.models.zoo import import_torchvision  # noqa: E402
from paam.pruning.select import Selection  # noqa: E402

COMMITTED = zoo.committed()
AGAIN = zoo.affordable() if os.environ.get("ZOO") == "all" else zoo.sample()


@pytest.mark.parametrize("name", AGAIN)
def test_row(name: str) -> None:
    found, row = zoo.guarded(name), COMMITTED[name]
    assert found["status"] in ("exact", "refused"), found
    compared = ("params", "status", "groups", "class_kept", "why")
    assert {key: found.get(key) for key in compared} == {key: row.get(key) for key in compared}


def test_every_family_of_timm_is_in_the_table() -> None:
    convolutional, others = set(zoo.FAMILIES), set(zoo.PURE_TRANSFORMERS)
    assert not convolutional & others
    assert convolutional | others == set(zoo.timm.list_modules())
    for module, members in zoo.FAMILIES.items():
        assert {name.partition("(")[0] for name in members} <= set(zoo.timm.list_models(module=module))
    assert {f"timm:{name}" for name in zoo.ONCE_WRONG} <= set(zoo.sample()) <= set(zoo.names())


def test_few_are_refused() -> None:
    """At most 5 % of torchvision's classifiers and 10 % of timm's families, and nothing is worse than refused."""
    assert set(COMMITTED) == set(zoo.names())
    assert {row["status"] for row in COMMITTED.values()} <= {"exact", "refused"}
    assert max(row.get("error", 0) for row in COMMITTED.values()) < zoo.BOUND
    refused = {name for name, row in COMMITTED.items() if row["status"] == "refused"}
    classifiers = {f"torchvision:{name}" for name in zoo.torchvision.models.list_models(module=zoo.torchvision.models)}
    classifiers &= set(COMMITTED)
    assert len(refused & classifiers) <= 0.05 * len(classifiers)
    families = [all(f"timm:{name}" in refused for name in members) for members in zoo.FAMILIES.values()]
    assert sum(families) <= 0.1 * len(families)
    assert "torchvision:fcn_resnet50" not in refused


@pytest.mark.parametrize("name", ["nf_regnet_b0", "eca_nfnet_l0", "nf_resnet26", "nfnet_l0"])
def test_the_gain_of_an_nfnet_moves(name: str, tmp_path: Path) -> None:
    """It is zero when the network is built. A plan made then holds when real steps have moved it, on disk too."""
    torch.manual_seed(0)
    model = build_model(f"timm:{name}", num_classes=10, in_channels=3).double()
    pruner = paam.Pruner(model, torch.zeros(1, 3, 64, 64).double(), scorer="free", streams="tied", inplace=True)
    choice = zoo.removed_at_random(pruner.network, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, labels = torch.randn(4, 3, 64, 64).double(), torch.arange(4)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(x), labels).backward()
        optimizer.step()
    gains = [p for name, p in model.named_parameters() if name.endswith(("skipinit_gain", "gain"))]
    assert gains
    assert any(bool(gain.abs().max() > 1e-4) for gain in gains)
    small = compacted(pruner, choice)
    truth = pruner.model.eval()(x)
    assert bool((small(x) - truth).abs().max() <= zoo.BOUND * truth.abs().max())
    paam.save(small, tmp_path / "small")
    fresh = build_model(f"timm:{name}", num_classes=10, in_channels=3).double()
    assert torch.equal(paam.load(tmp_path / "small", fresh)(x), small(x))


def test_page_is_what_the_rows_say() -> None:
    assert (zoo.DOCS / "coverage.md").read_text() == zoo.page(COMMITTED)


def pruned(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = resnet56() if name == "resnet56" else build_model(name, num_classes=10, in_channels=3)
    x = torch.randn(5, 3, *[32 if name == "resnet56" else 96] * 2)
    pruner = paam.Pruner(lively(model).float(), x[:1], scorer="free")
    plan = pruner.network.plan(zoo.removed_at_random(pruner.network, 0.5))
    pruner.use(Selection(plan, 0.5, 1.0, 1.0))
    return pruner.compact().eval(), x


@pytest.fixture(scope="module", params=["resnet56", "torchvision:mobilenet_v3_large", "torchvision:resnet50"])
def network(request) -> tuple[nn.Module, Tensor]:
    return pruned(request.param)


def close(value: Tensor, truth: Tensor) -> bool:
    return bool((value - truth).abs().max() <= 1e-4 * truth.abs().max())


def test_onnx(network: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model, x = network
    paam.export(model, x[:2], tmp_path / "model.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (answer,) = session.run(None, {"input": x.numpy()})
    assert close(torch.from_numpy(answer), model(x))
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert not {"BatchNormalization", "Dropout"} & {node.op_type for node in graph.node if len(node.output) > 1}
    assert not any("back" in tensor.name or "num_batches" in tensor.name for tensor in graph.initializer)


def test_pt2(network: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    model, x = network
    paam.export(model, x[:2], tmp_path / "model.pt2", "pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert close(loaded.module()(x), model(x))
    assert not any("dropout" in str(node.target) for node in loaded.graph.nodes)
    assert not any("back" in name or "num_batches" in name for name in (*loaded.constants, *loaded.state_dict))


def test_pickle(network: tuple[nn.Module, Tensor]) -> None:
    model, x = network
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_several_inputs(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see, self.read, self.head = nn.Conv2d(3, 8, 3), nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, image: Tensor, words: Tensor) -> Tensor:
            return self.head((self.see(image).relu() * self.read(words).sigmoid()[:, :, None, None]).mean((2, 3)))

    torch.manual_seed(0)
    image, words = torch.randn(4, 3, 8, 8), torch.randn(4, 5)
    pruner = paam.Pruner(Both(), (image[:1], words[:1]))
    pruner.select(keep_filters=0.5)
    small = pruner.compact().eval()
    paam.export(small, (image[:1], words[:1]), tmp_path / "both.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "both.onnx")
    (answer,) = session.run(None, {"input0": image.numpy(), "input1": words.numpy()})
    assert close(torch.from_numpy(answer), small(image, words))


def test_command_line_from_images_to_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of torchvision on a folder of images: pruned, exported, measured."""
    onnxruntime = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    for place in ("train/dark", "train/light", "test/dark", "test/light"):
        (tmp_path / "images" / place).mkdir(parents=True)
        for number in range(6):
            pixels = rng.integers(0, 128, (32, 32, 3)) + 127 * ("light" in place)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "images" / place / f"{number}.png")
    (tmp_path / "own.toml").write_text(
        """
        description = "a network of torchvision on images"
        model.name = "torchvision:mobilenet_v3_small"
        data = { name = "folder", image_size = 32, batch_size = 6 }
        schedule = { warmup = 1, cycles = 1, score = 1, weight = 1, finetune = 1 }
        target = { keep_macs = 0.5, round_to = 4 }
        """
    )
    monkeypatch.chdir(tmp_path)

    def paam_command(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["paam", *arguments])
        with pytest.raises(SystemExit) as done:
            paam.cli.main()
        assert not done.value.code

    paam_command("prune", "own.toml", "--data=images", "--out=run", "--device=cpu")
    paam_command("export", "run", "--format=onnx")
    paam_command("bench", "run", "--batch=2", "--repeats=2", "--device=cpu")
    small = paam.load("run", build_model("torchvision:mobilenet_v3_small", num_classes=2, in_channels=3))
    groups = paam.Plan.read(Path("run/plan.json")).groups.values()
    assert all(len(kept.filters) % 4 == 0 or len(kept.filters) == kept.width for kept in groups)
    x = torch.randn(3, 3, 32, 32)
    (answer,) = onnxruntime.InferenceSession("run/model.onnx").run(None, {"input": x.numpy()})
    assert close(torch.from_numpy(answer), small(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch.compile's own doing
def test_ordinary_module(network: tuple[nn.Module, Tensor]) -> None:
    """deepcopy, other dtypes and memory formats, torch.compile without a break, training."""
    model, x = network
    truth = model(x)
    assert torch.equal(copy.deepcopy(model)(x), truth)
    assert close(copy.deepcopy(model).double()(x.double()).float(), truth)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert close(last(x.to(memory_format=torch.channels_last)), truth)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    assert close(compiled(x), truth)
    trained = copy.deepcopy(model).train()
    trained(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.parameters())


# ---------------------------------------------------------------- TrivialAugment, as torchvision has it

OPERATION = {  # ours: theirs, and their magnitude at full strength
    "identity": ("Identity", 0.0),
    "shear x": ("ShearX", 0.99),
    "shear y": ("ShearY", 0.99),
    "translate x": ("TranslateX", 32.0),
    "translate y": ("TranslateY", 32.0),
    "rotate": ("Rotate", 135.0),
    "brightness": ("Brightness", 0.99),
    "colour": ("Color", 0.99),
    "contrast": ("Contrast", 0.99),
    "sharpness": ("Sharpness", 0.99),
    "posterize": ("Posterize", None),
    "solarize": ("Solarize", None),
    "autocontrast": ("AutoContrast", 0.0),
    "equalize": ("Equalize", 0.0),
}


@pytest.mark.parametrize("ours", OPERATIONS)
def test_an_operation_of_trivial_augment_is_torchvisions(ours: str) -> None:
    torchvision = import_torchvision()
    autoaugment = torchvision.transforms.autoaugment
    nearest = torchvision.transforms.InterpolationMode.NEAREST
    # Their own table of magnitudes: name -> (one per strength, whether a sign is drawn).
    space = autoaugment.TrivialAugmentWide()._augmentation_space(31)
    assert {name for name, _ in OPERATION.values()} == set(space)
    assert list(OPERATION) == list(OPERATIONS)
    theirs, full = OPERATION[ours]
    magnitudes, signed = space[theirs]
    if full:
        assert float(magnitudes[-1]) == pytest.approx(full)
        assert signed
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 32, 32), generator=generator).to(torch.uint8)
    smooth = torch.nn.functional.interpolate(images[3:, :, :5, :5].float(), (32, 32), mode="bilinear")
    images[3:] = (0.6 * smooth + 30).to(torch.uint8)
    blends = ours in ("brightness", "colour", "contrast", "sharpness")
    for level in range(31):
        magnitude = round(float(magnitudes[level]), 4) if magnitudes.ndim else 0.0  # 16 pixels are not 15.999999
        for sign in (1.0, -1.0) if signed else (1.0,):
            expected = [autoaugment._apply_op(i, theirs, magnitude * sign, nearest, [0.0] * 3) for i in images]
            number = torch.full((6,), list(OPERATIONS).index(ours))
            got = trivial_augment(images, number, torch.full((6,), level / 30), torch.full((6,), sign))
            apart = (got.int() - torch.stack(expected).int()).abs()
            if ours == "rotate":  # on the diagonal of a turn by 45 degrees two pixels are equally near
                assert (apart > 0).float().mean() <= (0.06 if level in (10, 30) else 0.002), (level, sign)
            else:
                assert apart.max() <= int(blends), (level, sign)
