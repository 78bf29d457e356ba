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

    scorer       what learns scores: "kq" (if neither is given), "vanilla", "free", or a function (filters, weights of
                 each) -> paam.Scorer; None for scores that a criterion gives when something is selected
    criterion    what gives scores instead, learning nothing: "l1", "l2", "fpgm", "hrank", "random", or a paam.Criterion
    activation   what turns a scorer's output into a score, by name or as a function of tensors
    penalty      lambda, the weight of the scores' l1 norm
    balance      weight of a layer in the penalty: "area" of its feature maps, "side", "none", or by what falls with a
                 filter: "macs", "params"
    placement    where a residual block's last gate stands: behind the "sum", or on the "branch" before it
    streams      layers that write into one residual stream choose "independent" sets, or are "tied" to one
    score_norm   batch norm in score phases: "eval" (statistics frozen) or "train"
    ignore       names of modules (or of graph nodes, as refusals name them) to leave alone: nothing in them is
                 removed, and they read whole values
    keep_class   leave alone every group without which the small network could not run its class's own code
    on_decision  what to do where the model decides by the values of tensors: "refuse"; "stop": what follows the first
                 such decision stays the model's own code, as in detectors; "fix": it stays as for the example
    score_lr     learning rate of the scorers' own Adam; None takes the scorer's default
    inplace      train the given model's own parameters instead of a copy's
    check        compare what was recorded of the model with the model itself, on other weights and sizes, and refuse a
                 difference
    options      of a scorer that is given by name; of KQ: dim_ratio (width of keys and queries over the number of
                 filters) and alpha (temperature)
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
            raise RecipeError(f"{type(model).__name__} has no layer that could be pruned.")

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
        """The scorers' own optimiser, for score phases; None for scorers that learn nothing."""

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
        """Current score of every filter, by group, shape [width], detached: those learned, or by a criterion.

        ``batches``: inputs of the model, for criteria that read feature maps, as the gates are now (see gate_mode); of
        a DataLoader's, labels are left aside. ``seed``: for criteria by chance.
        """
        chosen = self.criterion if criterion is None else find_criterion(criterion)
        if chosen is not None:
            closed = {name: gate.mask for name, gate in self.gates.items()} if self.gate_mode == "binary" else None
            return score_groups(self.network, chosen, batches, seed, closed)
        if any(gate.scorer is None for gate in self.gates.values()):
            raise PaamError("No scores are learned here: give a criterion, for example select('l1', keep_macs=0.5).")
        with torch.no_grad():
            return dict(zip(self.gates, self._all_gates.scores(), strict=True))

    def penalty(self) -> Tensor:
        """lambda * sum over groups of balance * l1 norm of the learned scores; differentiable."""
        if self.optimizer is None:
            raise PaamError("There is no penalty without learned scores: leave it out of the loss.")
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
        """Choose what stays: threshold=, keep_filters=, keep_macs= or keep_params=; round_to= (see paam.Target).

        By the scores that :meth:`scores` returns for the other arguments.
        """
        return self.use(select(self.network, self.scores(criterion, batches, seed), Target(**target)))

    def use(self, selection: Selection) -> Selection:
        """Make a selection the current one: binary gates follow it, and compact() applies it."""
        self._set_masks(self.network.choice(selection.plan))
        self.selection = selection
        return selection

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Score phase: analog gates; the network's parameters and batch-norm statistics do not move."""
        if self.optimizer is None:
            raise PaamError("A criterion learns nothing: go straight to weighting(...).")
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

    def compact(self, plan: Plan | None = None, *, check: bool = True) -> nn.Module:
        """The smaller network, an ordinary module in evaluation-equal function; by default of the last selection.

        ``check``: compare the two first, on other weights and another batch size; a difference is an error.
        """
        if plan is None:
            if self.selection is None:
                raise PaamError("Nothing is selected yet: run weighting(keep_macs=...) or select(...) first.")
            plan = self.selection.plan
        return self.network.compact(plan, check=check)

    @property
    def gate_mode(self) -> Mode:
        """How gates multiply outside of phases as well: "open", "analog" (by scores) or "binary" (by the selection)."""
        return self._all_gates.mode

    @gate_mode.setter
    def gate_mode(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise RecipeError(f"gate_mode is one of {', '.join(get_args(Mode))}, not '{mode}'.")
        self._all_gates.mode = mode

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, scorers and their optimiser, masks and selection, as copies: for torch.save or safetensors."""
        return pruner_state(self)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state_dict` returned, in a Pruner that was made with the same arguments."""
        restore_pruner(self, state)

    def __getstate__(self) -> dict[str, Any]:
        """A copied or unpickled Pruner records its model anew: graphs do not outlive their process."""
        traced = self.network.traced
        return {
            "model": traced.model,
            "examples": traced.examples,
            "options": self._options,
            "state": self.state_dict(),
        }

    def __setstate__(self, kept: dict[str, Any]) -> None:
        with torch.random.fork_rng(devices=[]):  # scorers begin at random, and what they were is put back
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
        """Set the weights of filters whose gate is closed to zero; biases and norms are left."""
        for name, parameter, place in self._closed(lambda group: group.layers):
            # Of a weight norm the gain alone: the direction of zeros is not a number.
            if parameter.dim() > 2 and not name.endswith("original1"):
                parameter[place] = 0

    def _closed_filters(self) -> list[tuple[Tensor, tuple[Tensor, Tensor], Tensor]]:
        """Copies of everything that belongs to a filter whose gate is closed: (parameter by filter, rows, values)."""
        closed = self._closed(lambda group: (*group.layers, *group.norms))
        return [(filters, place, filters[place].clone()) for _, filters, place in closed]

    def _closed(self, layers: Callable[[Group], Iterable[str]]) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor]]]:
        """Parameters of layers, by name, as [groups, filters per group, ...], and where the closed filters are."""
        for group in self.network.groups:
            closed = (self.gates[group.name].mask == 0).nonzero().flatten()
            for layer in layers(group) if len(closed) else ():
                module = self.network.traced.model.get_submodule(layer)
                for name, parameter in module.named_parameters(recurse=is_parametrized(module)):
                    filters = by_filter(module, parameter.detach())
                    parts, rest = divmod(filters.shape[:2].numel(), group.width)
                    if rest:
                        continue  # of a user's own layer: it belongs to no filter
                    rows = torch.cat([closed + part * group.width for part in range(parts)])
                    yield name, filters, (rows // filters.shape[1], rows % filters.shape[1])
