"""Steps that broadcast: parameters against values, and values against what was computed from them; custom products."""

from __future__ import annotations

from generator.drawing import LAST, MAP, TOKENS, Draw, Unsuitable, Value, word


@word(MAP, 3)
def scaled_by_channel(d: Draw, v: Value) -> str:
    """A number for each channel, in one of the many ways to bring it to the right shape."""
    s = d.form(
        v,
        *("${c}{ones}$", "$1, {c}{ones}$", "$b {c}{ones}$", "$b 1, {c}{ones}$", "${c}{ones}$.exp()"),
        *("${c}$[:{nones}]", "$b {c}$[None, :{nones}]", "${c}$.view({c}{ones})", "$b {c}$.view(1, -1{ones})"),
        *(
            "${c}${unsqueezed}",
            "$1, {c}$[:, :{nones}]",
            "${c}$.reshape(1, {c}{ones})",
            "$3, {c}$.sum(0).view(-1{ones})",
        ),
        *("$2, {c}$[1][:{nones}]", "${c}, 2$.mean(1)[:{nones}]", "F.softmax(${c}$, 0).view(-1{ones})"),
        *("torch.sigmoid($1, {c}{ones}$)", "$b {c}{ones}$ ** 2", "$1, {c}{ones}$.expand_as({x})"),
        *(
            "F.softplus(${c}${unsqueezed})",
            "($b {c}$ * ${c}$).view(-1{ones})",
            "$1, {c}{ones}$.repeat({x}.shape[0], 1{ones})",
        ),
        *("torch.arange({c}).to({x}).view(-1{ones})", "torch.ones_like({x}[:, :, :1]) * ${c}{ones}$"),
        unsqueezed=".unsqueeze(-1)" * d.dims,
    )
    return d.form(v, "{x} * {s}", "{s} * {x}", "{x} + {s}", "{x} - {s}", "{x} * {s} + {x}", s=s)


@word("map tokens last", 2)
def scaled_by_place(d: Draw, v: Value) -> str:
    """A parameter or buffer that broadcasts along any axes."""
    rest = v.shape[1:]
    first = d.rng.randint(0, len(rest) - 1)
    shape = [size if d.chance(0.5) else 1 for size in rest[first:]]
    shape = [1] * d.one_of(0, len(rest) - len(shape)) + shape
    return d.form(v, "{x} * {s}", "{x} + {s}", "{s} - {x}", "torch.maximum({x}, {s})", s=d.stored(*shape))


@word("tokens vector last", 2)
def scaled_last(d: Draw, v: Value) -> str:
    s = d.form(v, "${c}$", "$1, {c}$", "$2, {c}$.sum(0)", "$b {c}$", "torch.sigmoid(${c}$)")
    return d.form(v, "{x} * {s}", "{x} + {s}", "{s} * {x} + {x}", s=s)


@word("map tokens vector last", 1.5)
def weighed_sum(d: Draw, v: Value) -> str:
    """Values added with learned weights."""
    u, w, p = d.like(v), d.name("w"), d.parameter(2)
    d.line(
        f"{w} = "
        + d.form(v, "{p}", "F.softmax({p}, 0)", "F.relu({p}) / (F.relu({p}).sum(0) + 0.1)", "{p}.sigmoid()", p=p)
    )
    return d.form(v, "{w}[0] * {x} + {w}[1] * {u}", "{x} * {w}[0] + {u} * (1 - {w}[1])", u=u, w=w)


@word("map tokens vector last", 0.8)
def scaled_by_one_number(d: Draw, v: Value) -> str:
    s = d.form(v, "$1$", "$nn.Parameter(torch.ones(()))$", "$b 1$")
    return d.form(v, "{x} * {s}", "{x} + {s}", "{x} * {s}.exp()", "{s} * {x}.tanh()", s=s)


@word(MAP, 2)
def broadcast_of_itself(d: Draw, v: Value) -> str:
    """Reduced along some axes, and broadcast against the original value."""
    axes = d.one_of(d.axes, d.axes, (1,), (2,), (d.dims + 1,), (1, 2), (-1,), d.axes[-1:], (1, *d.axes))
    small = d.form(
        v,
        *("{x}.mean({r}, keepdim=True)", "{x}.amax({r}, True)", "torch.sum({x}, dim={r}, keepdim=True) * 0.1"),
        *("torch.mean({x}, {r}, True)", "{x}.amin(dim={r}, keepdim=True)", "{x}.norm(dim={r}, keepdim=True)"),
        *("({x}.var({r}, keepdim=True) + 0.1).sqrt()", "torch.var({x}, {r}, keepdim=True)"),
        r=axes[0] if len(axes) == 1 else axes,
    )
    return d.form(
        v,
        *("{x} + {s}", "{x} * torch.sigmoid({s})", "{x} - {s}", "{x} / (1 + {s}.abs())", "{x} * {s}"),
        *("torch.maximum({x}, {s})", "{s}.expand_as({x}) + {x}", "({x} - {s}).square()", "{s}.expand({x}.shape) * {x}"),
        s=small,
    )


@word(MAP, 0.6)
def squares_crossed(d: Draw, v: Value) -> str:
    """The mean over channels, broadcast on other axes: a size of the map equals the number of channels."""
    if v.width not in v.places:
        raise Unsuitable
    return d.form(
        v,
        *("{x} * {x}.mean(1, True).transpose(1, {i})", "{x} + {x}.transpose(1, {i})"),
        "{x} * {x}.mean({i}, keepdim=True).transpose({i}, 1)",
        i=2 + v.places.index(v.width),
    )


@word(TOKENS, 1.5)
def token_broadcast(d: Draw, v: Value) -> str:
    length, width = v.shape[1:]
    forms = [
        *("{x} * {x}.mean(1, True)", "{x} + {x}[:, :1]", "{x} * {x}.mean(2, keepdim=True)", "{x} + $1, {l}, {c}$"),
        *("{x} - {x}.amax(dim=-1, keepdim=True)", "{x} + ${l}, 1$", "{x} + ${l}, {c}$[None]", "{x} + $b 1, {l}, {c}$"),
    ]
    if length == width:
        forms += ["{x} * {x}.mean(1, True).transpose(1, 2)"] * 3
    return d.form(v, *forms, l=length)


@word("map last", 0.7)
def own_product(d: Draw, v: Value) -> str:
    """A convolution or product with a custom weight."""
    forms = [
        *("F.conv{n}d({x}, ${w}, {c}{ones}$, ${w}$)", "F.conv{n}d({x}, ${c}, 1{threes}$, padding=1, groups={c})"),
        *(
            "F.conv{n}d({x}, $b {c}, 1{threes}$, None, 1, 1, 1, {x}.shape[1])",
            "F.conv{n}d({x}, F.softmax(${w}, {c}{ones}$, 1))",
        ),
        *("torch.einsum('nc...,dc->nd...', {x}, ${w}, {c}$)", "F.conv{n}d({x}, ${w}, {c}{ones}$.tanh())"),
    ]
    if v.kind == LAST:
        forms = ["F.linear({x}, ${w}, {c}$)", "{x} @ ${c}, {w}$", "torch.einsum('...c,cd->...d', {x}, ${c}, {w}$)"]
    return d.form(v, *forms, w=d.width(v), threes=", 3" * d.dims)


@word("vector tokens", 0.7)
def own_linear_product(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("F.linear({x}, ${w}, {c}$, ${w}$)", "{x} @ ${c}, {w}$", "torch.matmul({x}, ${w}, {c}$.t())"),
        "torch.einsum('...c,cd->...d', {x}, ${c}, {w}$)",
        w=d.width(v),
    )


@word(MAP, 0.4)
def weight_read_again(d: Draw, v: Value) -> str:
    """A tensor of a layer that forward() reads in addition to calling the layer."""
    if d.chance(0.4):
        norm = d.layer(f"nn.BatchNorm{d.dims}d({v.width})")
        return d.form(v, "{l}({x}) * {l}.weight.view(1, -1{ones})", "{l}({x}) + {l}.running_mean.abs().mean()", l=norm)
    return d.form(
        v,
        *("{l}({x}) + F.conv{n}d({x}, {l}.weight)", "{l}({x}) + {l}.bias.view(1, -1{ones})"),
        "{l}({x}) / (1 + {l}.weight.norm())",
        l=d.layer(f"nn.Conv{d.dims}d({v.width}, {v.width}, 1)"),
    )
