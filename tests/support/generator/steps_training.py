"""Steps that differ only in training: parts without gradients, frozen norms, handwritten norms, checkpointing."""

from __future__ import annotations

from generator import habits
from generator.drawing import MAP, Draw, Value, word


@word("map tokens vector last", 0.6)
def without_gradients(d: Draw, v: Value) -> str:
    out, layer = d.name(), own_layer(d, v)
    d.line("with torch.no_grad():")
    d.line(f"    {out} = {layer}({v.name})")
    if d.chance(0.3):
        d.line(f"    {out} = F.relu({out})")
    return d.form(v, "{o}", "{x} + {o}", "{x} * torch.sigmoid({o})", "{l}({x}) - {o}", o=out, l=layer)


def own_layer(d: Draw, v: Value) -> str:
    return d.layer(layer_of(d, v))


def layer_of(d: Draw, v: Value) -> str:
    map_layer = f"nn.Conv{d.dims}d({v.width}, {v.width}, 3, padding=1)"
    return map_layer if v.kind == MAP else f"nn.Linear({v.width}, {v.width})"


@word("map tokens vector last", 0.7)
def detached(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x}.detach() * 2", "{x} + {x}.detach().tanh()", "{x} + (F.relu({x}) - {x}).detach()"),
        *("{x} * {x}.detach().sigmoid()", "{x} - {x}.mean(-1, keepdim=True).detach()", "{l}({x}.detach())"),
        *("{x} + {l}({x}).detach()", "{x} / (1 + {x}.detach().abs().amax(1, keepdim=True))", "torch.detach({x}) + {x}"),
        "F.{kind}({x}, {l}.weight.detach(), {l}.bias{pad})",
        l=own_layer(d, v),
        kind=f"conv{d.dims}d" if v.kind == MAP else "linear",
        pad=", padding=1" if v.kind == MAP else "",
    )


@word(MAP, 0.8)
def frozen_norm(d: Draw, v: Value) -> str:
    return d.call(habit(d, v, *habits.FROZEN), v)


@word(MAP, 0.05)
def norm_by_hand(d: Draw, v: Value) -> str:
    return d.call(habit(d, v, *habits.BY_HAND), v)


@word(MAP, 0.15)
def remembered(d: Draw, v: Value) -> str:
    return d.call(habit(d, v, *habits.REMEMBERING), v)


def habit(d: Draw, v: Value, *kinds: type) -> str:
    return d.layer(f"habits.{d.one_of(*kinds).__name__}({d.dims}, {v.width})")


@word("map tokens vector last", 0.7)
def checkpointed(d: Draw, v: Value) -> str:
    """Recomputed in the backward pass instead of stored."""
    layer = layer_of(d, v)
    if d.chance(0.3):
        layer = f"nn.Sequential({layer}, nn.ReLU(), nn.Dropout(0.2))"
    again = "checkpoint({l}, {x}, use_reentrant=False)"
    return d.form(
        v,
        *(again, again, "{x} + checkpoint({l}, {x}, use_reentrant=False)"),
        *(
            "checkpoint(lambda a: F.gelu({l}(a)), {x}, use_reentrant=False)",
            f"{again} if self.training else {{l}}({{x}})",
        ),
        "checkpoint(lambda a, b: {l}(a) * b, {x}, {x}.sigmoid(), use_reentrant=False)",
        l=d.layer(layer),
    )
