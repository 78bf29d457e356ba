"""Steps that call layers: convolutions of every kind, norms, activations, blocks."""

from __future__ import annotations

from generator import attention, blocks, linears, own
from generator.drawing import MAP, TOKENS, VECTOR, Draw, Unsuitable, Value, word


def options(d: Draw, v: Value, width: int) -> tuple[int, str]:
    """Kernel, stride, padding, dilation, groups and bias of a convolution, and its number of outputs."""
    draw, groups = d.rng.random(), 1
    if draw < 0.15:
        groups, width = v.width, v.width * d.one_of(1, 1, 1, 2)
    elif draw < 0.3:
        groups = d.part(v.width)
        width = groups * d.rng.randint(1, 3)
    kernel, dilation = d.one_of(1, 2, 3, 3, 3), d.one_of(1, 1, 1, 2)
    if d.chance(0.2):
        text = f"{kernel}, stride=2" + d.one_of("", f", padding={kernel // 2}")
    else:
        same = ', padding="same"' if kernel != 2 else ""
        text = f"{kernel}" + d.one_of("", same, *[f", padding={(kernel - 1) * dilation // 2}"] * 4)
    if "padding" in text and d.chance(0.2):
        text += f', padding_mode="{d.one_of("reflect", "replicate", "circular")}"'
    text += f", dilation={dilation}" if dilation > 1 else ""
    text += f", groups={groups}" if groups > 1 else ""
    return width, text + d.some({"bias=False": 0.3})


@word(MAP, 12)
def convolution(d: Draw, v: Value) -> str:
    width, text = options(d, v, d.width(v))
    conv = f"nn.Conv{d.dims}d({v.width}, {width}, {text})"
    if d.chance(0.3):
        activation = d.one_of("nn.ReLU(inplace=True)", "nn.SiLU()", "nn.Identity()")
        conv = f"nn.Sequential({conv}, nn.BatchNorm{d.dims}d({width}), {activation})"
    return d.one_of("{}", "{}", "F.relu({})").format(d.call(d.layer(conv), v))


@word(MAP, 2)
def pointwise_convolution(d: Draw, v: Value) -> str:
    return d.call(d.layer(f"nn.Conv{d.dims}d({v.width}, {d.width(v)}, 1)"), v)


@word(MAP, 4)
def own_convolution(d: Draw, v: Value) -> str:
    width, text = options(d, v, d.width(v))
    return d.call(d.layer(f"own.{d.one_of(*own.CONV_HABITS).__name__}{d.dims}d({v.width}, {width}, {text})"), v)


@word(MAP, 0.6)
def weight_norm(d: Draw, v: Value) -> str:
    return parametrized(d, v, "weight_norm")


@word(MAP, 0.6)
def spectral_norm(d: Draw, v: Value) -> str:
    return parametrized(d, v, "spectral_norm")


def parametrized(d: Draw, v: Value, kind: str) -> str:
    width, text = options(d, v, d.width(v))
    return d.call(d.layer(f"parametrizations.{kind}(nn.Conv{d.dims}d({v.width}, {width}, {text}))"), v)


@word(MAP, 1.5)
def transposed_convolution(d: Draw, v: Value) -> str:
    groups = d.part(v.width) if d.chance(0.3) else 1
    width = groups * d.rng.randint(1, 4)
    text = d.one_of("2, stride=2", "3, padding=1", "3, stride=2, padding=1, output_padding=1", "1")
    text += f", groups={groups}" + d.some({"bias=False": 0.3})
    return d.call(d.layer(f"nn.ConvTranspose{d.dims}d({v.width}, {width}, {text})"), v)


@word("map tokens vector last", 1.5)
def called_again(d: Draw, v: Value) -> str:
    """A layer that was called before, on another value."""
    fitting = [layer for layer, before in d.called if before.width == v.width and before.kind == v.kind]
    if not fitting:
        raise Unsuitable
    return f"{d.one_of(*fitting)}({v.name})"


@word("map vector", 6)
def batch_norm(d: Draw, v: Value) -> str:
    dims = d.dims if v.kind == MAP else 1
    layer = d.layer(f"nn.BatchNorm{dims}d({v.width}{d.some({'affine=False': 0.1, 'eps=1e-2': 0.2})})")
    return d.one_of("{}", "F.relu({})").format(d.call(layer, v))


@word(MAP, 0.6)
def synchronised_batch_norm(d: Draw, v: Value) -> str:
    return d.call(d.layer(f"nn.SyncBatchNorm({v.width})"), v)


@word(MAP, 2)
def own_batch_norm(d: Draw, v: Value) -> str:
    return d.call(d.layer(f"own.{d.one_of(*own.NORM_HABITS).__name__}{d.dims}d({v.width})"), v)


@word(MAP, 0.6)
def batch_norm_as_a_function(d: Draw, v: Value) -> str:
    norm = d.layer(f"nn.BatchNorm{d.dims}d({v.width})")
    tensors = f"{norm}.running_mean, {norm}.running_var, {norm}.weight, {norm}.bias"
    return f"F.batch_norm({v.name}, {tensors}, self.training, 0.1, 1e-5)"


@word(MAP, 1)
def instance_norm(d: Draw, v: Value) -> str:
    return d.call(d.layer(f"nn.InstanceNorm{d.dims}d({v.width}, eps=0.1{d.some({'affine=True': 0.6})})"), v)


@word(MAP, 1.2)
def group_norm(d: Draw, v: Value) -> str:
    groups = d.part(v.width) if v.width > 1 and d.chance(0.6) else 1
    return d.form(
        v,
        *("$nn.GroupNorm({g}, {c}, eps=0.1)$({x})", "$nn.GroupNorm({g}, {c}, eps=0.1, affine=False)$({x})"),
        "F.group_norm({x}, {g}, ${c}$, ${c}$, eps=0.1)",
        g=groups,
    )


@word(MAP, 0.5)
def norm_over_everything(d: Draw, v: Value) -> str:
    return d.form(v, "$nn.LayerNorm([{c}, {places}], eps=0.1)$({x})", "F.layer_norm({x}, {x}.shape[1:], eps=0.1)")


@word(MAP, 0.3)
def local_response_norm(d: Draw, v: Value) -> str:
    return d.form(v, "$nn.LocalResponseNorm(3)$({x})", "F.local_response_norm({x}, 2)")


ACTIVATIONS = (
    *("ReLU()", "ReLU(inplace=True)", "ReLU6()", "LeakyReLU(0.2)", "ELU()", "GELU()", "SiLU()", "SiLU(inplace=True)"),
    *("Mish()", "Sigmoid()", "Tanh()", "Hardswish()", "Hardsigmoid()", "Hardtanh()", "Softplus()", "Softsign()"),
    *("LogSigmoid()", "Threshold(0.1, 0.3)", "Softshrink(0.2)", "Tanhshrink()", "CELU()", "SELU()", "Identity()"),
)


@word("map tokens vector last", 5)
def activation_module(d: Draw, v: Value) -> str:
    return d.call(d.layer(f"nn.{d.one_of(*ACTIVATIONS)}"), v)


@word("map tokens vector last", 5)
def activation_function(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("F.relu({x})", "F.relu({x}, inplace=True)", "F.leaky_relu({x}, 0.1)", "F.gelu({x})", "F.silu({x})"),
        *("{x}.relu()", "{x}.sigmoid()", "torch.sigmoid({x})", "{x}.abs()", "{x}.square()", "{x} ** 2", "{x}.pow(2)"),
        *("{x}.clamp(-1, 1)", "{x}.clamp(min=0.1)", "torch.clamp({x}, max=1.5)", "-{x}", "{x} * 2", "0.5 + {x}"),
        *("1 - {x}", "{x} / 3", "2 / (3 + {x}.abs())", "torch.cos({x})", "{x}.sin()", "torch.exp(-{x}.abs())"),
        *("({x}.abs() + 0.1).sqrt()", "({x}.square() + 0.2).rsqrt()", "{x}.abs().log1p()", "F.hardswish({x})"),
        *("F.softplus({x})", "torch.erf({x})", "{x}.atan()", "F.relu6({x} + 3) / 6", "{x} * F.relu6({x} + 3) / 6"),
        *("{x} * torch.sigmoid(1.7 * {x})", "{x} * torch.tanh(F.softplus({x}))", "{x} + {x}.sin()", "torch.tanh({x})"),
        *("torch.mul({x}, 1.5)", "torch.add({x}, 0.25)", "torch.sub({x}, 0.5)", "{x}.add(1)", "{x}.mul(0.5)"),
        *("{x}.clamp_min(0)", "{x}.to({x}.dtype)", "F.elu({x}, 0.5)", "torch.square({x})", "{x}.type_as({x})"),
    )


@word("map vector", 1)
def prelu(d: Draw, v: Value) -> str:
    return d.form(v, "$nn.PReLU()$({x})", "$nn.PReLU({c})$({x})", "F.prelu({x}, ${c}$)", "F.prelu({x}, $1$)")


@word("map tokens vector last", 0.8)
def glu(d: Draw, v: Value) -> str:
    axis = 1 if v.kind in (MAP, VECTOR) else -1
    return d.form(v, "F.glu({x}, {axis})", "$nn.GLU({axis})$({x})", "F.glu({x}, dim={axis})", axis=axis)


@word("map tokens vector last", 1)
def dropout(d: Draw, v: Value) -> str:
    forms = ["$nn.Dropout(0.3)$({x})", "F.dropout({x}, 0.2, self.training)", "F.dropout({x}, training=self.training)"]
    if v.kind == MAP and d.dims == 2:
        forms += ["$nn.Dropout2d(0.2)$({x})", "F.dropout2d({x}, 0.2, training=self.training)"]
    return d.form(v, *forms)


@word(MAP, 7, dims=(2,))
def block(d: Draw, v: Value) -> str:
    return a_block(d, v, *blocks.MAPS, *attention.MAPS)


@word(TOKENS, 5)
def token_block(d: Draw, v: Value) -> str:
    return a_block(d, v, *blocks.TOKENS, *attention.TOKENS)


def a_block(d: Draw, v: Value, *kinds: type) -> str:
    kind = d.one_of(*kinds)
    return d.call(d.layer(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}({v.width})", "block"), v)


@word("tokens vector last", 5)
def linear(d: Draw, v: Value) -> str:
    layer = d.layer(f"nn.Linear({v.width}, {d.width(v)}{d.some({'bias=False': 0.2})})")
    return d.one_of("{}", "F.relu({})").format(d.call(layer, v))


@word("tokens vector last", 2)
def own_linear(d: Draw, v: Value) -> str:
    return d.call(d.layer(f"linears.{d.one_of(*linears.LINEARS).__name__}({v.width}, {d.width(v)})"), v)


@word("tokens vector last", 3)
def layer_norm(d: Draw, v: Value) -> str:
    return d.form(
        v,
        *("$nn.LayerNorm({c}, eps=0.1)$({x})", "$nn.LayerNorm({c}, eps=0.1)$({x})", "$nn.RMSNorm({c}, eps=0.1)$({x})"),
        *("F.layer_norm({x}, ({c},), ${c}$, ${c}$, 0.1)", "F.layer_norm({x}, ({c},), eps=0.1)"),
        "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 0.1) * ${c}$",
    )


@word(MAP, 0.8)
def training_only(d: Draw, v: Value) -> str:
    """An operation that happens only in training."""
    out = d.name()
    d.line(f"{out} = {v.name}")
    d.line("if self.training:")
    change = d.form(
        v,
        *("{o} + 0.1 * torch.randn_like({o})", "{o} * 1.1", "{o} * (torch.rand({o}.shape[0], 1{ones}) > 0.2)"),
        *("{o} * $nn.Dropout(0.5)$(torch.ones_like({o}))", "{o} + torch.normal(0.0, 0.1, {o}.shape)"),
        o=out,
    )
    d.line(f"    {out} = {change}")
    return d.one_of(out, f"{out} + 0.5", f"F.relu({out})")
