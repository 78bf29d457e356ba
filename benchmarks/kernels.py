"""Our kernels against the library's, one layer of ResNet-56 at a time: microseconds per call, medians, one process.

    python benchmarks/kernels.py [--search]      --search also times other block sizes than the ones in use

Calls are captured in a CUDA graph of many copies, so that there is no launch overhead; several sets of inputs
alternate, so that they are not all in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

from paam.runs.environment import environment
from paam.train.cuda.fused import FusedNorm
from paam.train.cuda.kernels import conv
from paam.train.cuda.kernels import norm as norm_kernels
from paam.train.cuda.kernels import weight_gradient as weights

LAYERS = {16: 32, 32: 16, 64: 8}
"""Channels of ResNet-56 -> side of the feature maps."""
OTHERS = ((11, 32), (40, 16), (64, 32))
"""Channels and sides that are timed with the same settings, without a search."""
COPIES = 20


def microseconds(call: Callable[[int], object]) -> float:
    """Time of one call; ``call`` gets the index of the set of inputs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(3):
            call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(COPIES):
            call(number % 4)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / COPIES)
    return sorted(times)[len(times) // 2]


def activations(channels: int, side: int) -> list[Tensor]:
    return [
        torch.randn(256, channels, side, side, device="cuda", dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )
        for _ in range(4)
    ]


def convolutions(channels: int, side: int, *, search: bool) -> None:
    inputs, grads = activations(channels, side), activations(channels, side)
    weight = torch.randn(channels, channels, 3, 3, device="cuda", dtype=torch.bfloat16)
    weight = weight.to(memory_format=torch.channels_last)

    def library(mask: list[bool]) -> Callable[[int], object]:
        rest = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return lambda n: torch.ops.aten.convolution_backward(grads[n], inputs[n], weight, *rest)

    theirs = {
        "forward": microseconds(lambda n: F.conv2d(inputs[n], weight, padding=1)),
        "input gradient": microseconds(library([True, False, False])),
        "weight gradient": microseconds(library([False, True, False])),
    }
    ours = {
        "forward": microseconds(lambda n: conv.convolve(inputs[n], weight)),
        "input gradient": microseconds(lambda n: conv.convolve(grads[n], weight, transposed=True)),
        "weight gradient": microseconds(lambda n: weights.weight_gradient(inputs[n], grads[n], weight)),
    }
    for name, time in theirs.items():
        print(
            f"{channels:3d} channels at {side:2d}  convolution, {name:16} library {time:6.1f}  ours {ours[name]:6.1f}",
            flush=True,
        )
    if not search:
        return
    kept = conv.FORWARD[channels], weights.WEIGHT[channels]
    found: list[tuple[float, tuple[int, ...]]] = []
    groups, rows = {16: ((2,), (1, 4, 8, 16)), 32: ((1, 2), (1, 4, 8, 16)), 64: ((1, 2), (1,))}[channels]
    for conv.FORWARD[channels] in itertools.product(groups, (64, 128), (4, 8), rows, (2, 3)):
        group, block_m, warps, *_ = conv.FORWARD[channels]
        if group * block_m * channels > warps * 2048:  # more accumulators than registers
            continue
        with contextlib.suppress(OutOfResources):
            there = microseconds(lambda n: conv.convolve(inputs[n], weight))
            back = microseconds(lambda n: conv.convolve(grads[n], weight, transposed=True))
            found.append(((there + back) / 2, conv.FORWARD[channels]))
    _show("FORWARD", channels, found)
    found = []
    groups = (1, 2) if channels < 64 else (1,)
    for weights.WEIGHT[channels] in itertools.product(groups, (32, 64, 128), (4, 8), (1, 3), (4, 8, 16), (3,)):
        group, _, warps, downs, _, _ = weights.WEIGHT[channels]
        if downs * group * 4 * channels**2 > warps * 8192:  # more accumulators than registers
            continue
        with contextlib.suppress(OutOfResources):
            time = microseconds(lambda n: weights.weight_gradient(inputs[n], grads[n], weight))
            found.append((time, weights.WEIGHT[channels]))
    _show("WEIGHT", channels, found)
    conv.FORWARD[channels], weights.WEIGHT[channels] = kept


def _show(what: str, channels: int, found: list[tuple[float, tuple[int, ...]]]) -> None:
    """Print the four fastest settings."""
    best = "  ".join(f"{time:.1f} {setting}" for time, setting in sorted(found)[:4])
    print(f"   {what} {channels}: {best}", flush=True)


def norms(channels: int, side: int, *, search: bool) -> None:
    """Batch norm, residual sum, ReLU and mask: forward and backward together."""
    inputs = [x.requires_grad_() for x in activations(channels, side)]
    others = [x.requires_grad_() for x in activations(channels, side)]
    grads = activations(channels, side)
    norm = nn.BatchNorm2d(channels).cuda()
    mask = torch.ones(channels, device="cuda")
    quick = FusedNorm(norm)
    leaves = list(norm.parameters())

    def eager(n: int) -> object:
        y = F.relu(norm(inputs[n]) + others[n]) * mask.to(torch.bfloat16).view(1, -1, 1, 1)
        return torch.autograd.grad(y, [inputs[n], others[n], *leaves], grads[n])

    def ours(n: int) -> object:
        return torch.autograd.grad(quick(inputs[n], others[n], mask), [inputs[n], others[n], *leaves], grads[n])

    times = f"eager {microseconds(eager):6.1f}  ours {microseconds(ours):6.1f}"
    print(f"{channels:3d} channels at {side:2d}  norm, sum, ReLU, mask: {times}", flush=True)
    if search:
        kept = norm_kernels.BLOCK, norm_kernels.PROGRAMS, norm_kernels.WARPS
        found = []
        for setting in itertools.product((4096, 8192, 16384), (128, 256, 512), (4, 8)):
            norm_kernels.BLOCK, norm_kernels.PROGRAMS, norm_kernels.WARPS = setting
            found.append((microseconds(ours), setting))
        _show("NORM", channels, found)
        norm_kernels.BLOCK, norm_kernels.PROGRAMS, norm_kernels.WARPS = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    print(json.dumps({**environment("cuda"), "batch": 256}))
    for channels, side in LAYERS.items():
        convolutions(channels, side, search=options.search)
        norms(channels, side, search=options.search)
    for channels, side in OTHERS:
        convolutions(channels, side, search=False)


if __name__ == "__main__":
    main()
