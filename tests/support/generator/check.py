"""Check one network against itself: gated, compacted, with other weights, on other batches, in training."""

from __future__ import annotations

import copy
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import paam
from generator.comparing import Inputs, RefusedThereError, WrongError, called, compare, expect, expect_same, shapes_of
from generator.drawing import VOCABULARY
from generator.generating import generate, randomise, runs
from generator.holding import other_than_before
from generator.program import IMAGES, Program
from generator.training import expect_same_step, in_the_state_of, train
from paam import Pruner
from paam.errors import GraphError, PaamError
from paam.graph.network import Choice, Network
from paam.pruning.select import Selection

EXACT, REFUSED, WRONG, FOREIGN = "exact", "refused", "wrong", "foreign"
PLANS = 2
RESIZED = 2
"""One in this many networks is tested on images of other sizes."""


@dataclass(frozen=True)
class Outcome:
    """The outcome for one network. ``plan``: how it was pruned when it failed; ``notes``: other observations."""

    seed: int
    verdict: str
    reason: str = ""
    plan: str = ""
    words: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()


def check_seed(seed: int) -> Outcome:
    program, network = generate(seed)
    return check(program, network, seed)


def check(program: Program, model: nn.Module, seed: int) -> Outcome:
    trial = Trial(program, model, seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about some of the operations
            trial.run()
    except PaamError as refusal:
        stage = "only when compacted: " if trial.prepared else ""
        return Outcome(seed, REFUSED, f"{stage}{type(refusal).__name__}: {refusal}", trial.said, program.words)
    except WrongError as error:
        return Outcome(seed, WRONG, str(error), trial.said, program.words)
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/paam/" in f.filename]
        place = f"{frames[-1].filename.rpartition('/paam/')[2]}:{frames[-1].name}" if frames else "outside"
        return Outcome(seed, FOREIGN, f"{type(error).__name__} in {place}: {error}", trial.said, program.words)
    return Outcome(seed, EXACT, "", trial.said, program.words, frozenset(trial.notes))


class Trial:
    """The checks of one network. ``said``: the current options and plan, for messages."""

    def __init__(self, program: Program, model: nn.Module, seed: int) -> None:
        self.program, self.model, self.seed = program, model, seed
        self.rng = Random(f"plan {seed}")
        self.options = {
            "streams": self.rng.choice(("independent", "tied")),
            "placement": self.rng.choice(("sum", "branch")),
        }
        self.batch = self.rng.choice((1, 2))
        self.prepared = False
        self.came_training = self.rng.random() < 0.3
        self.said = f"example of batch {self.batch}, {self.options}, training={self.came_training}"
        self.notes: set[str] = set()
        self.by_size = any(name in VOCABULARY and VOCABULARY[name].by_size for name in program.words)
        """Whether the network may refuse batches of a size other than the example's."""

    def run(self) -> None:
        examples = self.program.examples(self.batch, self.seed)
        pruner = self.pruned(self.model, examples)
        self.prepared = True
        self.resized = self.on_other_sizes() if self.seed % RESIZED == 0 else []
        self.check_open(pruner)
        said = self.said
        for number in range(PLANS):
            choice = draw_choice(pruner.network, self.rng)
            kept = {name: np.flatnonzero(mask).tolist() for name, mask in choice.items()}
            self.said = f"{said}, kept: {kept}"
            small = self.check_choice(pruner, choice)
            if number == 0:
                self.check_cost(pruner.network, choice, small, examples)
                self.check_with_other_weights(pruner, choice, small, examples)
        self.check_training(pruner, small)

    def pruned(self, model: nn.Module, examples: Inputs) -> Pruner:
        """A pruner of a copy. Preparing must not change the model."""
        twin = copy.deepcopy(model).train(self.came_training)
        before = copy.deepcopy(twin)
        given = tuple(x.clone() for x in examples)
        pruner = Pruner(twin, given[0] if len(given) == 1 else given, scorer="free", inplace=True, **self.options)
        changed = other_than_before(twin, before)
        expect(not changed, f"preparing has changed '{changed}'")
        expect(all(map(torch.equal, given, examples)), "preparing has changed the example")
        return pruner

    def on_other_sizes(self) -> list[Inputs]:
        """Images that are smaller and larger than the example's, if the model itself accepts them."""
        found, rng = [], Random(f"sizes {self.seed}")
        sizes = next(one.shape[1:] for one in self.program.inputs if one.kind == IMAGES)
        smaller, larger = (1, max(sizes) - 1), (max(sizes) + 1, 2 * max(sizes))
        for batch, bounds in ((2, smaller), (3 - self.batch, larger)):
            inputs = self.program.examples(batch, self.seed, [rng.randint(*bounds) for _ in sizes])
            try:
                answers = tree_leaves(called(self.model, inputs, "the model"))
            except WrongError:
                continue
            if all(len(answer) == batch for answer in answers):  # otherwise samples are mixed with each other
                found.append(inputs)
        return found

    def check_open(self, pruner: Pruner) -> None:
        with pruner.dense():
            pass
        for inputs in (*map(self.inputs, (1, 3)), *self.resized):
            try:
                compare(pruner.model.eval(), self.model, inputs, "with open gates, the gated network")
            except RefusedThereError as refusal:
                self.expect_allowed(inputs, refusal)
                self.notes.add(f"a gated network refuses another {self.other(inputs)} size that the model takes")

    def other(self, inputs: Inputs) -> str:
        return "image" if inputs[0].shape[1:] != self.program.inputs[0].shape else "batch"

    def expect_allowed(self, inputs: Inputs, refusal: RefusedThereError) -> None:
        """Check that a network may refuse such inputs."""
        other_batch = self.by_size and len(inputs[0]) != self.batch
        expect(self.other(inputs) == "image" or other_batch, str(refusal))

    def check_choice(self, pruner: Pruner, choice: Choice, what: str = "the small network") -> nn.Module:
        pruner.use(Selection(pruner.network.plan(choice), 0.5, 1.0, 1.0))
        with pruner.weighting():
            pass
        small = pruner.compact().eval()
        for inputs in (*map(self.inputs, (1, 2, 3)), *self.resized):
            self.check_small(small, pruner.model.eval(), inputs, what)
        return small

    def check_small(self, small: nn.Module, gated: nn.Module, inputs: Inputs, what: str) -> None:
        kind = "small network that kept its class" if type(small) is type(self.model) else "small network"
        size = self.other(inputs)
        try:
            truth = called(gated, inputs, "the gated network")
        except RefusedThereError as refusal:
            self.expect_allowed(inputs, refusal)
            with suppress(RefusedThereError, WrongError):
                called(small, inputs, what)
                self.notes.add(f"a {kind} runs on another {size} size that the gated one refuses")
            return
        try:
            found = called(small, inputs, what)
        except RefusedThereError as refusal:
            self.expect_allowed(inputs, refusal)
            self.notes.add(f"a {kind} refuses another {size} size that the gated one takes")
            return
        expect_same(found, truth, what if size == "batch" else f"on images of another size, {what}", f"{size}s")

    def check_cost(self, network: Network, choice: Choice, small: nn.Module, examples: Inputs) -> None:
        counted, cost = paam.count(small, tuple(x.clone() for x in examples)), network.cost(choice)
        said, found = (cost.params, cost.macs), (counted.params, counted.macs)
        if any(type(module).__name__.startswith("LowRank") for module in small.modules()):
            # Its weight is a product of matrices, computed once for all samples; the MACs it saves are not predicted.
            said, found = said[:1], found[:1]
        expect(said == found, f"cost() says parameters and MACs {said}, the small network has {found}")

    def check_training(self, pruner: Pruner, small: nn.Module) -> None:
        """If the network itself can be trained, so can the gated and the small one. This must be the last check.

        With open gates, a step is that of the network itself.
        """
        inputs, trained = self.inputs(3), pruner.network.traced.model
        model = in_the_state_of(self.model, trained)
        try:
            truth = train(model, inputs)
        except (RuntimeError, ValueError):
            return
        with pruner.dense():
            pass
        for what, network in (("gated", pruner.model), ("small", small)):
            try:
                step = train(network, inputs, trained if what == "gated" else None)
            except GraphError as refusal:
                self.expect_allowed(inputs, RefusedThereError(f"the {what} network does not train: {refusal}"))
                continue
            except Exception as error:
                raise WrongError(f"the {what} network does not train: {type(error).__name__}: {error}") from error
            if what == "gated":
                expect_same_step(step, truth, model, inputs, "the gated network with open gates")

    def check_with_other_weights(self, pruner: Pruner, choice: Choice, small: nn.Module, examples: Inputs) -> None:
        """The same choice with changed weights, and on a fresh copy: nothing may depend on the values of weights."""
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in self.of_network(pruner):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=0.1)
        moved = self.check_choice(pruner, choice, "after the weights have moved, the small network")
        expect(shapes_of(moved) == shapes_of(small), "other weights make a small network of other shapes")
        if self.seed % 4:
            return
        model = copy.deepcopy(self.model)
        randomise(model, self.seed + 1)
        if not runs(self.program, model):  # such as a spectral norm of all zeros: NaN passes a gate of 0
            return
        fresh = self.pruned(model, examples)
        expect(
            fresh.network.traced.fingerprint == pruner.network.traced.fingerprint, "other weights, other fingerprint"
        )
        other = self.check_choice(fresh, choice, "with weights of its own, the small network")
        expect(shapes_of(other) == shapes_of(small), "weights of its own make a small network of other shapes")

    def of_network(self, pruner: Pruner) -> list[nn.Parameter]:
        return [p for p in pruner.network_parameters() if p.is_floating_point()]

    def inputs(self, batch: int) -> Inputs:
        return self.program.examples(batch, self.seed + 7 * batch)


def draw_choice(network: Network, rng: Random) -> Choice:
    """Some groups complete, some emptied, some with one filter, the others at any share."""
    choice = {}
    for group in network.groups:
        draw, mask = rng.random(), np.zeros(group.width, dtype=np.bool_)
        if draw < 0.15:
            mask[:] = True
        elif draw < 0.3:
            mask[rng.randrange(group.width)] = True
        elif draw > 0.45:
            share = rng.uniform(0.2, 0.9)
            mask[:] = [rng.random() < share for _ in range(group.width)]
        choice[group.name] = mask
    return choice
