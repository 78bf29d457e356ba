"""What users do with a small network that holds index maps: save, copy, trace, compile, export, quantise."""

from __future__ import annotations

import copy
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paam
from networks import lively
from paam.graph.network import prepare
from paam.graph.rewired import RewiredModel


class UNet(nn.Module):
    """Two levels; blocks add into streams of their own, so that independent plans need index maps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = self.block(3, 8), self.block(8, 8), self.block(8, 8)
        self.down, self.deep = self.block(8, 16), self.block(16, 16)
        self.up, self.join, self.head = nn.ConvTranspose2d(16, 8, 2, 2), self.block(16, 8), nn.Conv2d(8, 4, 1)

    def block(self, inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.left(x)
        x = x + self.right(x)
        y = self.down(F.max_pool2d(x, 2))
        y = y + self.deep(y)
        y = F.interpolate(self.up(y), size=x.shape[2:])
        return self.head(self.join(torch.cat([y, x], 1)))


@pytest.fixture(scope="module")
def small() -> nn.Module:
    network = prepare(lively(UNet()).float(), torch.zeros(1, 3, 16, 16))
    rng = np.random.default_rng(0)
    model = network.compact(network.plan({g.name: rng.random(g.width) < 0.5 for g in network.groups})).eval()
    assert isinstance(model, RewiredModel)
    assert any(name.startswith("paam_maps.") for name, _ in model.named_modules())
    return model


@pytest.fixture(params=[(1, 16), (3, 24)], ids=["example", "another size"])
def x(request) -> Tensor:
    batch, size = request.param
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_saved_and_loaded_by_torch(small: nn.Module, x: Tensor) -> None:
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), small(x))


def test_copied(small: nn.Module, x: Tensor) -> None:
    assert torch.equal(copy.deepcopy(small)(x), small(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_by_jit(small: nn.Module, x: Tensor) -> None:
    traced = torch.jit.trace(small, torch.zeros(2, 3, 16, 16))
    assert torch.allclose(traced(x), small(x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch.compile's own doing
def test_compiled_in_one_graph(small: nn.Module, x: Tensor) -> None:
    torch.compiler.reset()
    compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), small(x), rtol=1e-5, atol=1e-6)


@pytest.mark.zoo
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own doing
def test_compiled_to_machine_code_forward_and_backward(small: nn.Module) -> None:
    torch.compiler.reset()
    model, other = copy.deepcopy(small), copy.deepcopy(small)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    answer, truth = torch.compile(model, fullgraph=True)(x), other(x)
    assert torch.allclose(answer, truth, rtol=1e-5, atol=1e-6)
    answer.square().mean().backward(), truth.square().mean().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def error(value: Tensor, truth: Tensor) -> float:
    """Relative to what varies: against the biases of the head, which are most of the answer, any error is small."""
    return float((value - truth).norm() / (truth - truth.mean((0, 2, 3), keepdim=True)).norm())


CLOSE = 0.1
"""Int8 makes errors of 0.05 or 0.06, one wrong map of 0.12 or more."""


@torch.no_grad()
def test_a_wrong_map_is_not_close(small: nn.Module, images: Tensor) -> None:
    maps = [name for name, _ in small.named_modules() if name.startswith("paam_maps.")]
    for name in maps:
        wrong = copy.deepcopy(small)
        index = wrong.get_submodule(name).index
        index.copy_(index.roll(1))
        assert error(wrong(images), small(images)) > CLOSE, name


@pytest.mark.zoo
def test_quantised_by_onnx_runtime(small: nn.Module, images: Tensor, tmp_path: Path) -> None:
    """Static int8: close to the float network on what it was calibrated with."""
    onnxruntime = pytest.importorskip("onnxruntime")
    quantization = pytest.importorskip("onnxruntime.quantization")
    paam.export(small, images[:2], tmp_path / "small.onnx", "onnx")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{"input": batch.numpy()} for batch in images.split(2)])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    quantization.quantize_static(tmp_path / "small.onnx", tmp_path / "int8.onnx", Reader())
    session = onnxruntime.InferenceSession(tmp_path / "int8.onnx")
    (answer,) = session.run(None, {"input": images.numpy()})
    with torch.no_grad():
        assert error(torch.from_numpy(answer), small(images)) < CLOSE
    nodes = {node.op_type for node in pytest.importorskip("onnx").load(tmp_path / "int8.onnx").graph.node}
    assert nodes & {"QuantizeLinear", "QLinearConv"}


@pytest.mark.zoo
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # torchao uses it when it is imported
    "ignore:The input of maxpool2d is not quantized:UserWarning",  # it reads a sum, which stays in float
)
def test_quantised_by_pt2e(small: nn.Module, images: Tensor) -> None:
    """Every convolution reads int8; the transposed one torchao leaves alone."""
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(small, (images[:2],), dynamic_shapes=({0: batch},))
        observed = pt2e.prepare_pt2e(program.module(), quantizer)
        for part in images.split(2):
            observed(part)
        quantised = pt2e.convert_pt2e(observed)
        assert error(quantised(images), small(images)) < CLOSE

    read, weights = torch.ops.quantized_decomposed, dict(quantised.named_buffers())
    convolutions = [node for node in quantised.graph.nodes if node.target is torch.ops.aten.conv2d.default]
    assert len(convolutions) == sum(isinstance(module, nn.Conv2d) for module in small.modules())
    for input, weight in (node.args[:2] for node in convolutions):
        assert input.target is read.dequantize_per_tensor.default
        assert input.args[0].target is read.quantize_per_tensor.default
        assert weight.target is read.dequantize_per_channel.default
        assert weights[weight.args[0].target].dtype == torch.int8
