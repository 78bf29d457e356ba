"""Steps that read several values: sums, products, joins; and numbers that forward() reads from layers and shapes."""

from __future__ import annotations

from generator.drawing import MAP, VECTOR, Draw, Unsuitable, Value, word
from generator.program import STEPS


@word("map tokens vector last", 7)
def sum_of_two(d: Draw, v: Value) -> str:
    return d.form(v, "{x} + {u}", "{u} + {x}", "torch.add({x}, {u})", "{x}.add({u})", u=d.like(v))


@word("map tokens vector last", 0.4)
def sum_with_itself(d: Draw, v: Value) -> str:
    return d.form(v, "{x} + {x}", "sum([{x}, {x}])", "{x} * {x}", "{x} - F.relu({x})")


@word("map tokens vector last", 4)
def function_of_two(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x} - {u}", "{x} * {u}", "{x} * torch.sigmoid({u})", "{x} / (1 + {u}.abs())", "torch.maximum({x}, {u})"),
        *("torch.minimum({u}, {x})", "torch.where({x} > 0, {x}, {u} * 0)", "torch.mul({x}, {u})", "{x}.sub({u})"),
        *("torch.where({u} > 0.1, {x}, {u} * 0.5)", "torch.addcmul({x}, {u}, {u}, value=0.5)", "{x}.mul({u})"),
        *("{x}.add({u}, alpha=0.5)", "torch.sub({x}, {u}, alpha=2)", "torch.lerp({x}, {u}, 0.3)", "sum(({x}, {u}))"),
        *("{x} + 0.2 * ({u} - {x})", "torch.div({x}, {u}.abs() + 1)", "{x}.where({x} > {u}, {u})", "{x}.maximum({u})"),
        *("F.relu({x}) * {u} + {x}", "torch.addcdiv({x}, {u}, {u}.abs() + 1)", "torch.stack([{x}, {u}]).sum(0)"),
        u=d.like(v),
    )


@word(MAP, 4)
def joined(d: Draw, v: Value) -> str:
    """Concatenated along the channels with one or two other maps of the same size."""
    others = [u.name for u in d.values if u.kind == MAP and u.shape[2:] == v.shape[2:]]
    chosen = [v.name, *d.rng.choices(others, k=d.one_of(1, 1, 2))]
    d.rng.shuffle(chosen)
    return d.form(
        v,
        *("torch.cat([{all}], 1)", "torch.cat(({all}), dim=1)", "torch.cat(tensors=[{all}], dim=1)"),
        *("torch.concat([{all}], -{back})", "$nn.Identity()$(torch.cat([{all}], 1))"),
        all=", ".join(chosen),
        back=d.dims + 1,
    )


@word("map tokens last", 1)
def joined_elsewhere(d: Draw, v: Value) -> str:
    axis = d.rng.randint(2, len(v.shape) - 1) if v.kind == MAP else 1
    return d.form(v, "torch.cat([{x}, {u}], {axis})", "torch.concat(({x}, {x}), dim={axis})", u=d.like(v), axis=axis)


@word("map tokens", 1)
def stacked(d: Draw, v: Value) -> str:
    axis = d.one_of(1, 2, -1)
    stack = d.form(v, "torch.stack([{x}, {u}], {axis})", "torch.stack(({x}, {x}.tanh()), dim={axis})",
                   u=d.like(v), axis=axis)  # fmt: skip
    ends = [f"sum({axis})", f"mean(dim={axis})", f"amax({axis})", f"unbind({axis})[0]"]
    return f"{stack}.{d.one_of(*ends, *(['flatten(1, 2)'] if axis < 2 else []))}"


@word(MAP, 1)
def gated_by_vector(d: Draw, v: Value) -> str:
    """A vector [N, C] computed elsewhere, as a factor of the map."""
    u = d.another(v, VECTOR)
    spread = d.form(v, "[:, :{nones}]", ".view(-1, {c}{ones})", ".reshape({x}.shape[0], -1{ones})")
    made = f"$nn.Linear({u.width}, {v.width})$({u.name})"
    return d.form(v, f"{{x}} * torch.sigmoid({made}){spread}", f"{{x}} + {made}{spread}")


@word(MAP, 1.5)
def time_step(d: Draw, v: Value) -> str:
    """An embedding of the input with one number for each sample."""
    if not any(one.kind == STEPS for one in d.inputs):
        raise Unsuitable
    angles = d.name()
    d.line(f"{angles} = " + d.form(v, "t[:, None] * $b 3$", "t.unsqueeze(1) * $b 3$", "t.view(-1, 1) * $b 3$"))
    d.line(f"{angles} = torch.cat([{angles}.sin(), torch.cos({angles})], -1)")
    made = f"$nn.Linear(6, {v.width})$({angles})"
    return d.form(v, "{x} + {made}[:, :{nones}]", "{x} * {made}.view(-1, {c}{ones})", "{x} + {made}{one}", made=made,
                  one=".unsqueeze(-1)" * d.dims)  # fmt: skip


@word("map vector tokens", 0.8)
def read_off_the_layer(d: Draw, v: Value) -> str:
    """forward() reads a number of a layer."""
    width, y = d.width(v), d.name()
    if v.kind == MAP:
        layer, out, into = d.layer(f"nn.Conv{d.dims}d({v.width}, {width}, 1)"), "out_channels", "in_channels"
    else:
        layer, out, into = d.layer(f"nn.Linear({v.width}, {width})"), "out_features", "in_features"
    d.line(f"{y} = {layer}({v.name})")
    return d.form(
        v,
        *("{y} * {l}.{out} ** -0.5", "{y} + {x} if {l}.{into} == {l}.{out} else {y}", "{y} / {l}.{into}"),
        *("{y} * {l}.weight.shape[0] ** -0.5", "{y} * (2 if {l}.bias is not None else 1)"),
        **{"y": y, "l": layer, "out": out, "into": into},
    )


@word("map tokens vector last", 1)
def read_off_the_shape(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x} * {x}.shape[{axis}] ** -0.5", "{x} / {x}.size({axis})", "{x} * 2 if {x}.shape[{axis}] > 4 else {x}"),
        *("{x} * (1 / float({x}.shape[{axis}]))", "{x} / math.sqrt({x}.size({axis}))", "{x} * {x}.shape[-1] ** -0.5"),
        *("{x} / {x}[0].numel()", "{x} + len({x}.shape)", "{x} if {x}.dim() == 3 else {x} + 0.5"),
        axis=1 if v.kind in (MAP, VECTOR) else -1,
    )


@word("map tokens vector", 0.8)
def in_place(d: Draw, v: Value) -> str | None:
    """A value modified in place; values computed from it before may share its memory."""
    lines = [
        *("{x} += 1.0", "{x} *= 0.5", "F.relu_({x})", "{x}.add_(0.25)", "{x}.mul_(2)", "{x}.clamp_(min=-1)"),
        *("torch.relu_({x})", "{x}.sigmoid_()", "{x} -= {x}.mean(1, keepdim=True)", "F.relu({x}, inplace=True)"),
        *("{x}[:, :1] = 0.5", "{x}[:, 0] += 1", "{x}.copy_({x}.tanh())", "{x}[:, :2].mul_(3)", "{x} /= 2"),
    ]
    others = [u.name for u in d.values if u.shape == v.shape and u is not v]
    if others:
        lines += ["{x} += {u}", "{x}.mul_({u})", "{x}.add_({u})"]
    d.line(d.form(v, *lines, u=d.one_of(*others) if others else ""))
    return None


@word("map tokens vector", 0.6)
def alias(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x}", "$nn.Identity()$({x})", "{x}.contiguous()", "{x}.clone()", "{x}.detach()", "{x}[:]"),
        *("{x}.view({x}.shape)", "{x}.view_as({x})", "{x}.to({x})", "{x}.detach().clone()"),
    )
