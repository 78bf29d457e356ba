"""Steps with control flow by sizes, or sizes that become numbers without arithmetic; and splits into equal parts."""

from __future__ import annotations

from generator.drawing import MAP, Draw, Unsuitable, Value, word


@word("map tokens last", 0.8)
def decided_by_a_size(d: Draw, v: Value) -> str:
    """The network branches on a size of the map, or on the number of channels."""
    axis = d.rng.randint(1, len(v.shape) - 1)
    return decided(d, v, axis, d.rng.randint(1, v.shape[axis] + 1))


@word("map tokens last vector", 0.25, by_size=True)
def decided_by_the_batch(d: Draw, v: Value) -> str:
    return decided(d, v, 0, d.one_of(1, 2))


def decided(d: Draw, v: Value, axis: int, bound: int) -> str:
    size = d.form(v, "{x}.shape[{axis}]", "{x}.size({axis})", "{x}.shape[{back}]", axis=axis, back=axis - len(v.shape))
    asked = d.form(v, "{s} > {k}", "{s} >= {k}", "{s} % 2", "{s} == {k}", "max({s}, 3) > {k}", "{s} // 2 != {k}",
                   s=size, k=bound)  # fmt: skip
    if d.chance(0.5):
        return d.form(v, "{x} * 2 if {asked} else {x}", "F.relu({x}) if {asked} else {x}.tanh()",
                      "{x} + ({asked}) * 0.5", asked=asked)  # fmt: skip
    out = d.name()
    d.line(f"{out} = {v.name}")
    d.line(f"if {asked}:")
    d.line(f"    {out} = {changed(d, v)}")
    if d.chance(0.3):
        d.line("else:")
        d.line(f"    {out} = {changed(d, v)}")
    return out


def changed(d: Draw, v: Value) -> str:
    if v.kind != MAP:
        return d.form(v, "$nn.Linear({c}, {c})$({x})", "F.gelu({x})", "{x} - {x}.mean(-1, keepdim=True)")
    forms = ["$nn.Conv{n}d({c}, {c}, 3, padding=1)$({x})", "F.avg_pool{n}d({x}, 2)", "{x}.sigmoid()"]
    return d.form(v, *forms, "F.adaptive_avg_pool{n}d({x}, 2)", "F.interpolate({x}, scale_factor=2)")


@word("map tokens last vector", 0.8)
def number_of_a_size(d: Draw, v: Value) -> str:
    return numbered(d, v, d.rng.randint(1, len(v.shape) - 1))


@word("map tokens last vector", 0.2, by_size=True)
def number_of_the_batch(d: Draw, v: Value) -> str:
    return numbered(d, v, 0)


def numbered(d: Draw, v: Value, axis: int) -> str:
    s = f"{v.name}.shape[{axis}]"
    number = d.form(
        v,
        *(
            "(1 + math.log2({s}))",
            "math.sqrt({s})",
            "math.isqrt({s})",
            "math.log({s} + 1)",
            "math.ceil(math.log2({s}))",
        ),
        *("{{1: 0.5, 2: 0.7, 3: 0.9, 4: 1.3}}.get({s}, 1.1)", "(0.2, 0.5, 0.7, 0.3, 0.9, 0.4)[min({s}, 5)]"),
        *("float(f'{{{s}}}')", "int('%d' % {s})", "len(f'{{{s}:b}}')", "int(str({s})[-1])", "math.exp(-{s})"),
        *("math.gcd({s}, 6)", "sum(range({s}))", "max({s}, 5)", "int(math.log2({s}))", "math.sqrt({x}[0].numel())"),
        *("torch.tensor(float({s}))", "torch.full((), {s}).double().log1p()"),
        *("math.prod({x}.shape[1:])", "round({s} / 3)", "({s}).bit_length()", "torch.Size([{s}]).numel()"),
        s=s,
    )
    return d.form(v, "{x} * {number}", "{x} / (1 + {number})", "{x} + 0.1 * {number}", number=number)


@word("map tokens last", 0.8)
def cut_and_joined(d: Draw, v: Value) -> str:
    """Split along the map into parts of one size, whose number depends on the size of the map."""
    axis = d.rng.randint(2, len(v.shape) - 1) if v.kind == MAP else d.rng.randint(1, len(v.shape) - 2)
    return parted(d, v, axis, d.rng.randint(1, 4))


@word("map tokens last vector", 0.3, by_size=True)
def cut_along_the_batch(d: Draw, v: Value) -> str:
    """Samples processed one by one, or a few at a time."""
    if d.chance(0.3):
        each = d.form(v, "[p.tanh() for p in {x}]", "[p * 2 for p in {x}.unbind(0)]", "[p for p in {x}]")
        return f"torch.stack({each})"
    return parted(d, v, 0, d.one_of(1, 2, 2))


def parted(d: Draw, v: Value, axis: int, size: int) -> str:
    cut = d.form(v, "{x}.split({k}, {i})", "{x}.split({k}, dim={i})", "torch.split({x}, {k}, {i})", "{x}.chunk(2, {i})",
                 *(["{x}.split({k})"] * 2 if axis == 0 else []), k=size, i=axis)  # fmt: skip
    layer = f"$nn.Conv{{n}}d({v.width}, {v.width}, 1)$" if v.kind == MAP else f"$nn.Linear({v.width}, {v.width})$"
    return d.form(
        v,
        *("torch.cat([F.relu(p) for p in {cut}], {i})", "torch.cat([p * (k + 1) for k, p in enumerate({cut})], {i})"),
        *(
            "torch.cat({cut}[::-1], dim={i})",
            "torch.cat({cut}, {i})",
            f"torch.cat([{layer}(p) for p in {{cut}}], {{i}})",
        ),
        *("torch.cat([p - p.mean() for p in {cut}], {i})", "torch.cat(list(map(torch.sigmoid, {cut})), {i})"),
        cut=cut,
        i=axis,
    )


@word(MAP, 0.4, dims=(2,))
def tiles(d: Draw, v: Value) -> str:
    """Loops over rows or positions."""
    if v.places[0] > 8:
        raise Unsuitable
    return d.form(
        v,
        "torch.stack([{x}[:, :, i] * (i + 1) for i in range({x}.shape[2])], 2)",
        "torch.cat([{x}[..., i : i + 2].amax(-1, True) for i in range(0, {x}.shape[-1], 2)], -1)",
        "sum({x}[:, :, i] for i in range({x}.shape[2]))[:, :, None]",
        "torch.stack([row.cumsum(-1) for row in {x}.unbind(2)], 2)",
    )
