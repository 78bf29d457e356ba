"""Every row of docs/coverage.md but the giants', examined again; exports of real networks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.zoo
zoo = pytest.importorskip("zoo", reason="torchvision and timm are not installed: make test-zoo installs them")

import paam  # noqa: E402
from conftest import lively  # noqa: E402
from paam.models import build_model, resnet56  # noqa: E402
from paam.select import Selection  # noqa: E402

COMMITTED = zoo.committed()
SMALL = [name for name in zoo.names() if name not in COMMITTED or COMMITTED[name]["params"] <= zoo.GIANT]


@pytest.mark.parametrize("name", SMALL)
def test_row(name: str) -> None:
    found, row = zoo.examine(name), COMMITTED[name]
    assert found.get("error", 0) < 1e-9
    compared = ("params", "status", "groups", "class_kept", "why")
    assert {key: found.get(key) for key in compared} == {key: row.get(key) for key in compared}


def test_few_are_refused() -> None:
    """At most 5 % of torchvision's classifiers and 10 % of timm's families."""
    assert set(COMMITTED) == set(zoo.names())
    refused = {name for name, row in COMMITTED.items() if row["status"] == "refused"}
    classifiers = [name for name in COMMITTED if name.startswith("torchvision:") and "fcn" not in name]
    assert len(refused.intersection(classifiers)) <= 0.05 * len(classifiers)
    families = [all(f"timm:{name}" in refused for name in members) for members in zoo.FAMILIES.values()]
    assert len(families) == 30
    assert sum(families) <= 3
    assert "torchvision:fcn_resnet50" not in refused


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
