"""Generate a network from a seed: inputs, steps, outputs."""

from __future__ import annotations

import itertools
import warnings
from random import Random

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from generator import (  # noqa: F401  they enter their words
    steps_broadcasts,
    steps_joint,
    steps_kinds,
    steps_layers,
    steps_movement,
    steps_sizes,
    steps_training,
    steps_values,
)
from generator.drawing import LAST, MAP, TOKENS, VOCABULARY, Draw, Value
from generator.program import IMAGES, STEPS, Program, names_in

LARGEST = 1e4
"""Maximum absolute value of an output, to limit rounding errors."""


def generate(seed: int) -> tuple[Program, nn.Module]:
    """The network of a seed, with random weights; it runs on batches of 1, 2 and 3."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # otherwise a network would depend on the warning filters
        for attempt in itertools.count():
            program = _drawn(Random(f"network {seed} {attempt}"))
            network = program.build()
            randomise(network, seed)
            if runs(program, network):
                return program, network
    raise AssertionError


def _drawn(rng: Random) -> Program:
    d = Draw(rng)
    size = rng.choice({1: (8, 6), 2: (4, 5, 6, 8), 3: (4,)}[d.dims])
    sizes = [size if rng.random() < 0.7 else rng.choice((4, 6)) for _ in range(d.dims)]
    x = d.take_input(IMAGES, rng.choice((1, 2, 3, 3)), *sizes)
    assert x is not None
    if rng.random() < 0.15:
        d.take_input(IMAGES, rng.choice((1, 2, 3)), *sizes)
    for value in list(d.values):
        while not d.step(VOCABULARY["convolution"], value):
            pass
    if rng.random() < 0.15 and "time_step" in VOCABULARY:
        d.take_input(STEPS)
        d.step(VOCABULARY["time_step"], d.values[-1])
    total = len(d.kept) + rng.randint(3, 14)
    for _ in range(200):
        if len(d.kept) >= total:
            break
        made = [v for v in d.values if v.name not in names_of_inputs(d)]
        value = d.values[-1] if rng.random() < 0.7 else rng.choice(made if rng.random() < 0.9 else d.values)
        fitting = [w for w in VOCABULARY.values() if value.kind in w.kinds and d.dims in w.dims]
        entry = rng.choices(fitting, [w.weight for w in fitting])[0]
        if value.name in names_of_inputs(d) and entry.name in ("in_place", "alias"):
            continue  # the network must not modify the caller's images
        d.step(entry, value)
    return _answered(d)


def names_of_inputs(d: Draw) -> set[str]:
    return {one.name for one in d.inputs}


def _answered(d: Draw) -> Program:
    """Choose what the network returns, with or without a head."""
    rng = d.rng
    read = {name for step in d.kept for line in step.lines for name in names_in(line.partition(" = ")[2] or line)}
    unread = [v for v in d.values if v.name not in read and v.name not in names_of_inputs(d)]
    last = d.values[-1]
    chosen = [last]
    chosen += [v for v in unread if v is not last and rng.random() < 0.7][:3]
    names = [_head(d, v, raw=len(chosen) > 1) for v in chosen]
    if len(names) == 1:
        form = rng.choice(("{}", "{}", "{}", "({},)", "[{}]", '{{"out": {}}}', "answers.Named1({})"))
    else:
        commas = ", ".join(["{}"] * len(names))
        keys = ", ".join(f'"k{place}": {{}}' for place in range(len(names)))
        nested = "{}, [" + ", ".join(["{}"] * (len(names) - 1)) + "]"
        form = rng.choice((commas, f"[{commas}]", "{{" + keys + "}}", nested, f"answers.Named{len(names)}({commas})"))
    return d.program(tuple(names), form)


def _head(d: Draw, v: Value, *, raw: bool) -> str:
    """The network's output for a value: usually a last layer applied to it and, if ``raw``, also the value itself."""
    rng, outputs = d.rng, d.rng.randint(1, 5)
    draw = rng.random()

    def conv(d: Draw, v: Value) -> str:
        return f"{d.layer(f'nn.Conv{d.dims}d({v.width}, {outputs}, 1)')}({v.name})"

    def linear(d: Draw, v: Value) -> str:
        x = v.name
        if v.kind == MAP:
            x = d.one_of(f"{x}.mean({d.axes})", f"F.adaptive_avg_pool{d.dims}d({x}, 1).flatten(1)")
        elif v.kind == LAST:
            x = f"{x}.mean({tuple(range(1, d.dims + 1))})"
        elif v.kind == TOKENS:
            x = d.one_of(f"{x}.mean(1)", x, f"{x}[:, 0]")
        return f"{d.layer(f'nn.Linear({v.width}, {outputs})')}({x})"

    def auxiliary(d: Draw, v: Value) -> str:
        made, fc = d.name(), d.layer(f"nn.Linear({v.width}, {outputs})")
        d.line(f"{made} = {fc}({v.name}.mean({d.axes}))")
        d.line("if self.training:")
        d.line(f"    return {made}, {d.layer(f'nn.Linear({v.width}, 3)')}({v.name}.amax({d.axes}))")
        return made

    head = linear
    if v.kind == MAP:
        head = auxiliary if draw < 0.04 else conv if draw < 0.25 else linear
    if raw and draw > 0.92:
        return v.name
    if v.kind == MAP and 0.9 < draw < 0.91:
        name = d.name("out")
        d.line(f"{name} = {v.name}.masked_fill({v.name} < 0, -math.inf)")
        d.keep("head", name)
        return name
    name = d.name("out")
    d.line(f"{name} = {head(d, v)}")
    if outputs > 1 and rng.random() < 0.03:
        d.line(f"{name} = {name}.masked_fill(torch.arange({name}.shape[-1]) == 1, float('-inf'))")
    d.keep("head", name)
    return name


def randomise(network: nn.Module, seed: int) -> None:
    """Set every parameter and buffer to random values, away from special ones; in vectors, about a tenth is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(_random(name.rpartition(".")[2], tensor, generator))


def _random(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low

    if name == "running_var":
        return uniform(0.5, 2)
    if name in ("bias", "running_mean"):
        return uniform(-0.5, 0.5)
    if max(tensor.shape, default=1) == tensor.numel():  # vectors such as gains
        signs = torch.where(uniform(0, 1) < 0.2, -1.0, 1.0)
        return uniform(0.5, 1.5) * signs * (uniform(0, 1) > 0.1)
    fan = tensor[0].numel()
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 1.3 * fan**-0.5


def runs(program: Program, network: nn.Module) -> bool:
    """Whether the network itself runs on all batches, in evaluation mode, with finite and moderate outputs."""
    try:
        with torch.no_grad():
            for batch in (1, 2, 3):
                for leaf in tree_leaves(network(*program.examples(batch, seed=1))):
                    values = leaf[~leaf.isneginf()]  # -inf comes from masks
                    if leaf.shape[0] != batch or not len(values) or not values.abs().max() <= LARGEST:
                        return False
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True
