"""Pruner: PAAM around anyone's own training loop.

pruner = paam.Pruner(model, example_inputs=x, scorer="kq", penalty=5e-4)
for cycle in range(10):
    with pruner.scoring():  # network and batch-norm statistics frozen, analog gates
        for x, y in loader:
            loss = criterion(pruner.model(x), y) + pruner.penalty()
            ...
    with pruner.weighting(keep_macs=0.5):  # scorers frozen, binary gates
        train_one_epoch(pruner.model, loader)
small = pruner.compact()
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paam.activations import activation as find_activation
from paam.errors import PaamError, RecipeError, TargetError
from paam.gates import Gate, Gates, Mode, by_filter, filter_rows
from paam.graph.attach import GATES, GatedModel, attach
from paam.network import Choice, prepare
from paam.plan import Plan
from paam.scorers import LEARNING_RATES, check_scorer, make_scorer
from paam.select import Selection, Target, select


class Pruner:
    """A gated copy of a model (``model``), its scorers, and the phases that train one or the other.

    scorer       "kq", "vanilla" or "free"; "l1" and "random" learn nothing
    activation   what turns a scorer's output into a score
    penalty      lambda, the weight of the scores' l1 norm
    balance      weight of a layer in the penalty: "area" of its feature maps, "side", "none", or by what falls with a
                 filter: "macs", "params"
    placement    where a residual block's last gate stands: behind the "sum", or on the "branch" before it
    streams      layers that write into one residual stream choose "independent" sets, or are "tied" to one
    dim_ratio    KQ: width of keys and queries over the number of filters
    alpha        KQ: temperature
    score_norm   batch norm in score phases: "eval" (statistics frozen) or "train"
    ignore       names of modules (or of graph nodes, as refusals name them) to leave alone: nothing in them is
                 removed, and they read whole values
    score_lr     learning rate of the scorers' own Adam; None takes the scorer's default
    inplace      train the given model's own parameters instead of a copy's
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Tensor | tuple[Tensor, ...],
        *,
        scorer: str = "kq",
        activation: str = "leaky-exponential",
        penalty: float = 5e-4,
        balance: str = "area",
        placement: str = "sum",
        streams: str = "independent",
        dim_ratio: float = 1.0,
        alpha: float = 1.0,
        score_norm: str = "eval",
        ignore: Sequence[str] = (),
        score_lr: float | None = None,
        inplace: bool = False,
    ) -> None:
        if score_norm not in ("eval", "train"):
            raise RecipeError(f"score_norm is 'eval' or 'train', not '{score_norm}'.")
        if not (0 <= penalty < math.inf and 0 < alpha < math.inf and 0 < dim_ratio < math.inf):
            raise RecipeError(
                f"penalty {penalty}, alpha {alpha}, dim_ratio {dim_ratio}: 0 or more, and above 0 the others."
            )
        check_scorer(scorer)
        phi = find_activation(activation)
        self.network = prepare(
            model if inplace else copy.deepcopy(model),
            example_inputs,
            placement=placement,
            streams=streams,
            ignore=ignore,
        )
        if not self.network.groups:
            raise RecipeError(f"{type(model).__name__} has no layer that could be pruned.")

        def make_gate(layers: list[nn.Module]) -> Gate:
            rows = [filter_rows(layer) for layer in layers]
            width, weights = len(rows[0]), sum(row.shape[1] for row in rows)
            scorer_net = make_scorer(scorer, width, weights, dim_ratio=dim_ratio, alpha=alpha)
            return Gate(layers, width, scorer_net.to(rows[0].device, rows[0].dtype), phi)

        self.model: GatedModel
        self.gates: dict[str, Gate]
        traced = self.network.traced
        self.model, self.gates = attach(traced, self.network.ops, self.network.groups, make_gate)
        self.selection: Selection | None = None
        self._penalty = penalty
        balances = self.network.balance(balance)
        self._all_gates.weigh([balances[group.name] for group in self.network.groups])
        self._freeze_norms = score_norm == "eval"
        lr = LEARNING_RATES[scorer] if score_lr is None else score_lr
        learned = self.scorer_parameters()
        self.optimizer = torch.optim.Adam(learned, lr=lr) if learned else None
        """The scorers' own optimiser, for score phases; None for scorers that learn nothing."""

    def scorer_parameters(self) -> list[nn.Parameter]:
        return [p for gate in self.gates.values() for p in gate.parameters()]

    def network_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters() if not name.startswith(f"{GATES}.")]

    def scores(self) -> dict[str, Tensor]:
        """Current score of every filter, by group, shape [width], detached."""
        with torch.no_grad():
            return dict(zip(self.gates, self._all_gates.scores(), strict=True))

    def penalty(self) -> Tensor:
        """lambda * sum over groups of balance * l1 norm of the scores; differentiable."""
        scores = self._all_gates.scores()
        return self._penalty * torch.dot(torch.cat(scores).abs(), self._all_gates.weights.to(scores[0].dtype))

    def select(self, **target: Any) -> Selection:
        """Choose what stays by the current scores: threshold=, keep_filters=, keep_macs= or keep_params=; round_to=.

        See :class:`paam.Target`.
        """
        return self.use(select(self.network, self.scores(), Target(**target)))

    def use(self, selection: Selection) -> Selection:
        """Make a selection the current one: binary gates follow it, and compact() applies it."""
        self._set_masks(self.network.choice(selection.plan))
        self.selection = selection
        return selection

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Score phase: analog gates; the network's parameters and batch-norm statistics do not move."""
        if self.optimizer is None:
            raise PaamError("This scorer learns nothing: go straight to weighting(...).")
        self._all_gates.hold()
        try:
            with self._phase("analog", train_scorers=True):
                yield
        finally:
            self._all_gates.release()

    @contextmanager
    def weighting(self, **target: Any) -> Iterator[None]:
        """Weight phase: binary gates; scorers do not move. A target selects anew, none keeps the current selection.

        Filters whose gate is closed leave the phase as they entered it, whatever momentum or weight decay did to
        them, so that they are intact if their score brings them back.
        """
        if target:
            self.select(**target)
        elif self.selection is None:
            raise TargetError("weighting() needs a target the first time, for example weighting(keep_macs=0.5).")
        asleep = self._closed_filters()
        with self._phase("binary", train_scorers=False):
            try:
                yield
            finally:
                with torch.no_grad():
                    for filters, rows, values in asleep:
                        filters[rows] = values

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Warm-up: open gates, scorers frozen."""
        with self._phase("open", train_scorers=False):
            yield

    def compact(self, plan: Plan | None = None) -> nn.Module:
        """The smaller network, an ordinary module in evaluation-equal function; by default of the last selection."""
        if plan is None:
            if self.selection is None:
                raise PaamError("Nothing is selected yet: run weighting(keep_macs=...) or select(...) first.")
            plan = self.selection.plan
        return self.network.compact(plan)

    @contextmanager
    def _phase(self, mode: Mode, *, train_scorers: bool) -> Iterator[None]:
        training = {module: module.training for module in self.model.modules()}
        grads = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
        for parameter in self.network_parameters():
            parameter.requires_grad_(not train_scorers and grads[parameter])
        for parameter in self.scorer_parameters():
            parameter.requires_grad_(train_scorers)
        self._all_gates.mode = mode
        self.model.norms_frozen = train_scorers and self._freeze_norms
        self.model.train()
        try:
            yield
        finally:
            self.model.norms_frozen = False
            for module, was in training.items():
                module.training = was
            for parameter, needs in grads.items():
                parameter.requires_grad_(needs)

    @property
    def _all_gates(self) -> Gates:
        gates = self.model.get_submodule(GATES)
        assert isinstance(gates, Gates)
        return gates

    def _set_masks(self, choice: Choice) -> None:
        for name, mask in choice.items():
            self.gates[name].mask.copy_(torch.from_numpy(mask))

    def _closed_filters(self) -> list[tuple[Tensor, tuple[Tensor, Tensor], Tensor]]:
        """Copies of everything that belongs to a filter whose gate is closed: (parameter by filter, rows, values)."""
        saved = []
        for group in self.network.groups:
            rows = (self.gates[group.name].mask == 0).nonzero().flatten()
            if len(rows):
                for layer in (*group.layers, *group.norms):
                    module = self.network.traced.model.get_submodule(layer)
                    for parameter in module.parameters(recurse=False):
                        filters = by_filter(module, parameter.detach())
                        place = rows // filters.shape[1], rows % filters.shape[1]
                        saved.append((filters, place, filters[place].clone()))
        return saved
