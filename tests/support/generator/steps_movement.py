"""Steps that move the values of a map: split, shuffle, reshape, pool, pad; and operations over whole axes."""

from __future__ import annotations

import math

from generator.drawing import MAP, Draw, Unsuitable, Value, word


@word(MAP, 3)
def parts_joined(d: Draw, v: Value) -> str:
    """Split along the channels into parts, each possibly changed, and concatenated again in random order."""
    count, c = d.one_of(2, 2, 3), v.width
    size = math.ceil(c / count)
    sizes = [size] * (c // size) + ([c % size] if c % size else [])
    if len(sizes) != count:
        raise Unsuitable
    cut = d.form(
        v,
        *("{x}.chunk({k}, 1)", "torch.chunk({x}, {k}, dim=1)", "{x}.split({s}, 1)", "torch.split({x}, {s}, dim=1)"),
        *(
            "{x}.split({all}, dim=1)",
            "torch.split({x}, {uneven}, 1)",
            "{x}.split({uneven}, 1)",
            "list({x}.chunk({k}, 1))",
        ),
        "{x}.tensor_split({k}, 1)",
        **{"k": count, "s": size, "all": sizes, "uneven": [1] * (count - 1) + [c - count + 1]},
    )
    if d.chance(0.2):
        every = d.name()
        d.line(f"{every} = {cut}")
        return f"torch.cat([p * (i + 1) for i, p in enumerate({every})], 1)"
    names = [d.name() for _ in range(count)]
    d.line(f"{', '.join(names)} = {cut}")
    changed = [d.one_of("{}", "F.relu({})", "{} * 2", "torch.sigmoid({})").format(name) for name in names]
    d.rng.shuffle(changed)
    return f"torch.cat([{', '.join(changed)}], 1)"


@word(MAP, 2)
def parts(d: Draw, v: Value) -> tuple[str, int]:
    """Split along the channels; later steps read the parts."""
    if v.width < 2:
        raise Unsuitable
    some = d.rng.randint(1, v.width - 1)
    return d.form(
        v,
        *("{x}.chunk(2, 1)", "list({x}.chunk(2, 1))", "{x}.split([{k}, {rest}], 1)", "({x}[:, :{k}], {x}[:, {k}:])"),
        *("({x}.narrow(1, 0, {k}), {x}.narrow(1, {k}, {rest}))", "({x}[:, ::2], {x}[:, 1::2])"),
        **{"k": some, "rest": v.width - some},
    ), 2


@word(MAP, 1.5)
def sliced(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x}[:, 1:]", "{x}[:, :-1]", "{x}[:, ::2]", "{x}[:, : {x}.shape[1] // 2]", "{x}[:, {x}.shape[1] // 2 :]"),
        *("{x}[:, :, 1:]", "{x}[..., :-1]", "{x}[:, :, ::2]", "{x}[:, :, : {x}.shape[2] - 1]", "{x}[:, :2, 1:]"),
        *("{x}.narrow(1, 0, 2)", "{x}.narrow(2, 1, 2)", "{x}.flip(1)", "{x}.flip(-1)", "{x}.flip(2).flip(1)"),
        *("{x}.roll(1, 1)", "torch.roll({x}, 1, dims=2)", "torch.flip({x}, [1])", "{x}[:, [0, 1]]", "{x}[:, -1:]"),
        *("{x}.select(2, 0).unsqueeze(2)", "{x}.unbind(2)[1].unsqueeze(2)", "torch.stack({x}.unbind(1)[::-1], 1)"),
        *("{x}[:, 0:1].expand_as({x})", "{x}[:, :1] * {x}", "{x}.index_select(1, torch.tensor([1, 0]))"),
    )


@word(MAP, 1.5)
def channel_shuffle(d: Draw, v: Value) -> str:
    g = d.part(v.width)
    if d.chance(0.5):
        n, b, *sizes = (d.name("n") for _ in range(2 + d.dims))
        spatial = ", ".join(sizes)
        d.line(d.form(v, "{all} = {x}.shape", "{all} = {x}.size()", all=f"{n}, {b}, {spatial}"))
        return d.form(
            v,
            "{x}.view({n}, {g}, {b} // {g}, {s}).transpose(1, 2).contiguous().view({n}, {b}, {s})",
            "{x}.reshape({n}, {g}, -1, {s}).transpose(1, 2).reshape({n}, -1, {s})",
            "{x}.view({n}, {b} // {g}, {g}, {s}).swapaxes(1, 2).flatten(1, 2)",
            **{"n": n, "b": b, "s": spatial, "g": g},
        )
    return d.form(
        v,
        "{x}.reshape(-1, {g}, {rest}, {places}).transpose(1, 2).flatten(1, 2)",
        "torch.channel_shuffle({x}, {g})",
        "{x}.unflatten(1, ({g}, {rest})).transpose(1, 2).reshape({x}.shape)",
        **{"g": g, "rest": v.width // g},
    )


@word(MAP, 1.5)
def grouped_view(d: Draw, v: Value) -> str:
    """A computation on a grouped view of the channels."""
    g = d.part(v.width)
    view = d.form(v, "{x}.view({x}.shape[0], {g}, {rest}, {places})", "{x}.unflatten(1, ({g}, -1))",
                  g=g, rest=v.width // g)  # fmt: skip
    return d.form(
        v,
        *("{view}.sum(1)", "{view}.sum(2)", "{view}.amax(2)", "{view}.mean(dim=1)", "{view}[:, 0]", "{view}[:, :, -1]"),
        *("{view}.max(2).values", "{view}.softmax(1).flatten(1, 2)", "{view}.softmax(2).reshape({x}.shape)"),
        "({view} * ${g}, 1{ones}$).flatten(1, 2)",
        view=view,
        g=g,
    )


@word(MAP, 1)
def view_and_back(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x}.flatten(2).softmax(-1).view({x}.shape)", "{x}.flatten(2).view(-1, {c}, {places})"),
        *("{x}.flatten(1).view(-1, {c}, {places})", "{x}.flatten(1).unflatten(1, ({c}, {places}))"),
        *("{x}.unsqueeze(2).squeeze(2)", "{x}[:, None].sum(1)", "{x}.unsqueeze(1).mean(1)", "{x}[None][0]"),
        *(
            "{x}.movedim(1, -1).movedim(-1, 1)",
            "{x}.transpose(1, 2).transpose(1, 2)",
            "{x}.swapaxes(1, 2).swapaxes(2, 1)",
        ),
        "{x}.reshape({x}.size(0), {x}.size(1), -1).reshape_as({x})",
        "F.layer_norm({x}.flatten(2), ({size},), eps=0.1).view({x}.shape)",
        size=math.prod(v.places),
    )


@word(MAP, 0.8)
def batch_mixed(d: Draw, v: Value) -> str:
    """Reshaped so that samples and channels share an axis, and back."""
    y, together = d.name(), d.chance(0.4)
    mixed = d.form(
        v, "{x}.reshape(1, -1, {places})" if together else "{x}.reshape({x}.shape[0] * {x}.shape[1], 1, {places})"
    )
    forms = [
        "F.relu({m})",
        "F.avg_pool{n}d({m}, 3, 1, 1)",
        "{m} * 2",
        "F.interpolate({m}, scale_factor=2)",
        "{m} - 0.5",
    ]
    if not together:
        forms += ["F.conv{n}d({m}, $1, 1{threes}$, padding=1)", "$nn.Conv{n}d(1, 1, 3, padding=1)$({m})"]
    d.line(f"{y} = " + d.form(v, *forms, m=mixed, threes=", 3" * d.dims))
    return d.form(v, "{y}.view({x}.shape[0], {c}, *{y}.shape[2:])", "{y}.view(*{x}.shape[:2], *{y}.shape[2:])", y=y)


@word(MAP, 4)
def pooled(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("$nn.MaxPool{n}d(2)$({x})", "$nn.MaxPool{n}d(3, 2, 1)$({x})", "$nn.AvgPool{n}d(2)$({x})"),
        *("$nn.AvgPool{n}d(3, 1, 1)$({x})", "$nn.AvgPool{n}d(3, 1, 1, count_include_pad=False)$({x})"),
        *("$nn.AvgPool{n}d(3, 2, ceil_mode=True)$({x})", "$nn.AdaptiveAvgPool{n}d(2)$({x})"),
        *("$nn.AdaptiveMaxPool{n}d(2)$({x})", "$nn.AdaptiveAvgPool{n}d(1)$({x})", "F.max_pool{n}d({x}, 2)"),
        *("F.avg_pool{n}d({x}, 3, 1, 1)", "F.adaptive_avg_pool{n}d({x}, 2)", "F.max_pool{n}d({x}, 3, 1, 1)"),
        *("F.adaptive_avg_pool{n}d({x}, {x}.shape[2] // 2)", "F.adaptive_max_pool{n}d({x}, 1)"),
        "F.lp_pool{n}d({x}.abs() + 0.1, 2, 2)",
    )


@word(MAP, 2)
def resized(d: Draw, v: Value) -> str:
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[d.dims]
    return d.form(
        v,
        *("F.interpolate({x}, scale_factor=2)", "F.interpolate({x}, size={x}.shape[2:])"),
        *(
            'F.interpolate({x}, scale_factor=2, mode="{mode}", align_corners=False)',
            "$nn.Upsample(scale_factor=2)$({x})",
        ),
        *('F.interpolate({x}, size={sizes}, mode="{mode}")', "{x}.repeat_interleave(2, dim=2)"),
        **{"mode": mode, "sizes": [4] * d.dims},
    )


@word(MAP, 2)
def resized_to_another(d: Draw, v: Value) -> str:
    """As in a U-Net: resized to an earlier map, and joined with it."""
    u = d.another(v)
    forms = ["torch.cat([{y}, {u}], 1)", "torch.cat(({u}, {y}), 1)"] + ["{y} + {u}"] * 2 * (u.width == v.width)
    y = d.form(v, "F.interpolate({x}, size={u}.shape[2:])", "F.interpolate({x}, {u}.shape[-{n}:])", u=u.name)
    return d.form(v, *forms, y=y, u=u.name)


@word(MAP, 1.5)
def padded(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("F.pad({x}, ({sides}))", "F.pad({x}, ({sides}), value=0.5)", 'F.pad({x}, ({sides}), mode="replicate")'),
        *(
            'F.pad({x}, ({sides}), mode="reflect")',
            "F.pad({x}, ({none}, 1, 2))",
            "F.pad({x}, ({none}, 0, 2))[:, :, ::2]",
        ),
        *("$nn.ConstantPad{n}d(1, 0.5)$({x})", "$nn.ZeroPad{n}d(1)$({x})", "$nn.ReflectionPad{n}d(1)$({x})"),
        *("$nn.CircularPad{n}d(1)$({x})", "F.pad({x}, ({sides}, 1, 1))", 'F.pad({x}, ({sides}), mode="circular")'),
        sides=", ".join(str(d.rng.randint(0, 2)) for _ in range(2 * d.dims)),
        none=", ".join("0" * 2 * d.dims),
    )


@word(MAP, 1.5, dims=(2,))
def pixel_shuffle(d: Draw, v: Value) -> str:
    h, w = v.places
    if v.width % 4 == 0 and d.chance(0.7):
        return d.form(
            v,
            *("F.pixel_shuffle({x}, 2)", "$nn.PixelShuffle(2)$({x})"),
            "{x}.view(-1, {q}, 2, 2, {h}, {w}).permute(0, 1, 4, 2, 5, 3).reshape(-1, {q}, {h} * 2, {w} * 2)",
            **{"q": v.width // 4, "h": h, "w": w},
        )
    return d.form(
        v,
        *("F.pixel_unshuffle({x}, 2)", "$nn.PixelUnshuffle(2)$({x})"),
        "torch.cat([{x}[:, :, ::2, ::2], {x}[:, :, 1::2, ::2], {x}[:, :, ::2, 1::2], {x}[:, :, 1::2, 1::2]], 1)",
    )


@word(MAP, 1.5)
def over_channels(d: Draw, v: Value) -> str:
    """An operation over all channels of a position."""
    return d.form(
        v,
        *("{x}.softmax(1)", "F.softmax({x}, dim=1)", "F.normalize({x}, dim=1, eps=0.1)", "F.normalize({x}, eps=0.1)"),
        *("{x} * {x}.max(1, keepdim=True).values", "{x} + {x}.max(dim=1, keepdim=True)[0]", "F.log_softmax({x}, 1)"),
        *("{x} - torch.logsumexp({x}, 1, keepdim=True)", "{x} * {x}.std(1, keepdim=True)", "torch.cumsum({x}, 1)"),
        *("{x} * {x}.norm(dim=1, keepdim=True)", "{x}.sort(1).values", "{x} * ({x}.mean(1, keepdim=True) > 0)"),
        *("torch.cat([{x}, {x}.mean(1, keepdim=True)], 1)", "torch.cat([{x}.amax(1, True), {x}.mean(1, True)], 1)"),
        *("{x} * {x}.prod(1, keepdim=True)", "$nn.Softmax(1)$({x})", "{x} - {x}.mean(1, keepdim=True)"),
    )


@word(MAP, 1.2)
def over_the_map(d: Draw, v: Value) -> str:
    """An operation over all positions of a channel."""
    return d.form(
        v,
        *("{x}.softmax({i})", "F.normalize({x}, dim={i}, eps=0.1)", "{x}.log_softmax({i})", "torch.cumsum({x}, {i})"),
        *("{x}.sum({i}, keepdim=True)", "{x}.mean({i}, True)", "({x}.var({a}, keepdim=True) + 0.1).sqrt()"),
        *("{x}.max({i}, keepdim=True)[0]", "{x}.min({i}, keepdim=True).values", "{x}.norm(dim={a}, keepdim=True)"),
        *(
            "{x}.mean({a}, keepdim=True).expand(-1, -1, {places})",
            "{x}.repeat(1, 1{twos})",
            "{x}.mean({i}, True).expand_as({x})",
        ),
        *("{x}.repeat(1, 2{ones})", "{x}.tile(1, 2{ones})", "{x}.amax({a}, True).expand({x}.shape)"),
        i=d.one_of(2, -1),
        twos=", 2" * d.dims,
    )
