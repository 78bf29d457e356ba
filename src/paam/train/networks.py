"""The networks of a run: gated, small, dense control and teacher; and their trainable parameters."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx, nn

from paam.errors import RecipeError
from paam.graph.rewired import as_graph_model
from paam.graph.trace import trace
from paam.pruning.pruner import Pruner
from paam.train.flat import FlatParameters, RoundedWeights
from paam.train.packing import Packed, pack, unpack
from paam.train.phase import Phase


class Networks:
    """``masked``: fine-tune the small network inside the gated one. ``bfloat16``: networks read rounded weights.
    ``fused``: use fused kernels in steps and evaluations.
    """

    def __init__(self, pruner: Pruner, *, masked: bool = False, bfloat16: bool = False, fused: bool = False) -> None:
        self.pruner = pruner
        self.masked, self.bfloat16, self.with_kernels = masked, bfloat16, fused
        self.on_gpu = next(pruner.model.parameters()).is_cuda
        self.small: nn.Module | None = None
        self.control: nn.Module | None = None
        self._dense = pack({})
        self.teacher_state: dict[str, Tensor] | None = None
        self._flats: dict[str, FlatParameters] = {}
        self._rounded: dict[str, RoundedWeights | None] = {}
        self._fast: dict[nn.Module, nn.Module] = {}
        # Eagerly: parameters must have their final memory before a step or an evaluation is captured.
        for kind in ("gated", "scorers") if pruner.scorer_parameters() else ("gated",):
            self._flat(kind)

    def kind(self, phase: Phase) -> str:
        """Which network a phase trains or scores; the small one may still be part of the gated one."""
        return "gated" if phase.network == "small" and self.masked else phase.network

    def of(self, phase: Phase) -> nn.Module:
        """The network that a phase trains or scores."""
        model = {"gated": self.pruner.model, "small": self.small, "control": self.control}[self.kind(phase)]
        assert model is not None
        return model

    def make(self, phase: Phase) -> None:
        """Create the network for a phase that starts, if needed."""
        if phase.network == "small" and not self.masked:
            self.cut_out()
        elif phase.network == "control" and self.control is None:
            self.control = self.dense()

    def cut_out(self) -> None:
        """Build the small network, unless it exists."""
        if self.small is None:
            self.small = self.pruner.compact()

    def is_fused(self, phase: Phase) -> bool:
        """Whether a phase's network uses fused kernels."""
        return self.fast(phase) is not self.of(phase)

    def fast(self, phase: Phase) -> nn.Module:
        """The same network as used in training: with fused kernels where supported."""
        model = self.of(phase)
        if model not in self._fast:
            self._fast[model] = self._fused(model)
        return self._fast[model]

    def _fused(self, model: nn.Module) -> nn.Module:
        if not self.with_kernels:
            return model
        from paam.train.cuda.fused import fused  # Triton exists only on GPU machines

        traced = self.pruner.network.traced
        as_it_is = isinstance(model, fx.GraphModule)
        network = model if as_it_is else as_graph_model(trace(model, traced.examples, traced.ignore))
        assert isinstance(network, fx.GraphModule)
        faster = fused(network)
        faster.training = model.training
        return model if faster is network else faster

    def trained(self, phase: Phase) -> FlatParameters:
        """The parameters that a phase trains. Call outside of the phase, which freezes others."""
        return self._flat("scorers" if phase.trains == "scorers" else self.kind(phase))

    def rounded(self, phase: Phase) -> RoundedWeights | None:
        """The bfloat16 weights that a phase's network reads; None if it uses its own precision."""
        if not self.bfloat16:
            return None
        kind = self.kind(phase)
        if kind not in self._rounded:
            flat = self._flat(kind)
            fits = [block.dtype for block in flat.blocks] == [torch.float32]
            self._rounded[kind] = RoundedWeights(flat, self.of(phase)) if fits else None
        return self._rounded[kind]

    def remember_dense(self) -> None:
        self._dense = pack(self.pruner.network.traced.model.state_dict())

    @property
    def dense_state(self) -> dict[str, Tensor]:
        """Weights of the dense network after warm-up."""
        return unpack(self._dense)

    def dense(self) -> nn.Module:
        """A copy of the dense network after warm-up."""
        model = copy.deepcopy(self.pruner.network.traced.model)
        model.load_state_dict(self.dense_state)
        return model

    def teacher(self, *, fused: bool) -> nn.Module:
        """The frozen teacher: ``teacher_state``, or the dense network after warm-up. ``fused``: like its student."""
        teacher = self.dense()
        if self.teacher_state is not None:
            teacher.load_state_dict(self.teacher_state)
        teacher.eval().requires_grad_(False)
        faster = self._fused(teacher) if fused else teacher
        if self.bfloat16:
            for parameter in teacher.parameters():
                if parameter.dim() > 1:  # as in RoundedWeights, but once
                    parameter.data = parameter.data.bfloat16()
        return faster

    def state(self, *, scored: bool) -> dict[str, Packed]:
        """Weights that are still needed, as "network/part". ``scored``: scores are still to be learned."""
        parts = {"dense": self._dense}
        if self.teacher_state is not None:
            parts["teacher"] = pack(self.teacher_state)
        if self.small is None:
            parts |= self._state_of("gated", self.pruner.model, ("gated", "scorers"))
            if not scored:
                parts.pop("gated/scorers", None)
        else:
            parts |= self._state_of("small", self.small, ("small",))
        if self.control is not None:
            parts |= self._state_of("control", self.control, ("control",))
        return parts

    def _state_of(self, network: str, model: nn.Module, kinds: tuple[str, ...]) -> dict[str, Packed]:
        """Trained parameters as their flat blocks; copies of the rest."""
        flats = {kind: self._flats[kind] for kind in kinds if kind in self._flats}
        trained = {name for flat in flats.values() for name in flat.layout}
        rest = {name: value for name, value in model.state_dict().items() if name not in trained}
        parts = {f"{network}/rest": pack(rest)}
        for kind, flat in flats.items():
            parts[f"{network}/{kind}"] = Packed([block.detach() for block in flat.blocks], flat.layout)
        return parts

    def restore(self, parts: dict[str, dict[str, Tensor]], *, scored: bool) -> None:
        """Load an unpacked :meth:`state`."""
        whole: dict[str, dict[str, Tensor]] = {}
        for part, tensors in parts.items():
            whole.setdefault(part.partition("/")[0], {}).update(tensors)
        device = next(self.pruner.model.parameters()).device
        self._dense = pack({name: value.to(device) for name, value in whole["dense"].items()})
        self.teacher_state = whole.get("teacher")
        if "small" in whole:
            self.small = self.pruner.compact()
            self.small.load_state_dict(whole["small"])
        else:
            over = self._flats["scorers"].layout if not scored and "scorers" in self._flats else ()
            as_they_are = {name: value for name, value in self.pruner.model.state_dict().items() if name in over}
            self.pruner.model.load_state_dict(as_they_are | whole["gated"])
        if "control" in whole:
            self.control = self.dense()
            self.control.load_state_dict(whole["control"])

    def _flat(self, kind: str) -> FlatParameters:
        if kind not in self._flats:
            network = {"small": self.small, "control": self.control}.get(kind, self.pruner.model)
            assert network is not None
            names = {parameter: name for name, parameter in network.named_parameters()}
            of_gated = {"gated": self.pruner.network_parameters, "scorers": self.pruner.scorer_parameters}
            parameters = of_gated[kind]() if kind in of_gated else list(names)
            trained = {names[parameter]: parameter for parameter in parameters if parameter.requires_grad}
            if not trained:
                raise RecipeError("The network has no parameter with requires_grad: nothing can be trained.")
            self._flats[kind] = FlatParameters(trained)
        return self._flats[kind]
