"""Our Triton kernels, compiled for GPUs without one: the interpreter of test_kernels.py accepts more than that."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: make test-zoo", allow_module_level=True)
triton = pytest.importorskip("triton", reason="make test-zoo")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paam.train.cuda.kernels import conv, frozen_norm, norm  # noqa: E402
from paam.train.cuda.kernels import weight_gradient as weights  # noqa: E402
from paam.train.cuda.kernels.rows import padded, unit  # noqa: E402

pytestmark = pytest.mark.zoo

VALUES = ("x", "other", "y", "dy", "dx", "dother")
INTEGERS = ("positions", "channels", "filters", "rows", "programs", "groups", "share", "size")


def assembly(kernel: Any, capability: int, warps: int, weight: str = "*fp32", **fixed: Any) -> str:
    """PTX of a kernel whose activations are bfloat16 and aligned, as allocated tensors are."""
    kinds = dict.fromkeys(VALUES, "*bf16") | dict.fromkeys(INTEGERS, "i32")
    kinds |= {"tracked": "*i64", "momentum": "fp32", "eps": "fp32", "weight": weight}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*fp32") for name in names}
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or (n in INTEGERS and weight == "*fp32")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    text: str = compiled.asm["ptx"]
    return text


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.parametrize(
    "kernel",
    [norm._statistics, norm._forward, norm._backward_sums, norm._backward, frozen_norm._forward, frozen_norm._backward],
    ids=lambda kernel: f"{kernel.__module__.rpartition('.')[2]}{kernel.__name__}",
)
def test_norms_read_sixteen_bytes_at_a_time(kernel, channels, capability):
    every = {
        "has_other": True,
        "has_gate": True,
        "block_c": channels,
        "block_m": norm.BLOCK // channels,
        "block_p": 128,
    }
    fixed = {name: value for name, value in every.items() if name in kernel.arg_names}
    assert re.search(r"ld\.global\S*\.v4\.b32", assembly(kernel, capability, norm.WARPS, **fixed))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [11, *conv.FORWARD])
@pytest.mark.parametrize("kind", ["forward", "backward", "norm"])
def test_convolutions_use_tensor_cores_and_read_whole_rows(width, kind, capability):
    block = padded(width)
    group, block_m, warps, rows, stages = conv.FORWARD[block]
    fixed = {"height": 32, "width": 32, "unit_c": unit(width), "unit_f": unit(width)}
    fixed |= {
        "group": group,
        "block_m": block_m,
        "block_c": block,
        "block_f": block,
        "transposed": kind == "backward",
        "has_norm": kind == "norm",
        "has_other": kind == "norm",
        "has_gate": kind == "norm",
        "rows": rows,
        "stages": stages,
    }
    ptx = assembly(conv._convolve, capability, warps, "*bf16", **fixed)
    assert "mma" in ptx
    sixteen_bytes = bool(re.search(r"cp\.async\.cg\.shared\.global", ptx))  # past the registers
    assert sixteen_bytes == (width % 8 == 0)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [11, *weights.WEIGHT])
def test_gradients_of_weights_use_tensor_cores(width, capability):
    block = padded(width)
    group, block_m, warps, downs, rows, stages = weights.WEIGHT[block]
    fixed = {"height": 32, "width": 32, "unit_c": unit(width), "unit_f": unit(width), "downs": downs}
    fixed |= {"group": group, "block_m": block_m, "block_c": block, "block_f": block, "rows": rows, "stages": stages}
    assert "mma" in assembly(weights._weight_partial, capability, warps, "*bf16", **fixed)


@pytest.mark.parametrize("capability", [80, 90])
def test_parts_of_weight_gradients_are_read_without_branches(capability):
    """What does not exist is masked; the only loop is over parts."""
    ptx = assembly(weights._sum_parts, capability, 4, "*bf16", **weights.SUM)
    assert len(re.findall(r"\bbra\b", ptx)) <= 2
    assert re.search(r"@%p\d+ ld\.global", ptx)
