"""Steps from maps to tokens, vectors and channels-last values, and back; and steps only for such values."""

from __future__ import annotations

import math

from generator.drawing import LAST, MAP, TOKENS, VECTOR, Draw, Unsuitable, Value, word


@word(MAP, 6, to=TOKENS)
def to_tokens(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x}.flatten(2).transpose(1, 2)", "{x}.flatten(2).permute(0, 2, 1)", "torch.flatten({x}, 2).mT"),
        *("{x}.view({x}.shape[0], {c}, -1).transpose(-1, -2)", "{x}.movedim(1, -1).reshape({x}.shape[0], -1, {c})"),
        "{x}.reshape({x}.size(0), {x}.size(1), -1).transpose(2, 1)",
    )


@word(TOKENS, 2, to=MAP)
def from_tokens(d: Draw, v: Value) -> str:
    length = v.shape[1]
    if d.dims == 1:
        return d.form(v, "{x}.transpose(1, 2)", "{x}.permute(0, 2, 1)", "{x}.mT")
    height = max(size for size in range(1, math.isqrt(length) + 1) if length % size == 0)
    return d.form(
        v,
        *("{x}.transpose(1, 2).reshape(-1, {c}, {s})", "{x}.transpose(1, 2).unflatten(2, ({s}))"),
        *(
            "{x}.permute(0, 2, 1).contiguous().view({x}.shape[0], -1, {s})",
            "{x}.mT.reshape({x}.size(0), {x}.size(2), {s})",
        ),
        s=f"{height}, {length // height}" + ", 1" * (d.dims - 2),
    )


@word(MAP, 2.5, to=LAST)
def channels_last(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x}.permute{order}", "torch.permute({x}, {order})", "{x}.movedim(1, -1)", "{x}.permute{order}.contiguous()"),
        order=(0, *d.axes, 1),
    )


@word(LAST, 3, to=MAP)
def channels_first(d: Draw, v: Value) -> str:
    order = (0, d.dims + 1, *range(1, d.dims + 1))
    return d.form(v, "{x}.permute{o}", "{x}.permute({l})", "{x}.movedim(-1, 1)", o=order, l=list(order))


@word(LAST, 1, dims=(2,))
def windows(d: Draw, v: Value) -> str:
    """Partitioned into windows that become separate samples, and merged again, shifted or not."""
    h, w = v.places
    if h % 2 or w % 2:
        raise Unsuitable
    y, names = d.name(), {"h": h, "w": w, "h2": h // 2, "w2": w // 2}
    whole = d.form(v, "{x}", "torch.roll({x}, (-1, -1), dims=(1, 2))")
    cut = d.form(v, ".view(-1, {h2}, 2, {w2}, 2, {c}).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, {c})", **names)
    d.line(f"{y} = {whole}{cut}")
    d.line(
        d.form(
            v,
            *("{y} = $nn.Linear({c}, {c})$({y})", "{y} = F.gelu($nn.Linear({c}, {c})$({y}))"),
            "{y} = {y} + F.scaled_dot_product_attention($nn.Linear({c}, {c})$({y}), {y}, {y})",
            y=y,
        )
    )
    back = ".view(-1, {h2}, {w2}, 2, 2, {c}).permute(0, 1, 3, 2, 4, 5).reshape(-1, {h}, {w}, {c})"
    return y + d.form(v, back, **names)


@word(TOKENS, 0.8)
def class_token(d: Draw, v: Value) -> str:
    return d.form(v, "torch.cat([$1, 1, {c}$.expand({x}.shape[0], -1, -1), {x}], dim=1)")


@word(TOKENS, 1)
def tokens_cut(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("{x}[:, 1:]", "{x}[:, ::2]", "{x}.flip(1)", "{x}[:, :, 1:]", "{x}.roll(1, 1)", "{x}[..., :2]"),
        *("{x}.softmax(1)", "{x}.softmax(-1)", "torch.cat({x}.chunk(2, -1)[::-1], -1)"),
    )


@word(TOKENS, 0.8)
def along_the_tokens(d: Draw, v: Value) -> str:
    """Layers for which tokens are the channels, or the positions of a 1-d map."""
    return d.form(
        v,
        "{x} + $nn.Linear({l}, {l})$({x}.transpose(1, 2)).transpose(1, 2)",
        "$nn.Conv1d({c}, {c}, 3, padding=1)$({x}.transpose(1, 2)).transpose(1, 2)",
        "$nn.Conv1d({l}, {l}, 1)$({x})",
        "$nn.BatchNorm1d({c})$({x}.transpose(1, 2)).transpose(1, 2)",
        l=v.shape[1],
    )


@word(TOKENS, 1.2)
def token_products(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("F.scaled_dot_product_attention({q}({x}), {x}, {x})", "({q}({x}) @ {x}.transpose(1, 2)).softmax(-1) @ {x}"),
        *(
            "torch.einsum('nlc,nmc->nlm', {q}({x}), {x}) @ {x} * 0.1",
            "torch.bmm(torch.bmm({q}({x}), {x}.mT).softmax(2), {x})",
        ),
        "{x} @ torch.softmax({x}.transpose(1, 2) @ {q}({x}), -1)",
        q=d.layer(f"nn.Linear({v.width}, {v.width})"),
    )


@word(MAP, 2, to=VECTOR)
def pooled_to_a_vector(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *(
            "{x}.mean({a})",
            "F.adaptive_avg_pool{n}d({x}, 1).flatten(1)",
            "{x}.amax(dim={a})",
            "{x}.flatten(2).mean(-1)",
        ),
        *("torch.flatten($nn.AdaptiveAvgPool{n}d(1)$({x}), 1)", "F.adaptive_avg_pool{n}d({x}, 1)[:, :{zeros}]"),
        *(
            "F.adaptive_max_pool{n}d({x}, 1).view({x}.size(0), -1)",
            "{x}.flatten(2).max(2)[0]",
            "{x}.flatten(2).norm(dim=2)",
        ),
        *("F.adaptive_avg_pool{n}d({x}, 1){squeezed}", "F.adaptive_avg_pool{n}d({x}, 1).squeeze({a})"),
        **{"zeros": ", 0" * d.dims, "squeezed": ".squeeze(-1)" * d.dims},
    )


@word(MAP, 1, to=VECTOR)
def flattened(d: Draw, v: Value) -> str:
    total = math.prod(v.shape[1:])
    if total > 256:
        raise Unsuitable
    return d.form(
        v,
        *("{x}.flatten(1)", "torch.flatten({x}, 1)", "{x}.view(-1, {total})", "{x}.reshape({x}.shape[0], -1)"),
        *("$nn.Flatten()$({x})", "{x}.view({x}.size(0), -1)"),
        total=total,
    )


@word(TOKENS, 1.5, to=VECTOR)
def one_token(d: Draw, v: Value) -> str:
    return d.form(v, "{x}.mean(1)", "{x}[:, 0]", "{x}.amax(1)", "{x}.sum(dim=1)", "{x}.select(1, 0)", "{x}[:, -1]")


@word(VECTOR, 2, to=MAP)
def spread_to_a_map(d: Draw, v: Value) -> str:
    return d.form(v, "{x}[:, :{nones}]", "{x}.view(-1, {c}{ones})", "{x}.reshape({x}.size(0), -1{ones})")
