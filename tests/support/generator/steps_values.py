"""Steps by masks, order and frequencies, and products with transposed weights or weights of other layers."""

from __future__ import annotations

from torch import nn

from generator.drawing import MAP, TOKENS, Draw, Unsuitable, Value, word


@word(MAP, 0.5)
def masked_map(d: Draw, v: Value) -> str:
    """Minus infinity before a softmax or a maximum."""
    total = 1
    for size in v.places:
        total *= size
    return d.form(
        v,
        "{x}.flatten(2).masked_fill(torch.arange({total}) % 3 == 1, -math.inf).softmax(-1).view({x}.shape)",
        "{x}.masked_fill(torch.arange({c}).view(-1{ones}) % 2 == 1, float('-inf')).softmax(1)",
        "{x}.masked_fill({x} < {x}.mean(1, keepdim=True), float('-inf')).softmax(dim=1)",
        "{x}.masked_fill($b {places}$ < 0.5, -torch.inf).amax(1, keepdim=True).clamp(min=-3) + {x}",
        "torch.where({x} >= {x}.amax(-1, keepdim=True), {x}, -math.inf).softmax(-1)",
        "{x}.masked_fill({x} < 0, 0.0)",
        "{x}.masked_fill({x} > 0.5, 0.5)",
        "{x} * {x}.masked_fill($b {c}{ones}$ > 0.4, -math.inf).sigmoid()",
        total=total,
    )


@word(TOKENS, 0.8)
def masked_tokens(d: Draw, v: Value) -> str:
    length = v.shape[1]
    scores = d.form(v, "({x} @ {x}.mT)", "({x} @ {x}.transpose(1, 2) * {c} ** -0.5)", "torch.bmm({q}({x}), {x}.mT)",
                    q=f"$nn.Linear({v.width}, {v.width})$")  # fmt: skip
    return d.form(
        v,
        "{s}.masked_fill(torch.ones({l}, {l}).triu(1).bool(), float('-inf')).softmax(-1) @ {x}",
        "({s} + torch.full(({l}, {l}), -math.inf).triu(1)).softmax(-1) @ {x}",
        "F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)",
        "F.scaled_dot_product_attention({x}, {x}, {x}, attn_mask=torch.ones({l}, {l}).tril().bool())",
        "{s}.masked_fill(torch.arange({x}.shape[1]) > torch.arange({x}.shape[1])[:, None], -1e9).softmax(-1) @ {x}",
        s=scores,
        l=length,
    )


@word("map tokens last", 1)
def gated_by_where(d: Draw, v: Value) -> str:
    gate = f"$nn.Conv{d.dims}d({v.width}, {v.width}, 1)$" if v.kind == MAP else f"$nn.Linear({v.width}, {v.width})$"
    forms = [
        *("torch.where({x} > 0, {x}, 0.1)", "torch.where({x} > 0.2, {x}, torch.zeros_like({x}))"),
        *("{x} * torch.where({x} > 0, 1.0, 0.2)", f"torch.where({gate}({{x}}) > 0.1, {{x}}, 0.0)"),
        *(f"torch.where({gate}({{x}}).sigmoid() > 0.45, {{x}}, {{x}} * 0.1)", "{x} * ({x} > 0.1).double()"),
        "torch.where({x}.mean(-1, keepdim=True) > 0.01, {x}, {x} * 0.3)",
    ]
    if v.kind == MAP:
        forms += ["torch.where($b {c}{ones}$ > 0.4, {x}, 0.5)", "torch.where(${c}{ones}$ > 1, {x}, {x}.tanh())"]
    return d.form(v, *forms)


@word(MAP, 0.8)
def ordered_map(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x}.sort({i}).values", "{x}.sort(-1, descending=True)[0]", "torch.sort({x}, {i})[0]"),
        *("{x}.topk(2, {i}).values", "torch.topk({x}, 2, dim={i})[0]", "{x}.flatten(2).sort(-1)[0].view({x}.shape)"),
        *("{x}.kthvalue(2, {i}, keepdim=True).values", "{x}.median(-1, keepdim=True).values + {x}"),
        *("{x}.gather({i}, {x}.argsort({i}))", "{x}.cummax({i}).values", "{x} * ({x} >= {x}.topk(2, -1)[0][..., -1:])"),
        *(
            "{x}.flatten(2).topk(3)[0].mean(-1)[:{nones}] + {x}",
            "{x}.msort()",
            "torch.aminmax({x}, dim={i}, keepdim=True).max",
        ),
        i=d.rng.randint(2, d.dims + 1),
    )


@word(TOKENS, 0.6)
def ordered_tokens(d: Draw, v: Value) -> str:
    return d.form(
        v,
        "{x}.gather(1, {x}.mean(-1, keepdim=True).topk(2, 1).indices.expand(-1, -1, {c}))",
        *("{x}.topk(2, 1).values", "{x}.sort(1)[0]", "{x}.sort(-1).values", "{x}.topk(2, -1)[0]"),
    )


@word("map tokens last", 0.6)
def running_sums(d: Draw, v: Value) -> str:
    """Cumulative operations along the channels."""
    i = 1 if v.kind == MAP else -1
    return d.form(
        v,
        *("{x}.cumsum({i})", "{x}.cumsum({i}).flip({i})", "{x}.tanh().cumprod({i})", "torch.cummax({x}, {i}).values"),
        *("{x}.logcumsumexp({i})", "{x}.diff(dim={i})", "{x}.cummin({i})[0]", "torch.cumsum({x}.flip({i}), {i})"),
        i=i,
    )


@word("map tokens", 0.6)
def frequencies(d: Draw, v: Value) -> str:
    if v.kind == TOKENS:
        return d.form(v, "torch.fft.fft(torch.fft.fft({x}, dim=-1), dim=-2).real", "torch.fft.fft2({x}).real",
                      "torch.fft.irfft(torch.fft.rfft({x}, dim=1), n={x}.shape[1], dim=1)")  # fmt: skip
    if d.dims != 2:
        return d.form(v, "torch.fft.rfft({x}).abs()", "torch.fft.irfft(torch.fft.rfft({x}), n={x}.shape[-1])")
    h, w = v.places
    names = {"h": h, "w": w // 2 + 1, "there": f"torch.fft.rfft2({v.name})"}
    return d.form(
        v,
        *("torch.fft.irfft2({there}, s={x}.shape[-2:])", "torch.fft.rfft2({x}, norm='ortho').abs()"),
        *("torch.fft.irfft2({there} * ${c}, {h}, {w}$, s={x}.shape[-2:])", "torch.fft.fft2({x}).real", "{there}.imag"),
        "torch.fft.irfft2({there} * torch.view_as_complex(${c}, {h}, {w}, 2$), s={x}.shape[2:])",
        "torch.fft.irfft2({there} * ${h}, {w}$, s=({x}.shape[2], {x}.shape[3]), norm='backward')",
        "torch.cat([{there}.real, {there}.imag], 1)",
        "torch.fft.irfft2(torch.complex($nn.Conv2d({c}, {c}, 1)$({there}.real), {there}.imag), s={x}.shape[2:])",
        **names,
    )


@word("tokens last vector", 0.8)
def turned_weight(d: Draw, v: Value) -> str:
    """A product with a transposed weight."""
    width = d.width(v)
    return d.form(
        v,
        *(
            "{x} @ ${w}, {c}$.T",
            "{x} @ ${w}, {c}$.mT",
            "{x} @ ${w}, {c}$.t() + ${w}$",
            "torch.matmul({x}, ${w}, {c}$.mT)",
        ),
        *("{x} @ {l}.weight.T", "F.linear({l}({x}), {l}.weight.T)", "{l}({x}) @ {l}.weight", "{x} @ $b {w}, {c}$.T"),
        *("F.linear({x}, ${c}, {w}$.T)", "{x} @ {l}.weight.mT + {l}.bias", "{x} @ torch.t(${w}, {c}$)"),
        w=width,
        l=d.layer(f"nn.Linear({v.width}, {width})"),
    )


@word(MAP, 0.7)
def tied_weight(d: Draw, v: Value) -> str:
    """The weight of a layer that was called before, used for another value or for the transposed operation."""
    if d.chance(0.3):
        layer = d.layer(f"nn.Conv{d.dims}d({v.width}, {d.width(v)}, 3, padding=1)")
        return d.form(v, "F.conv_transpose{n}d(F.relu({l}({x})), {l}.weight, padding=1)",
                      "F.conv{n}d({l}({x}), {l}.weight.transpose(0, 1), padding=1)", l=layer)  # fmt: skip
    layers = {name: d.network.get_submodule(name.removeprefix("self.")) for name, _ in d.called}
    known = [name for name, layer in layers.items() if isinstance(layer, nn.modules.conv._ConvNd)]
    fitting = [name for name in known if layers[name].weight.shape[1] == v.width and layers[name].groups == 1]
    if not fitting:
        raise Unsuitable
    return d.form(
        v,
        *(
            "F.conv{n}d({x}, {l}.weight, padding=1)",
            "F.conv{n}d({x}, {l}.weight)",
            "F.conv{n}d({x}, {l}.weight, {l}.bias)",
        ),
        *("F.conv{n}d({x}, {l}.weight * 0.5, padding=1)", "F.relu(F.conv{n}d({x}, {l}.weight.flip(-1), None, 1, 1))"),
        l=d.one_of(*fitting),
    )
