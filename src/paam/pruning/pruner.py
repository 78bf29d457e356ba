"""Pruner: PAAM in your own training loop.

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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from paam.config.settings import PruneSettings, check_setting
from paam.config.target import Target
from paam.errors import PaamError, RecipeError, TargetError
from paam.graph.copies import deep_copy
from paam.graph.gating import GATES
from paam.graph.groups import Group
from paam.graph.network import Choice, prepare
from paam.graph.plan import Plan
from paam.pruning.activations import activation as find_activation
from paam.pruning.attach import GatedModel, GatedOwnCode, attach
from paam.pruning.criterion import Chosen, find_criterion, score_groups
from paam.pruning.gates import Gate, Gates, Mode, by_filter, filter_rows
from paam.pruning.scorers import MakeScorer, check_options, scorer_of
from paam.pruning.select import Selection, select
from paam.pruning.state import pruner_state, restore_pruner

_NOT_GIVEN: Any = object()


class Pruner:
    """A gated copy of a model (``model``), its scorers, and the phases that train one or the other.

    scorer       learns scores: "kq" (the default), "vanilla", "free", or a function (filters, weights per filter) ->
                 paam.Scorer; None if a criterion computes them
    criterion    computes scores instead, without learning: "l1", "l2", "fpgm", "hrank", "random", or a paam.Criterion
    activation   what turns a scorer's output into a score, by name or as a function of tensors
    penalty      lambda, the weight of the scores' l1 norm
    balance      weight of a layer in the penalty: "area" of its feature maps, "side", "none", or the cost that a filter
                 saves: "macs", "params"
    placement    position of a residual block's last gate: after the "sum", or on the "branch" before it
    streams      layers that write into one residual stream choose "independent" sets, or are "tied" to one
    score_norm   batch norm in score phases: "eval" (statistics frozen) or "train"
    ignore       names of modules (or of graph nodes, as in error messages) to skip: nothing in them is removed, and
                 they get all channels
    keep_class   do not prune groups that would prevent the small network from running its class's own code
    on_decision  for models whose control flow depends on tensor values: "refuse"; "stop": leave everything after the
                 first such decision to the model's own code, as in detectors; "fix": decide as for the example
    score_lr     learning rate of the scorers' Adam; None for the scorer's default
    inplace      train the given model's parameters instead of a copy
    check        compare the recorded graph with the model, on other weights and sizes; a difference is an error
    options      of a scorer given by name; for KQ: dim_ratio (width of keys and queries over the number of filters) and
                 alpha (temperature)
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Tensor | tuple[Tensor, ...],
        *,
        scorer: str | MakeScorer | None = _NOT_GIVEN,
        criterion: Chosen | None = None,
        activation: str | Callable[[Tensor], Tensor] = "leaky-exponential",
        penalty: float = 5e-4,
        balance: str = "area",
        placement: str = "sum",
        streams: str = "independent",
        score_norm: str = "eval",
        ignore: Sequence[str] = (),
        keep_class: bool = False,
        on_decision: str = "refuse",
        score_lr: float | None = None,
        inplace: bool = False,
        check: bool = True,
        **options: Any,
    ) -> None:
        if scorer is _NOT_GIVEN:
            scorer = "kq" if criterion is None else None
        elif scorer is not None and criterion is not None:
            raise RecipeError("Give a scorer, which learns scores, or a criterion, which computes them, but not both.")
        if options and not isinstance(scorer, str):
            check_options(options)
            raise RecipeError(f"{', '.join(options)}: options are for scorers that are given by name.")
        settings = {"score_norm": score_norm, "penalty": penalty, "balance": balance}
        for name, value in settings.items():
            check_setting(PruneSettings, name, value)
        structure: dict[str, Any] = {"placement": placement, "streams": streams, "ignore": ignore}
        structure |= {"keep_class": keep_class, "on_decision": on_decision, "check": check}
        chosen = {"scorer": scorer, "criterion": criterion, "activation": activation, "score_lr": score_lr}
        self._options = {**settings, **structure, **chosen, **options}
        self.criterion = None if criterion is None else find_criterion(criterion)
        make_scorer = scorer_of(scorer, **options) if isinstance(scorer, str) else scorer
        phi = find_activation(activation)
        self.network = prepare(
            model if inplace else deep_copy(model),
            example_inputs,
            **structure,
        )
        if not self.network.groups:
            raise RecipeError(f"{type(model).__name__} has no layer that can be pruned.")

        def make_gate(layers: list[nn.Module], width: int) -> Gate:
            rows = [filter_rows(layer) for layer in layers]
            if make_scorer is None:
                return Gate(layers, width, None, phi)
            weights = sum(row.numel() // width for row in rows)
            return Gate(layers, width, make_scorer(width, weights).to(rows[0].device, rows[0].dtype), phi)

        self.model: GatedModel | GatedOwnCode
        self.gates: dict[str, Gate]
        traced = self.network.traced
        self.model, self.gates = attach(traced, self.network.ops, self.network.groups, make_gate)
        self.selection: Selection | None = None
        self._penalty = penalty
        balances = self.network.balance(balance)
        self._all_gates.weigh([balances[group.name] for group in self.network.groups])
        self._freeze_norms = score_norm == "eval"
        own_rate = next((gate.scorer.default_lr for gate in self.gates.values() if gate.scorer is not None), 0.0)
        self.score_lr = own_rate if score_lr is None else score_lr
        learned = self.scorer_parameters()
        self.optimizer = torch.optim.Adam(learned, lr=self.score_lr) if learned else None
        """The scorers' optimiser, for score phases; None if there are no parameters to learn."""

    def scorer_parameters(self) -> list[nn.Parameter]:
        return [p for gate in self.gates.values() for p in gate.parameters()]

    def network_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters() if not name.startswith(f"{GATES}.")]

    def scores(
        self,
        criterion: Chosen | None = None,
        batches: Iterable[Any] | None = None,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Current score of every filter, by group, shape [width], detached: learned, or from a criterion.

        ``batches``: inputs of the model, for criteria that read feature maps with the current gates (see gate_mode);
        labels from a DataLoader are ignored. ``seed``: for random criteria.
        """
        chosen = self.criterion if criterion is None else find_criterion(criterion)
        if chosen is not None:
            closed = {name: gate.mask for name, gate in self.gates.items()} if self.gate_mode == "binary" else None
            return score_groups(self.network, chosen, batches, seed, closed)
        if any(gate.scorer is None for gate in self.gates.values()):
            raise PaamError("This Pruner learns no scores: give a criterion, for example select('l1', keep_macs=0.5).")
        with torch.no_grad():
            return dict(zip(self.gates, self._all_gates.scores(), strict=True))

    def penalty(self) -> Tensor:
        """lambda * sum over groups of balance * l1 norm of the learned scores; differentiable."""
        if self.optimizer is None:
            raise PaamError("There is no penalty without learned scores: remove it from the loss.")
        scores = self._all_gates.scores()
        return self._penalty * torch.dot(torch.cat(scores).abs(), self._all_gates.weights.to(scores[0].dtype))

    def select(
        self,
        criterion: Chosen | None = None,
        *,
        batches: Iterable[Any] | None = None,
        seed: int = 0,
        **target: Any,
    ) -> Selection:
        """Select filters to keep: threshold=, keep_filters=, keep_macs= or keep_params=; round_to= (see paam.Target).

        The other arguments are for :meth:`scores`.
        """
        return self.use(select(self.network, self.scores(criterion, batches, seed), Target(**target)))

    def use(self, selection: Selection) -> Selection:
        """Set the current selection, for binary gates and compact()."""
        self._set_masks(self.network.choice(selection.plan))
        self.selection = selection
        return selection

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Score phase: analog gates; the network's parameters and batch-norm statistics are frozen."""
        if self.optimizer is None:
            raise PaamError("A criterion has nothing to learn: go directly to weighting(...).")
        self._all_gates.hold()
        try:
            with self._phase("analog", train_scorers=True):
                yield
        finally:
            self._all_gates.release()

    @contextmanager
    def weighting(self, **target: Any) -> Iterator[None]:
        """Weight phase: binary gates, frozen scorers. A target selects anew; without one the selection is kept.

        Filters with closed gates are restored at the end of the phase, so that momentum and weight decay do not
        change them and they are intact if a later selection keeps them.
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

    def compact(self, plan: Plan | None = None, *, check: bool = True) -> nn.Module:
        """The small network, an ordinary module with the same evaluation outputs; default: of the last selection.

        ``check``: compare it with the gated network, on other weights and another batch size; raise on a difference.
        """
        if plan is None:
            if self.selection is None:
                raise PaamError("Nothing is selected yet: run weighting(keep_macs=...) or select(...) first.")
            plan = self.selection.plan
        return self.network.compact(plan, check=check)

    @property
    def gate_mode(self) -> Mode:
        """The gates' mode, also outside of phases: "open", "analog" (scores) or "binary" (the selection)."""
        return self._all_gates.mode

    @gate_mode.setter
    def gate_mode(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise RecipeError(f"gate_mode must be one of {', '.join(get_args(Mode))} (got '{mode}').")
        self._all_gates.mode = mode

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, scorers and their optimiser, masks and selection, as copies: for torch.save or safetensors."""
        return pruner_state(self)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a :meth:`state_dict` into a Pruner that was made with the same arguments."""
        restore_pruner(self, state)

    def __getstate__(self) -> dict[str, Any]:
        """A copied or unpickled Pruner traces its model again: graphs cannot be pickled."""
        traced = self.network.traced
        return {
            "model": traced.model,
            "examples": traced.examples,
            "options": self._options,
            "state": self.state_dict(),
        }

    def __setstate__(self, kept: dict[str, Any]) -> None:
        with torch.random.fork_rng(devices=[]):  # scorers are initialized at random; their state is restored below
            self.__init__(kept["model"], kept["examples"], inplace=True, **kept["options"])  # type: ignore[misc]
        self.load_state_dict(kept["state"])

    def __repr__(self) -> str:
        name, groups = type(self.network.traced.model).__name__, self.network.groups
        how = f"criterion {self.criterion.name}" if self.criterion else f"scorer {self._options['scorer']}"
        filters = sum(group.width for group in groups)
        chosen = "nothing selected yet" if self.selection is None else str(self.selection)
        return f"Pruner({name}, {how}, {len(groups)} groups of {filters} filters; {chosen})"

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

    def zero_closed_filters(self) -> None:
        """Set the weights of filters with closed gates to zero; biases and norms are unchanged."""
        for name, parameter, index in self._closed(lambda group: group.layers):
            # For a weight norm only the gain: a zero direction would give NaN.
            if parameter.dim() > 2 and not name.endswith("original1"):
                parameter[index] = 0

    def _closed_filters(self) -> list[tuple[Tensor, tuple[Tensor, Tensor], Tensor]]:
        """Copies of all values of filters with closed gates: (parameter by filter, rows, values)."""
        closed = self._closed(lambda group: (*group.layers, *group.norms))
        return [(filters, index, filters[index].clone()) for _, filters, index in closed]

    def _closed(self, layers: Callable[[Group], Iterable[str]]) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor]]]:
        """Parameters of layers, by name, as [groups, filters per group, ...], and the indices of closed filters."""
        for group in self.network.groups:
            closed = (self.gates[group.name].mask == 0).nonzero().flatten()
            for layer in layers(group) if len(closed) else ():
                module = self.network.traced.model.get_submodule(layer)
                for name, parameter in module.named_parameters(recurse=is_parametrized(module)):
                    filters = by_filter(module, parameter.detach())
                    parts, rest = divmod(filters.shape[:2].numel(), group.width)
                    if rest:
                        continue  # a parameter of a user's layer that is not per filter
                    rows = torch.cat([closed + part * group.width for part in range(parts)])
                    yield name, filters, (rows // filters.shape[1], rows % filters.shape[1])
