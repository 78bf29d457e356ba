"""Export pruned networks: ONNX, torch.export archives, one safetensors file."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paam.artifacts.saved import write_network
from paam.errors import ArtifactError, RecipeError, one_line
from paam.files.durable import write_atomically
from paam.graph.channel_map import ChannelMap
from paam.graph.modes import evaluating

EXPORTS = {"onnx": "model.onnx", "pt2": "model.pt2", "safetensors": "pruned.safetensors"}
"""Format -> default file name in a run's directory."""


def export(model: nn.Module, example: Tensor | tuple[Tensor, ...], path: str | Path, format: str | None = None) -> None:
    """Export a network to one file, in evaluation mode, with a dynamic batch size.

    ``format``: default: from the path's suffix.

    onnx         for ONNX Runtime and others; needs the packages onnx and onnxscript
    pt2          torch.export's archive: torch.export.load(path).module() needs neither paam nor the model's code
    safetensors  weights and plan in one file, for paam.load(path, model)
    """
    path = Path(path)
    if format is None:
        format = path.suffix.removeprefix(".")
        if format not in EXPORTS:
            raise RecipeError(f"{path} has no known suffix; end it in one of {', '.join(EXPORTS)}, or give the format.")
    check_format(format)
    if format == "safetensors":
        write_network(model, path)
    else:
        program = _exported(model, example)
        write_atomically(path, _pt2(program) if format == "pt2" else _onnx(program))


def check_format(format: str) -> None:
    """Refuse an unknown format, or one whose packages are missing, before any work is done."""
    if format not in EXPORTS:
        raise RecipeError(f"There is no export format '{format}'. Known: {', '.join(EXPORTS)}.")
    if format == "onnx" and any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise ArtifactError(
            "ONNX export needs the packages onnx and onnxscript: pip install onnx onnxscript"
            f" torch=={torch.__version__.partition('+')[0]}."
        )


def _exported(model: nn.Module, example: Tensor | tuple[Tensor, ...]) -> Any:
    model = _without_training_parts(model)
    batch = torch.export.Dim("batch", min=1)
    examples = (example,) if isinstance(example, Tensor) else example
    # torch.export would specialize a batch size of one.
    examples = tuple(x if len(x) > 1 else x.expand(2, *x.shape[1:]).contiguous() for x in examples)
    with evaluating(model), torch.no_grad():
        try:
            program = torch.export.export(model, examples, dynamic_shapes=tuple({0: batch} for _ in examples))
        except Exception as error:  # any error of torch.export
            raise ArtifactError(f"torch.export does not support {type(model).__name__}: {one_line(error)}.") from error

    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target in DROPOUTS:  # no-ops in evaluation mode
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    program.graph_module.recompile()
    return program


DROPOUTS = (
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
)


def _without_training_parts(model: nn.Module) -> nn.Module:
    """A copy for evaluation only: without batch counters and gradients."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ChannelMap):
            module.forget_gradients()
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.num_batches_tracked = None
    return model


def _pt2(program: Any) -> bytes:
    program.example_inputs = None  # the only pickle in the archive
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _onnx(program: Any) -> bytes:
    with warnings.catch_warnings(), _silenced("torch.onnx"):
        warnings.simplefilter("ignore")  # about the exporter's internals
        inputs = len(program.graph_signature.user_inputs)
        names = ["input"] if inputs == 1 else [f"input{number}" for number in range(inputs)]
        try:
            onnx_program = torch.onnx.export(program, dynamo=True, verbose=False, input_names=names)
        except Exception as error:  # an operation unsupported by ONNX
            raise ArtifactError(f"The network cannot be exported to ONNX: {one_line(error)[:300]}.") from error
    assert onnx_program is not None
    proto = onnx_program.model_proto
    for value in (*proto.graph.input, *proto.graph.output):
        sizes = value.type.tensor_type.shape.dim
        if sizes and sizes[0].dim_param:
            sizes[0].dim_param = "batch"
    content: bytes = proto.SerializeToString()
    return content


@contextlib.contextmanager
def _silenced(logger: str) -> Iterator[None]:
    level = logging.getLogger(logger).level
    logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger(logger).setLevel(level)
