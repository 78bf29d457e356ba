"""Is the small network really faster? ResNet-50 at half of its MACs, dense against tied and independent streams.

    python benchmarks/speedup.py                                                    # CPU, batch 8
    python benchmarks/speedup.py --device cuda --batch 256 --bfloat16 --channels-last --compile

All networks alternate in one process. "speed-up" is dense time over pruned time; "of ideal" is that divided by the
ratio of MACs: the gap to 100 % is due to memory traffic, small layers and, with independent streams, index maps.
"""

from __future__ import annotations

import argparse
import copy
import json

import torch
from torch import nn

from paam import Pruner, count
from paam.artifacts.latency import measure_latency, peak_memory
from paam.graph.channel_map import ChannelMap
from paam.models import build_model
from paam.runs.environment import environment


def pruned(model: nn.Module, example: torch.Tensor, streams: str, keep_macs: float, round_to: int) -> nn.Module:
    """Random scores: every layer loses about the same share, so that no layer is favoured."""
    pruner = Pruner(model, example, scorer="free", streams=streams)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in pruner.scorer_parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    pruner.select(keep_macs=keep_macs, round_to=round_to)
    return pruner.compact()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep-macs", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--round-to", type=int, nargs="+", default=[8, 1])
    for flag in ("--bfloat16", "--channels-last", "--compile"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    torch.manual_seed(0)
    example = torch.randn(1, 3, args.size, args.size)
    dense = build_model("torchvision:resnet50", num_classes=1000, in_channels=3).eval()
    networks: dict[str, nn.Module] = {"dense": dense}
    for streams in ("tied", "independent"):
        for round_to in args.round_to:
            name = f"{streams}, round_to={round_to}"
            networks[name] = pruned(dense, example, streams, args.keep_macs, round_to).eval()
    macs = {name: count(model, example).macs for name, model in networks.items()}
    maps = {name: sum(isinstance(m, ChannelMap) for m in model.modules()) for name, model in networks.items()}
    batch = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    dtype = torch.bfloat16 if args.bfloat16 else torch.float32
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    batch = batch.to(dtype=dtype, memory_format=layout)
    ready = {
        name: copy.deepcopy(model).to(device=args.device, dtype=dtype, memory_format=layout)
        for name, model in networks.items()
    }
    memory = {name: peak_memory(model, batch) for name, model in ready.items()}
    if args.compile:
        ready = {name: torch.compile(model) for name, model in ready.items()}
    print(json.dumps({**environment(args.device), **vars(args), "threads": torch.get_num_threads()}), flush=True)
    times = measure_latency(ready, batch, repeats=args.repeats, warmup=3)
    base = times["dense"].median
    print(f"{'':26}{'MACs':>8}{'ms (quartiles)':>26}{'speed-up':>10}{'of ideal':>10}{'peak MiB':>10}{'maps':>6}")
    for name, latency in times.items():
        ratio, speed = macs["dense"] / macs[name], base / latency.median
        spread = f"{latency.median:.2f} ({latency.low:.2f} to {latency.high:.2f})"
        share, peak = f"{100 * speed / ratio:.0f} %", f"{memory[name] / 2**20:.0f}"
        print(f"{name:26}{1 / ratio:>7.1%} {spread:>26}{speed:>8.2f} x{share:>10}{peak:>10}{maps[name]:>6}")


if __name__ == "__main__":
    main()
